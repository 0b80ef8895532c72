"""Rank classification: of several choices, the model's answer is the one it finds likeliest.

The rules, so that numbers mean the same everywhere:
- Log-probabilities are compared as sums, and divided by the choice's tokens and by its characters; all three are reported.
- Of equal values the first choice wins, as with NumPy's argmax and lm-eval; examples with a tie at the top are counted.
- A value that is not a number never wins. Where no choice has a number there is no answer, which is wrong; such examples are
  counted.
"""

import array
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from t5x_lab.config.errors import UserError

NORMALIZATIONS = ("sum", "token_mean", "character_mean")


Text = str | list[int]


@dataclasses.dataclass(frozen=True)
class Question:
    """One example.

    Attributes:
      inputs: what the model reads, a text or token ids; or a tuple of them, one for each choice.
      choices: texts or token ids, of which one or several are right.
      label: the right one's number, or several numbers.
      dataset, prompt: the data set it belongs to, and the template that made its text.
      weight: how much it counts.
      characters: of the choices; None = those of the texts.
    """

    inputs: Text | tuple[Text, ...]
    choices: tuple[Text, ...]
    label: int | tuple[int, ...]
    dataset: str = "all"
    prompt: str = "only"
    weight: float = 1.0
    characters: tuple[int, ...] | None = None

    @property
    def labels(self) -> tuple[int, ...]:
        return (self.label,) if isinstance(self.label, int) else self.label

    @property
    def pairs(self) -> list[tuple[Text, Text]]:
        """(inputs, choice) of each choice."""
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,) * len(self.choices)
        return list(zip(inputs, self.choices, strict=True))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model makes of a question; lists have one entry a choice.

    Attributes:
      log_probs: sums of log-probabilities.
      tokens, characters: lengths of the choices.
      cut: tokens cut from the left of the inputs.
      picks: by normalization, the number of the answer or None.
      ties: normalizations with several best choices.
    """

    log_probs: list[float]
    tokens: list[int]
    characters: list[int]
    cut: int
    picks: dict[str, int | None]
    ties: list[str]

    def values(self, normalization: str) -> list[float]:
        """What choices are compared by: log-probabilities, divided by their lengths."""
        lengths = {"sum": [1] * len(self.tokens), "token_mean": self.tokens, "character_mean": self.characters}[normalization]
        return [value / length if length else math.nan for value, length in zip(self.log_probs, lengths, strict=True)]

    def as_json(self, question: Question) -> dict:
        """All of it, and what is right."""
        fields = dataclasses.asdict(self)
        return {"label": question.label, "picks": fields.pop("picks"), "scores": fields.pop("log_probs"), **fields}


def best(values: Sequence[float]) -> tuple[int | None, bool]:
    """(the number of the largest value or None, whether others equal it)."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return None, False
    return list(values).index(max(numbers)), numbers.count(max(numbers)) > 1


def answers(model, questions: Sequence[Question], names: Sequence[str] | None = None, **options) -> list[Answer]:
    """Scores every choice of every question, reading inputs once; messages call questions by `names`, `options` are those of
    `scores`."""
    names = names or [f"Question {number}" for number in range(len(questions))]
    called = [name for name, question in zip(names, questions, strict=True) for _ in question.choices]
    inputs, targets = zip(*(pair for question in questions for pair in question.pairs), strict=True) if questions else ((), ())
    scores = model.scores(list(inputs), list(targets), names=called, **options)
    found, start = [], 0
    for question in questions:
        mine = slice(start, start + len(question.choices))
        start = mine.stop
        found.append(
            answer(
                scores.log_prob[mine].tolist(),
                scores.tokens[mine].tolist(),
                list(question.characters or map(len, question.choices)),
                cut=int(scores.cut[mine].max()),
            )
        )
    return found


def answer(log_probs: list[float], tokens: list[int], characters: list[int], cut: int = 0) -> Answer:
    """The answer that these scores of the choices make."""
    found = Answer(log_probs, tokens, characters, cut, picks={}, ties=[])
    for name in NORMALIZATIONS:
        found.picks[name], tied = best(found.values(name))
        found.ties.extend([name] * tied)
    return found


def report(questions: Iterable[Question], found: Iterable[Answer]) -> dict:
    """Accuracies of every data set, over its prompts, and their average over data sets.

    Returns:
      {"datasets": {data set: {"prompts": {prompt: accuracies}, "over_prompts": {normalization: statistics}}},
      "average(a+b)": {normalization: mean over the data sets of their medians over prompts}}. The name of an average lists
      its data sets, so that one which is missing changes the name and not silently the number.
    """
    tallies: dict[str, dict[str, Tally]] = {}
    for question, mine in zip(questions, found, strict=True):
        tallies.setdefault(question.dataset, {}).setdefault(question.prompt, Tally()).add(question, mine)
    datasets = {}
    for dataset, prompts in tallies.items():
        by_prompt = {prompt: tally.result() for prompt, tally in prompts.items()}
        datasets[dataset] = {
            "prompts": by_prompt,
            "over_prompts": {name: spread([a[name] for a in by_prompt.values()]) for name in NORMALIZATIONS},
        }
    if not datasets:
        return {}
    medians = {name: {d: datasets[d]["over_prompts"][name]["median"] for d in datasets} for name in NORMALIZATIONS}
    return {"datasets": datasets, average_name(datasets): {name: statistics.fmean(medians[name].values()) for name in medians}}


def average_name(datasets: Mapping) -> str:
    return f"average({'+'.join(sorted(datasets))})"


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
        self._right, self._total = dict.fromkeys(NORMALIZATIONS, 0.0), 0.0
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
        """Weighted shares of right answers by normalization, and how many examples there were, had ties, no number, were cut.

        Where all questions have the same number of choices and one right answer, also, by normalization, what
        `t5.evaluation.metrics.rank_classification` reports, as shares: `f1` (of two choices that of the second one, of more the
        mean over choices), and of two choices the areas `auc_roc` and `auc_pr`, where both are right sometimes.
        """
        weight = self._total or math.nan
        more = {"examples": self._examples, "ties": self._ties, "without_number": self._without_number, "cut": self._cut}
        return {**{name: self._right[name] / weight for name in NORMALIZATIONS}, **more, **self._by_class()}

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


def question_of(record: Mapping, fixed_choices: Sequence[str], where: str) -> Question:
    """A question from an object of a .jsonl file: "inputs", "choices" unless they are fixed, and "label" (a number) or
    "targets" (one of the choices), or lists of these where several are right; "dataset", "prompt", "weight" where it has them.

    Raises:
      UserError: saying what it lacks, and where it stands.
    """
    choices = record.get("choices", list(fixed_choices))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UserError(
            f'{where} has no list of two or more texts under "choices", which --mode=rank needs. Add them, or give --choice '
            "for every text that is one in all lines."
        )
    label, targets = record.get("label"), record.get("targets")
    labels = label if isinstance(label, list) else [] if label is None else [label]
    if label is None:
        labels = [choices.index(text) for text in (targets if isinstance(targets, list) else [targets]) if text in choices]
    if not labels or not all(type(number) is int and 0 <= number < len(choices) for number in labels):
        raise UserError(
            f'{where} does not say which choice is right: "label" is {label!r} and "targets" is {targets!r}. Give a number '
            f"from 0 to {len(choices) - 1}, or the text of a choice; a list, where several are right."
        )
    weight = record.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UserError(f'{where} has the "weight" {weight!r}; it is a number, 0 or more.')
    return Question(
        record["inputs"],
        tuple(choices),
        tuple(labels) if len(labels) > 1 else labels[0],
        str(record.get("dataset", "all")),
        str(record.get("prompt", "only")),
        float(weight),
    )
