"""Multiple-choice questions and their answers, by rank classification: the choice with the highest likelihood is the answer.

Rules:
- Choices are compared by the sum of their log-probabilities, by the mean per token and by the mean per character. All three are
  reported.
- Of equal values the first choice wins, as with NumPy's argmax and lm-eval. Examples with a tie at the top are counted.
- NaN never wins. A question without any finite value has no answer, which is wrong. Such examples are counted.
"""

import dataclasses
import math
from collections.abc import Sequence

NORMALIZATIONS = ("sum", "token_mean", "character_mean")

Text = str | list[int]


@dataclasses.dataclass(frozen=True)
class Question:
    """One multiple-choice example.

    Attributes:
      inputs: text or token ids that the model reads, or a tuple with one entry per choice.
      choices: texts or token ids, of which one or several are right.
      label: number of the right choice, or a tuple of numbers.
      dataset, prompt: the data set and the template that the question comes from.
      weight: weight of the example in averages.
      characters: characters of each choice. None = the lengths of the texts.
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
    """The model's answer to a question. Lists have one entry per choice.

    Attributes:
      log_probs: sums of log-probabilities.
      tokens, characters: lengths of the choices.
      cut: number of tokens that scoring truncated from the left of the inputs.
      picks: number of the chosen answer, or None, by normalization.
      ties: normalizations with several best choices.
    """

    log_probs: list[float]
    tokens: list[int]
    characters: list[int]
    cut: int
    picks: dict[str, int | None]
    ties: list[str]

    def values(self, normalization: str) -> list[float]:
        """Returns the log-probability of each choice, divided by the length that the normalization names."""
        lengths = {"sum": [1] * len(self.tokens), "token_mean": self.tokens, "character_mean": self.characters}[normalization]
        return [value / length if length else math.nan for value, length in zip(self.log_probs, lengths, strict=True)]

    def to_json(self, question: Question) -> dict:
        """Returns all fields and the label as a JSON object."""
        fields = dataclasses.asdict(self)
        return {"label": question.label, "picks": fields.pop("picks"), "scores": fields.pop("log_probs"), **fields}


def pick_best(values: Sequence[float]) -> tuple[int | None, bool]:
    """Returns (number of the largest value or None, whether other values equal it)."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return None, False
    return list(values).index(max(numbers)), numbers.count(max(numbers)) > 1


def make_answer(log_probs: list[float], tokens: list[int], characters: list[int], cut: int = 0) -> Answer:
    """Returns the answer that follows from the scores of the choices."""
    answer = Answer(log_probs, tokens, characters, cut, picks={}, ties=[])
    for name in NORMALIZATIONS:
        answer.picks[name], is_tied = pick_best(answer.values(name))
        answer.ties.extend([name] * is_tied)
    return answer
