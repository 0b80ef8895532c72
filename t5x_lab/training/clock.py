"""Goodput: the share of a run's time spent in training, over all restarts."""

import dataclasses
import time


@dataclasses.dataclass
class Clock:
    """Stored in every checkpoint, so that goodput accounts for work lost since then.

    Attributes:
      began: start of the run in seconds since the Unix epoch, shifted by excluded time.
      productive: seconds of training steps, including waiting for data. The first step of a process, which compiles, is
        excluded, and so are steps after the checkpoint that a run was continued from.
    """

    began: float = dataclasses.field(default_factory=time.time)
    productive: float = 0.0
    _compiled: bool = dataclasses.field(default=False, init=False)

    def add(self, seconds_per_step: float) -> float:
        """Adds a step. Returns the goodput, productive seconds divided by all seconds since the run began."""
        if self._compiled:
            self.productive += seconds_per_step
        self._compiled = True
        return self.productive / max(self.seconds, 1e-9)

    def leave_out(self, since: float, until: float) -> None:
        """Excludes the time between the end of the run and its continuation, in seconds since the epoch."""
        self.began += max(0.0, until - max(since, self.began))

    @property
    def seconds(self) -> float:
        """Seconds since the run began, without excluded time."""
        return time.time() - self.began

    def state(self) -> dict[str, float]:
        """Returns the state from which `Clock(**state)` continues."""
        return {"began": self.began, "productive": self.productive}
