"""How much of a run's time went into training, over all its restarts."""

import dataclasses
import time


@dataclasses.dataclass
class Clock:
    """Kept in every checkpoint, so that goodput counts what was lost since.

    Attributes:
      began: when the run first began, in seconds of the Unix epoch.
      productive: seconds of steps that count, their wait for data included, which is reported beside. The first step of a
        process is compilation and does not count; nor do steps after the checkpoint that a run was continued from.
    """

    began: float = dataclasses.field(default_factory=time.time)
    productive: float = 0.0
    _compiled: bool = dataclasses.field(default=False, init=False)

    def add(self, seconds_per_step: float) -> float:
        """Counts a step; returns the goodput, productive seconds as a share of all since the run began."""
        if self._compiled:
            self.productive += seconds_per_step
        self._compiled = True
        return self.productive / max(self.seconds, 1e-9)

    @property
    def seconds(self) -> float:
        """Since the run first began."""
        return time.time() - self.began

    def state(self) -> dict[str, float]:
        """What `Clock(**state)` continues from."""
        return {"began": self.began, "productive": self.productive}
