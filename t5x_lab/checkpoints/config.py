"""When a run is saved and what is kept of it; what a new run takes from another model. Both names are T5X's."""

import dataclasses
import math
from collections.abc import Mapping

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import one_of


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
    """When a run is saved, which of its checkpoints stay, and what happens when storage fails.

    Each rule keeps its own checkpoints, and pinned ones (a file `PINNED` in the checkpoint) stay always.

    Attributes:
      period: steps between checkpoints.
      minutes: one is also made when the last is so many minutes old; None for never.
      keep: the newest so many stay.
      keep_period: those whose step is a multiple of it stay, for the record; they are made where `period` makes none.
      best_metric: the one with the best value of it stays, such as "eval/<task>/loss", measured at the checkpoint's step.
      best_is: "lowest" or "highest".
      retry_minutes: how long a run goes on without a checkpoint when saving fails; it is tried again all the while.
      on_failure: what happens then: "stop", or "go_on" and keep trying.
    """

    period: int = 1000
    minutes: float | None = 30.0
    keep: int = 3
    keep_period: int | None = None
    best_metric: str | None = None
    best_is: str = "lowest"
    retry_minutes: float = 30.0
    on_failure: str = "stop"

    def __post_init__(self):
        check_types(self)
        positive(self, "period", "minutes", "keep", "keep_period")
        in_range(self, "retry_minutes", 0, math.inf)
        one_of("SaveCheckpointConfig.best_is", self.best_is, ("lowest", "highest"))
        one_of("SaveCheckpointConfig.on_failure", self.on_failure, ("stop", "go_on"))

    def merit(self, metrics: Mapping[str, float]) -> float:
        """The best metric, signed so that higher is better; minus infinity where it was not measured, or is not a number."""
        value = metrics.get(self.best_metric or "", math.nan)
        return -math.inf if math.isnan(value) else -value if self.best_is == "lowest" else value
