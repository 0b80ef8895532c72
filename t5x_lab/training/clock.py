"""Goodput, the share of a run's time spent in training over all restarts; and the time to the first step of a command."""

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


class StartUp:
    """Times of the parts of a command up to its first training step."""

    def __init__(self):
        self._began = self._last = time.monotonic()
        self._parts: list[tuple[str, float]] = []

    def finish(self, part: str) -> float:
        """Ends a part, which began at the end of the last one. Returns its seconds."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._parts.append((part, seconds))
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self._parts)
        return f"The first step was done after {self._last - self._began:.1f} s: {parts}."
