"""Accuracy of rank classification by prompt, over the prompts of a data set, and over data sets, as numbers and as a table."""

import array
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lab.evaluation.questions import NORMALIZATIONS, Answer, Question

CHANCE = "chance"  # expected accuracy of guessing
CONSTANT = "constant"  # accuracy of always giving the most frequent answer


def report(questions: Iterable[Question], answers: Iterable[Answer]) -> dict:
    """Returns the accuracies of every data set over its prompts, and their average over data sets.

    Returns:
      {"datasets": {data set: {"prompts": {prompt: accuracies}, "over_prompts": {normalization: statistics}}},
      "average(a+b)": {normalization: mean over data sets of the medians over prompts (Wang et al. 2022)},
      "average_of_means(a+b)": {normalization: mean over data sets of the means over prompts (Wei et al. 2022)}}.
      Beside the normalizations are "chance", the expected accuracy of guessing, and "constant", the accuracy of always giving
      the most frequent answer, if all questions have the same number of choices and one right answer. The key of an average
      lists its data sets, so that a missing data set changes the key and not silently the number.
    """
    tallies: dict[str, dict[str, Tally]] = {}
    for question, answer in zip(questions, answers, strict=True):
        tallies.setdefault(question.dataset, {}).setdefault(question.prompt, Tally()).add(question, answer)
    datasets = {}
    for dataset, prompts in tallies.items():
        by_prompt = {prompt: tally.result() for prompt, tally in prompts.items()}
        names = (*NORMALIZATIONS, CHANCE, *([CONSTANT] if all(CONSTANT in values for values in by_prompt.values()) else []))
        datasets[dataset] = {
            "prompts": by_prompt,
            "over_prompts": {name: summarize([values[name] for values in by_prompt.values()]) for name in names},
        }
    if not datasets:
        return {}
    average = lambda statistic: {
        name: statistics.fmean(d["over_prompts"][name][statistic] for d in datasets.values())
        for name in (*NORMALIZATIONS, CHANCE, CONSTANT)
        if all(name in d["over_prompts"] for d in datasets.values())
    }
    listed = "+".join(sorted(datasets))
    return {"datasets": datasets, f"average({listed})": average("median"), f"average_of_means({listed})": average("mean")}


def add_best_prompts(report: Mapping[str, Any], chosen_on: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Adds to a report the accuracy of the prompt that is best on another split, for each data set (Wei et al. 2022).

    Args:
      report: report of the evaluated split.
      chosen_on: report of the other split. Of equal prompts the first is chosen. Log-probabilities are sums.
      split: name of the other split.
    """
    best = {}
    for dataset, result in chosen_on["datasets"].items():
        if dataset in report["datasets"]:
            prompts = {name: values["sum"] for name, values in result["prompts"].items()}
            prompt = max(prompts, key=lambda name: prompts[name])
            accuracy = report["datasets"][dataset]["prompts"].get(prompt, {}).get("sum", math.nan)
            best[dataset] = {"prompt": prompt, split: prompts[prompt], "sum": accuracy}
    average = {f"average({'+'.join(sorted(best))})": statistics.fmean(b["sum"] for b in best.values())} if best else {}
    return {**report, f"best_on_{split}": {**best, **average}}


def table(report: Mapping[str, Any]) -> str:
    """Returns a report as a text table in percent: one line per data set, and one for the averages."""
    percent = lambda value: f"{100 * value:.1f}"
    columns = ("token_mean", "character_mean", CHANCE, CONSTANT)
    rows: list[tuple[str, ...]] = [
        (
            "data set",
            "prompts",
            "median",
            "mean",
            "lowest",
            "highest",
            "quartiles",
            "per token",
            "per character",
            "chance",
            "constant",
        )
    ]
    for name, result in report["datasets"].items():
        over_prompts = result["over_prompts"]
        by_sum = over_prompts["sum"]
        spread = [percent(by_sum[key]) for key in ("median", "mean", "lowest", "highest", "interquartile_range")]
        others = [percent(over_prompts[key]["median"]) if key in over_prompts else "" for key in columns]
        rows.append((name, str(by_sum["prompts"]), *spread, *others))
    medians, means = (
        next(report[key] for key in report if key.startswith(start)) for start in ("average(", "average_of_means(")
    )
    others = [percent(medians[key]) if key in medians else "" for key in columns]
    rows.append(("average", "", percent(medians["sum"]), percent(means["sum"]), "", "", "", *others))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for key, best in report.items():
        if key.startswith("best_on_"):
            lines.append(f"prompts chosen on {key.removeprefix('best_on_')}:")
            lines += [
                f"  {name}: {percent(value['sum'] if isinstance(value, dict) else value)}" for name, value in best.items()
            ]
    return "\n".join(lines)


def accuracies(questions: Iterable[Question], answers: Iterable[Answer]) -> dict[str, float]:
    """Returns the accuracies of questions of one task. See `Tally.result`."""
    tally = Tally()
    for question, answer in zip(questions, answers, strict=True):
        tally.add(question, answer)
    return tally.result()


class Tally:
    """Running counts of right answers. A few numbers per question stay in memory."""

    def __init__(self):
        self._examples = self._ties = self._without_number = self._cut = 0
        self._right, self._total, self._guessed = dict.fromkeys(NORMALIZATIONS, 0.0), 0.0, 0.0
        self._classes: int | None = None  # number of choices if all questions have the same, with one right, else 0
        self._labels, self._weights = array.array("h"), array.array("d")
        self._picks = {name: array.array("h") for name in NORMALIZATIONS}
        self._odds = {name: array.array("d") for name in NORMALIZATIONS}  # log-odds of the second of two choices

    def add(self, question: Question, answer: Answer) -> None:
        self._examples += 1
        self._ties += bool(answer.ties)
        self._without_number += answer.picks["sum"] is None
        self._cut += answer.cut > 0
        self._total += question.weight
        self._guessed += question.weight * len(question.labels) / len(question.choices)
        for name in NORMALIZATIONS:
            self._right[name] += question.weight * (answer.picks[name] in question.labels)
        classes = len(question.choices) if len(question.labels) == 1 else 0
        self._classes = classes if self._classes in (None, classes) else 0
        if not self._classes:
            return
        self._labels.append(question.labels[0])
        self._weights.append(question.weight)
        for name in NORMALIZATIONS:
            self._picks[name].append(-1 if answer.picks[name] is None else answer.picks[name])
            if classes == 2:
                values = answer.values(name)
                self._odds[name].append(values[1] - values[0])

    def result(self) -> dict[str, float]:
        """Returns weighted accuracies, and counts of examples, ties, NaN and truncations in scoring.

        The accuracies are those of each normalization, of guessing and of the best constant answer.

        If all questions have the same number of choices and one right answer, it also returns what
        `t5.evaluation.metrics.rank_classification` reports, by normalization, as shares: `f1` (of the second of two choices,
        or the mean over more choices), and for two choices `auc_roc` and `auc_pr` if both labels occur.
        """
        weight = self._total or math.nan
        more = {"examples": self._examples, "ties": self._ties, "without_number": self._without_number, "cut": self._cut}
        shares = {name: self._right[name] / weight for name in NORMALIZATIONS}
        return {**shares, CHANCE: self._guessed / weight, **self._constant(), **more, **self._by_class()}

    def _constant(self) -> dict[str, float]:
        """Returns the accuracy of the best constant answer if questions have the same number of choices, one of them right."""
        if not self._classes or not self._total:
            return {}
        return {CONSTANT: float(np.max(np.bincount(self._labels, self._weights)) / self._total)}

    def _by_class(self) -> dict[str, float]:
        from sklearn import metrics  # importing it takes a second

        if not self._classes or not self._examples:
            return {}
        labels, weights = np.array(self._labels), np.array(self._weights)
        results: dict[str, float] = {}
        for name in NORMALIZATIONS:
            picks, suffix = np.array(self._picks[name]), f"_{name}"
            average, classes = ("binary", [1]) if self._classes == 2 else ("macro", list(range(self._classes)))
            options = dict(
                labels=classes if average == "macro" else None, average=average, sample_weight=weights, zero_division=0
            )
            picks = np.where(picks < 0, 1 - labels if average == "binary" else -1, picks)  # no answer counts as wrong
            results[f"f1{suffix}"] = float(metrics.f1_score(labels, picks, **options))
            odds = np.array(self._odds[name])
            if self._classes == 2 and len(set(self._labels)) == 2 and np.isfinite(odds).all():
                results[f"auc_roc{suffix}"] = float(metrics.roc_auc_score(labels, odds, sample_weight=weights))
                results[f"auc_pr{suffix}"] = float(metrics.average_precision_score(labels, odds, sample_weight=weights))
        return results


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Returns median, mean and spread over prompts. Quartiles are inclusive, as in `statistics.quantiles`."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "lowest": min(values),
        "highest": max(values),
        "interquartile_range": quartiles[2] - quartiles[0],
        "prompts": len(values),
    }
