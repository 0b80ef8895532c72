"""Settings for measuring the tasks' own metrics; imports nothing heavy."""

import dataclasses

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import one_of
from t5x_lab.config.macros import macro


@dataclasses.dataclass(frozen=True)
class InferEvalConfig:
    """How the metrics that SeqIO tasks define are measured.

    Attributes:
      period: steps between two measurements while training; None = none while training.
      split: of the tasks.
      num_examples: the first N of each task; None = all.
      max_tokens: most tokens of a prediction; None = the length of the task's targets in TASK_FEATURE_LENGTHS.
      cut_inputs: where inputs longer than TASK_FEATURE_LENGTHS are cut: on the "right", before their end token, as in training;
        on the "left", so that the question stays; or None, nowhere, as T5X evaluates.
      beam_size, beam_alpha: of a beam search that writes predictions; without an alpha, one hypothesis is written greedily.
      batch_size: texts at a time, fewer of long ones.
    """

    period: int | None = dataclasses.field(default=None, metadata=macro("INFER_EVAL_PERIOD"))
    split: str = "validation"
    num_examples: int | None = None
    max_tokens: int | None = None
    cut_inputs: str | None = "right"
    beam_size: int = 1
    beam_alpha: float | None = None
    batch_size: int = 32

    def __post_init__(self):
        check_types(self)
        if self.cut_inputs is not None:
            one_of("InferEvalConfig.cut_inputs", self.cut_inputs, ("right", "left"))
        positive(self, "period", "num_examples", "max_tokens", "beam_size", "batch_size")
