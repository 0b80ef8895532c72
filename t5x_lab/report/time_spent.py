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
      starting: until the first step began, and in the first step of each process, which is compiled.
      lost: between processes: steps since the last checkpoint, and the time until the first step after it began.
      restarts: how often it was started again.
    """

    total: float
    steps: float
    data: float
    between: float
    starting: float
    lost: float
    restarts: int


def is_start(train: Columns) -> np.ndarray:
    """Bool, for each line, whether it is of the first step of a process.

    That is compilation, which goodput does not count: there, productive seconds do not grow. Where lines do not have
    `seconds`, of a version before this one, none is.
    """
    found = np.zeros(len(train.steps), bool)
    known = _known(train)
    productive = (train["seconds"] * train["goodput"])[known]
    found[known] = np.diff(productive, prepend=0.0) <= 0.5 * train["seconds_per_step"][known]
    return found


def restarts(train: Columns) -> np.ndarray:
    """Bool, for each line, whether it is of the first step since the run was started again."""
    found = is_start(train)
    found[:1] = False
    return found


def speed(train: Columns, metric: str) -> np.ndarray:
    """What is measured of each step's time; not a number where that was compilation."""
    return np.where(is_start(train), np.nan, train[metric])


def _known(train: Columns) -> np.ndarray:
    return np.isfinite(train["seconds"]) & np.isfinite(train["goodput"])


def time_spent(train: Columns) -> TimeSpent | None:
    """None for a run whose lines do not have `seconds`."""
    known = _known(train)
    if not known.any():
        return None
    seconds, per_step, starts = train["seconds"][known], train["seconds_per_step"][known], is_start(train)[known]
    gaps = np.diff(seconds, prepend=0.0)
    before = 0.0
    if not starts[0]:  # the lines before are of another version, or lost: what was no step counts as starting
        before, starts[0] = seconds[0] * train["goodput"][known][0], True
    between = np.where(starts, 0.0, np.maximum(gaps - per_step, 0.0))
    again = np.flatnonzero(starts)[1:]
    return TimeSpent(
        total=float(seconds[-1]),
        steps=float(before + per_step[~starts].sum()),
        data=float((per_step * np.nan_to_num(train["data_wait_fraction"][known]))[~starts].sum()),
        between=float(between.sum()),
        starting=float(gaps[0] - before + per_step[again].sum()),
        lost=float(np.maximum(gaps - per_step, 0.0)[again].sum()),
        restarts=len(again),
    )
