"""Where a run's time went, of its metrics: steps, what came between them, and what starting again has lost."""

import dataclasses

import numpy as np

from t5x_lab.observe.curves import Columns


@dataclasses.dataclass(frozen=True)
class TimeSpent:
    """Seconds since a run first began.

    Attributes:
      total: until its last step.
      steps: in steps that count, their wait for data included.
      data: of these, waiting for data.
      between: evaluations, checkpoints and whatever else is done between steps.
      starting: starting and compiling, and after the first start also what was lost since the last checkpoint, and the time
        until somebody started it again.
      starts: how often it was started.
    """

    total: float
    steps: float
    data: float
    between: float
    starting: float
    starts: int


def time_spent(train: Columns) -> TimeSpent | None:
    """None for a run whose lines do not have `seconds`, of a version before this one.

    The first step of each process is compilation, which goodput does not count: there, productive seconds do not grow.
    """
    known = np.isfinite(train["seconds"]) & np.isfinite(train["goodput"])
    if not known.any():
        return None
    seconds, per_step = train["seconds"][known], train["seconds_per_step"][known]
    productive = seconds * train["goodput"][known]
    is_start = np.diff(productive, prepend=0.0) <= 0.5 * per_step
    gaps = np.diff(seconds, prepend=0.0)
    before = 0.0
    if not is_start[0]:  # the lines before are of another version, or lost: what was no step counts as starting
        before, is_start[0] = productive[0], True
    between = np.where(is_start, 0.0, np.maximum(gaps - per_step, 0.0))
    return TimeSpent(
        total=float(seconds[-1]),
        steps=float(before + per_step[~is_start].sum()),
        data=float((per_step * np.nan_to_num(train["data_wait_fraction"][known]))[~is_start].sum()),
        between=float(between.sum()),
        starting=float(gaps[is_start].sum() - before),
        starts=int(is_start.sum()),
    )
