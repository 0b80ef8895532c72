"""Breakdown of a run's time: in steps, between steps, starting, and lost by restarts."""

import dataclasses

import numpy as np

from t5x_lab.observe.curves import Columns


@dataclasses.dataclass(frozen=True)
class TimeSpent:
    """Time of a run, in seconds.

    Attributes:
      total: from the start to the last step.
      steps: in productive steps, including waiting for data.
      data: waiting for data, a part of `steps`.
      between: between steps, in evaluations, checkpoints and others.
      starting: before the first step, and in the first step of each process, which compiles.
      lost: between processes: steps after the last checkpoint, and the time until the first step after it.
      restarts: number of restarts.
    """

    total: float
    steps: float
    data: float
    between: float
    starting: float
    lost: float
    restarts: int


def is_start(train: Columns) -> np.ndarray:
    """Returns whether each line is the first step of a process, bool [N].

    This step compiles and does not increase the productive time. Lines of older versions without `seconds` are False.
    """
    starts = np.zeros(len(train.steps), bool)
    is_known = _has_times(train)
    productive = (train["seconds"] * train["goodput"])[is_known]
    starts[is_known] = np.diff(productive, prepend=0.0) <= 0.5 * train["seconds_per_step"][is_known]
    return starts


def restarts(train: Columns) -> np.ndarray:
    """Returns whether each line is the first step after a restart, bool [N]."""
    starts = is_start(train)
    starts[:1] = False
    return starts


def speed(train: Columns, metric: str) -> np.ndarray:
    """Returns a metric that depends on step time; NaN for steps that compile."""
    return np.where(is_start(train), np.nan, train[metric])


def _has_times(train: Columns) -> np.ndarray:
    return np.isfinite(train["seconds"]) & np.isfinite(train["goodput"])


def time_spent(train: Columns) -> TimeSpent | None:
    """Returns how the time was spent; None without `seconds` in the metrics."""
    is_known = _has_times(train)
    if not is_known.any():
        return None
    seconds, per_step, starts = train["seconds"][is_known], train["seconds_per_step"][is_known], is_start(train)[is_known]
    gaps = np.diff(seconds, prepend=0.0)
    before = 0.0
    if not starts[0]:  # earlier lines are lost or of an older version
        before, starts[0] = seconds[0] * train["goodput"][is_known][0], True
    between = np.where(starts, 0.0, np.maximum(gaps - per_step, 0.0))
    restart_lines = np.flatnonzero(starts)[1:]
    return TimeSpent(
        total=float(seconds[-1]),
        steps=float(before + per_step[~starts].sum()),
        data=float((per_step * np.nan_to_num(train["data_wait_fraction"][is_known]))[~starts].sum()),
        between=float(between.sum()),
        starting=float(gaps[0] - before + per_step[restart_lines].sum()),
        lost=float(np.maximum(gaps - per_step, 0.0)[restart_lines].sum()),
        restarts=len(restart_lines),
    )
