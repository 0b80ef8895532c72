"""Rank classification: of several choices, the model's answer is the one it finds likeliest.

The rules, so that numbers mean the same everywhere:
- Log-probabilities are compared as sums, and divided by the choice's tokens and by its characters; all three are reported.
- Of equal values the first choice wins, as with NumPy's argmax and lm-eval; examples with a tie at the top are counted.
- A value that is not a number never wins. Where no choice has a number there is no answer, which is wrong; such examples are
  counted.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

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
