"""One example for inference."""

import dataclasses
from typing import Any

from t5x_lab.evaluation.questions import Question


@dataclasses.dataclass(frozen=True)
class Example:
    """One example for inference.

    Attributes:
      record: JSON object that is written beside the result.
      inputs: text, or token ids as the task prepared them. For classification: what `Run.classify` takes.
      targets: text or token ids to score. None in other modes.
      location: file and line, or task and number, for messages.
      question: the question to rank. None in other modes.
      number: number among all examples of all shards.
      cut: number of tokens truncated from the inputs.
    """

    record: dict
    inputs: Any
    targets: str | list[int] | None
    location: str
    question: Question | None = None
    number: int = 0
    cut: int = 0


def feature_text(example: dict, name: str, vocabulary: Any) -> str:
    """Returns the text of a feature: as it was before tokenization if the example has it, else decoded."""
    text = example.get(f"{name}_pretokenized")
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else vocabulary.decode(example[name].tolist())
