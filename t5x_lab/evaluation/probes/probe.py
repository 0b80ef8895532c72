"""Base class of zero-shot probes (Radford et al. 2018, section 5).

A probe turns a record of a labelled data set into texts whose probabilities are compared. The right text should be more
probable. Nothing is trained, except for one threshold.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from t5x_lab.config.checks import check_types
from t5x_lab.evaluation.questions import Question
from t5x_lab.prompts.data_sets import DATA_SETS, DataSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Compares continuations of the same or of several contexts. A user's probe inherits from it.

    Attributes:
      name: name of the probe's metrics.
      data_sets: names of data sets, built-in or of DATA_SETS.
      split: split that is evaluated.
      best: score that counts as 1 in relative scores, such as that of the best known model.
      threshold_split: split on which a threshold is chosen if single texts are judged. None = texts are compared with each
        other.
    """

    name: str
    data_sets: tuple[str, ...]
    split: str = "validation"
    best: float = 1.0
    threshold_split: str | None = None

    normalization: ClassVar[str] = "token_mean"  # one of `questions.NORMALIZATIONS`

    def __post_init__(self):
        check_types(self)

    @property
    def splits(self) -> list[str]:
        """The split that is evaluated, and the split that the threshold is chosen on."""
        return [split for split in (self.split, self.threshold_split) if split]

    def question(self, record: Mapping[str, Any]) -> Question:
        """Returns the contexts as `inputs` and their continuations as `choices`. Raises KeyError for a missing field."""
        raise NotImplementedError

    def data_set(self, name: str) -> DataSet:
        """Returns the description of a data set."""
        return DATA_SETS.get(name) or DataSet(name)
