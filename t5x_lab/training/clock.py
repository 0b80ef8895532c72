"""How much of a run's time went into training, over all its restarts."""

import dataclasses
import time


@dataclasses.dataclass
class Clock:
    """Kept in every checkpoint, so that goodput counts what was lost since.

    Attributes:
      began: when the run first began, in seconds of the Unix epoch; later by what was left out.
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

    def leave_out(self, since: float, until: float) -> None:
        """What is no time of the run's: from when it had come to its end until it was begun again, in seconds of the epoch."""
        self.began += max(0.0, until - max(since, self.began))

    @property
    def seconds(self) -> float:
        """Since the run first began, less what was left out."""
        return time.time() - self.began

    def state(self) -> dict[str, float]:
        """What `Clock(**state)` continues from."""
        return {"began": self.began, "productive": self.productive}
