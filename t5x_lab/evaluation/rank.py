"""Rank classification: of several choices, the model's answer is the one it finds likeliest.

The rules, so that numbers mean the same everywhere:
- Log-probabilities are compared as sums, and divided by the choice's tokens and by its characters; all three are reported.
- Of equal values the first choice wins, as with NumPy's argmax and lm-eval; examples with a tie at the top are counted.
- A value that is not a number never wins. Where no choice has a number there is no answer, which is wrong; such examples are
  counted.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from t5x_lab.config.errors import UserError

NORMALIZATIONS = ("sum", "token_mean", "character_mean")


@dataclasses.dataclass(frozen=True)
class Question:
    """One example.

    Attributes:
      inputs: what the model reads.
      choices: texts, of which one is right.
      label: its number.
      dataset, prompt: the data set it belongs to, and the template that made its text.
    """

    inputs: str
    choices: tuple[str, ...]
    label: int
    dataset: str = "all"
    prompt: str = "only"


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
    inputs = [question.inputs for question in questions for _ in question.choices]
    targets = [choice for question in questions for choice in question.choices]
    scores = model.scores(inputs, targets, names=called, **options)
    found, start = [], 0
    for question in questions:
        mine = slice(start, start + len(question.choices))
        start = mine.stop
        found.append(
            answer(
                scores.log_prob[mine].tolist(),
                scores.tokens[mine].tolist(),
                scores.characters[mine].tolist(),
                cut=int(scores.cut[mine].max()),
            )
        )
    return found


def answer(log_probs: list[float], tokens: list[int], characters: list[int], cut: int = 0) -> Answer:
    """The answer that these scores of the choices make."""
    picks, ties = {}, []
    for name, lengths in zip(NORMALIZATIONS, ([1] * len(tokens), tokens, characters), strict=True):
        values = [value / length if length else math.nan for value, length in zip(log_probs, lengths, strict=True)]
        picks[name], tied = best(values)
        ties += [name] * tied
    return Answer(log_probs, tokens, characters, cut, picks, ties)


def report(questions: Sequence[Question], found: Sequence[Answer]) -> dict:
    """Accuracies of every data set, over its prompts, and their average over data sets.

    Returns:
      {"datasets": {data set: {"prompts": {prompt: accuracies}, "over_prompts": {normalization: statistics}}},
      "average(a+b)": {normalization: mean over the data sets of their medians over prompts}}. The name of an average lists
      its data sets, so that one which is missing changes the name and not silently the number.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.dataset, {}).setdefault(question.prompt, []).append(i)
    datasets = {}
    for dataset, prompts in groups.items():
        by_prompt = {
            prompt: accuracies([questions[i] for i in members], [found[i] for i in members])
            for prompt, members in prompts.items()
        }
        datasets[dataset] = {
            "prompts": by_prompt,
            "over_prompts": {name: spread([a[name] for a in by_prompt.values()]) for name in NORMALIZATIONS},
        }
    medians = {name: {d: datasets[d]["over_prompts"][name]["median"] for d in datasets} for name in NORMALIZATIONS}
    return {"datasets": datasets, average_name(datasets): {name: statistics.fmean(medians[name].values()) for name in medians}}


def average_name(datasets: Mapping) -> str:
    return f"average({'+'.join(sorted(datasets))})"


def accuracies(questions: Sequence[Question], found: Sequence[Answer]) -> dict[str, float]:
    """Shares of right answers by normalization, and how many examples there were, with ties, without a number, cut."""
    n = len(questions)
    right = {name: sum(a.picks[name] == q.label for q, a in zip(questions, found, strict=True)) / n for name in NORMALIZATIONS}
    return {
        **right,
        "examples": n,
        "ties": sum(bool(a.ties) for a in found),
        "without_number": sum(a.picks["sum"] is None for a in found),
        "cut": sum(a.cut > 0 for a in found),
    }


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
    "targets" (one of the choices); "dataset" and "prompt" where it has them.

    Raises:
      UserError: saying what it lacks, and where it stands.
    """
    choices = record.get("choices", list(fixed_choices))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UserError(
            f'{where} has no list of two or more texts under "choices", which --mode=rank needs. Add them, or give --choice '
            "for every text that is one in all lines."
        )
    label = record.get("label")
    if label is None and record.get("targets") in choices:
        label = choices.index(record["targets"])
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(choices):
        raise UserError(
            f'{where} does not say which choice is right: "label" is {record.get("label")!r} and "targets" is '
            f"{record.get('targets')!r}. Give a number from 0 to {len(choices) - 1}, or the text of a choice."
        )
    return Question(
        record["inputs"], tuple(choices), label, str(record.get("dataset", "all")), str(record.get("prompt", "only"))
    )
