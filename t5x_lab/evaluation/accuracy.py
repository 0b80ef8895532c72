"""How often rankings are right: by prompt, over the prompts of a data set, and over data sets; as numbers and as a table."""

import array
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lab.evaluation.rank import NORMALIZATIONS, Answer, Question

CHANCE = "chance"  # what guessing is expected to score


def report(questions: Iterable[Question], found: Iterable[Answer]) -> dict:
    """Accuracies of every data set, over its prompts, and their average over data sets.

    Returns:
      {"datasets": {data set: {"prompts": {prompt: accuracies}, "over_prompts": {normalization: statistics}}},
      "average(a+b)": {normalization: mean over the data sets of their medians over prompts (Wang et al. 2022)},
      "average_of_means(a+b)": the same of their means (Wei et al. 2022)}; "chance", what guessing is expected to score, stands
      beside the normalizations. The name of an average lists its data sets, so that one which is missing changes the name and
      not silently the number.
    """
    tallies: dict[str, dict[str, Tally]] = {}
    for question, mine in zip(questions, found, strict=True):
        tallies.setdefault(question.dataset, {}).setdefault(question.prompt, Tally()).add(question, mine)
    datasets = {}
    for dataset, prompts in tallies.items():
        by_prompt = {prompt: tally.result() for prompt, tally in prompts.items()}
        datasets[dataset] = {
            "prompts": by_prompt,
            "over_prompts": {name: spread([a[name] for a in by_prompt.values()]) for name in (*NORMALIZATIONS, CHANCE)},
        }
    if not datasets:
        return {}
    of = lambda which: {
        name: statistics.fmean(d["over_prompts"][name][which] for d in datasets.values()) for name in (*NORMALIZATIONS, CHANCE)
    }
    listed = "+".join(sorted(datasets))
    return {"datasets": datasets, f"average({listed})": of("median"), f"average_of_means({listed})": of("mean")}


def with_best_prompts(report: Mapping[str, Any], chosen_on: Mapping[str, Any], split: str) -> dict[str, Any]:
    """A report with the accuracy, by the sum, of each data set's prompt that is best on another split (Wei et al. 2022).

    Args:
      report: of the split that counts.
      chosen_on: of the other split; of equal prompts the first is taken.
      split: its name.
    """
    best = {}
    for dataset, found in chosen_on["datasets"].items():
        if dataset in report["datasets"]:
            prompts = {name: values["sum"] for name, values in found["prompts"].items()}
            prompt = max(prompts, key=lambda name: prompts[name])
            accuracy = report["datasets"][dataset]["prompts"].get(prompt, {}).get("sum", math.nan)
            best[dataset] = {"prompt": prompt, split: prompts[prompt], "sum": accuracy}
    average = {f"average({'+'.join(sorted(best))})": statistics.fmean(b["sum"] for b in best.values())} if best else {}
    return {**report, f"best_on_{split}": {**best, **average}}


def table(report: Mapping[str, Any]) -> str:
    """A report as a table for people, in percent: a line for each data set, and one for each average."""
    percent = lambda value: f"{100 * value:.1f}"
    rows: list[tuple[str, ...]] = [
        ("data set", "prompts", "median", "mean", "lowest", "highest", "quartiles", "per token", "per character", "chance")
    ]
    for name, found in report["datasets"].items():
        over = found["over_prompts"]
        by = over["sum"]
        of_sum = [percent(by[key]) for key in ("median", "mean", "lowest", "highest", "interquartile_range")]
        others = [percent(over[key]["median"]) for key in ("token_mean", "character_mean", CHANCE)]
        rows.append((name, str(by["prompts"]), *of_sum, *others))
    medians, means = (
        next(report[key] for key in report if key.startswith(start)) for start in ("average(", "average_of_means(")
    )
    others = [percent(medians[key]) for key in ("token_mean", "character_mean", CHANCE)]
    rows.append(("average", "", percent(medians["sum"]), percent(means["sum"]), "", "", "", *others))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    for key, best in report.items():
        if key.startswith("best_on_"):
            lines.append(f"the prompts that are best on {key.removeprefix('best_on_')}:")
            lines += [
                f"  {name}: {percent(found['sum'] if isinstance(found, dict) else found)}" for name, found in best.items()
            ]
    return "\n".join(lines)


def accuracies(questions: Iterable[Question], found: Iterable[Answer]) -> dict[str, float]:
    """Of questions of one kind; see `Tally.result`."""
    tally = Tally()
    for question, mine in zip(questions, found, strict=True):
        tally.add(question, mine)
    return tally.result()


class Tally:
    """Counts answers as they come; of each question a few numbers stay in memory."""

    def __init__(self):
        self._examples = self._ties = self._without_number = self._cut = 0
        self._right, self._total, self._guessed = dict.fromkeys(NORMALIZATIONS, 0.0), 0.0, 0.0
        self._classes: int | None = None  # how many choices all questions have, with one right; 0 where that differs
        self._labels, self._weights = array.array("h"), array.array("d")
        self._picks = {name: array.array("h") for name in NORMALIZATIONS}
        self._odds = {name: array.array("d") for name in NORMALIZATIONS}  # of the second of two choices

    def add(self, question: Question, found: Answer) -> None:
        self._examples += 1
        self._ties += bool(found.ties)
        self._without_number += found.picks["sum"] is None
        self._cut += found.cut > 0
        self._total += question.weight
        self._guessed += question.weight * len(question.labels) / len(question.choices)
        for name in NORMALIZATIONS:
            self._right[name] += question.weight * (found.picks[name] in question.labels)
        classes = len(question.choices) if len(question.labels) == 1 else 0
        self._classes = classes if self._classes in (None, classes) else 0
        if not self._classes:
            return
        self._labels.append(question.labels[0])
        self._weights.append(question.weight)
        for name in NORMALIZATIONS:
            self._picks[name].append(-1 if found.picks[name] is None else found.picks[name])
            if classes == 2:
                values = found.values(name)
                self._odds[name].append(values[1] - values[0])

    def result(self) -> dict[str, float]:
        """Weighted shares of right answers by normalization and by chance, and how many examples there were, had ties, had no
        number, were cut.

        Where all questions have the same number of choices and one right answer, also, by normalization, what
        `t5.evaluation.metrics.rank_classification` reports, as shares: `f1` (of two choices that of the second one, of more the
        mean over choices), and of two choices the areas `auc_roc` and `auc_pr`, where both are right sometimes.
        """
        weight = self._total or math.nan
        more = {"examples": self._examples, "ties": self._ties, "without_number": self._without_number, "cut": self._cut}
        shares = {name: self._right[name] / weight for name in NORMALIZATIONS}
        return {**shares, CHANCE: self._guessed / weight, **more, **self._by_class()}

    def _by_class(self) -> dict[str, float]:
        from sklearn import metrics  # it takes a second

        if not self._classes or not self._examples:
            return {}
        labels, weights = np.array(self._labels), np.array(self._weights)
        found: dict[str, float] = {}
        for name in NORMALIZATIONS:
            picks, ends = np.array(self._picks[name]), f"_{name}"
            average, of = ("binary", [1]) if self._classes == 2 else ("macro", list(range(self._classes)))
            options = dict(labels=of if average == "macro" else None, average=average, sample_weight=weights, zero_division=0)
            picks = np.where(picks < 0, 1 - labels if average == "binary" else -1, picks)  # no answer is a wrong one
            found[f"f1{ends}"] = float(metrics.f1_score(labels, picks, **options))
            odds = np.array(self._odds[name])
            if self._classes == 2 and len(set(self._labels)) == 2 and np.isfinite(odds).all():
                found[f"auc_roc{ends}"] = float(metrics.roc_auc_score(labels, odds, sample_weight=weights))
                found[f"auc_pr{ends}"] = float(metrics.average_precision_score(labels, odds, sample_weight=weights))
        return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, mean and what lies around them, over prompts; the quartiles as in `statistics.quantiles` with all data in."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "lowest": min(values),
        "highest": max(values),
        "interquartile_range": quartiles[2] - quartiles[0],
        "prompts": len(values),
    }
