"""Settings for measuring the tasks' own metrics; imports nothing heavy."""

import dataclasses

from t5x_lab.config.checks import check_types, positive


@dataclasses.dataclass(frozen=True)
class InferEvalConfig:
    """How the metrics that SeqIO tasks define are measured.

    Attributes:
      period: steps between two measurements while training; None = none while training.
      split: of the tasks.
      num_examples: the first N of each task; None = all.
      max_tokens: most tokens of a prediction; None = the length of the task's targets in TASK_FEATURE_LENGTHS.
      batch_size: texts at a time.
    """

    period: int | None = None
    split: str = "validation"
    num_examples: int | None = None
    max_tokens: int | None = None
    batch_size: int = 32

    def __post_init__(self):
        check_types(self)
        positive(self, "period", "num_examples", "max_tokens", "batch_size")
