"""Curves over steps: a run's metrics in columns, thinned to what a picture can show."""

import contextlib
import dataclasses
import itertools

import numpy as np
from etils import epath

from t5x_lab.config.json_files import read_dictionary
from t5x_lab.observe.metrics import lines_of

TRAIN = "train"
REFERENCES = "references.json"
LINES_AT_A_TIME = 20_000


@dataclasses.dataclass(frozen=True)
class Columns:
    """The lines of one split.

    Attributes:
      steps: [N] increasing numbers of steps.
      values: by metric, [N] numbers; not a number where a line has none.
    """

    steps: np.ndarray
    values: dict[str, np.ndarray]

    def __getitem__(self, metric: str) -> np.ndarray:
        return self.values.get(metric, np.full(len(self.steps), np.nan))


NO_LINES = Columns(np.zeros(0, np.int64), {})


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric in P points, each of them of neighbouring steps.

    Attributes:
      steps: [P] the last step of each point.
      mean, low, high: [P] of the values of its steps.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_columns(model_dir: epath.PathLike, damaged: list[str] | None = None) -> dict[str, Columns]:
    """A run's metrics by split, in columns, for millions of steps; see `lines_of`."""
    waiting: dict[str, list[dict]] = {}
    done: dict[str, list[dict[str, np.ndarray]]] = {}
    for line in lines_of(model_dir, damaged):
        lines = waiting.setdefault(line["split"], [])
        lines.append(line)
        if len(lines) == LINES_AT_A_TIME:
            done.setdefault(line["split"], []).append(_in_columns(lines))
            lines.clear()
    for split, lines in waiting.items():
        if lines:
            done.setdefault(split, []).append(_in_columns(lines))
    return {split: _joined(parts) for split, parts in done.items()}


def read_references(model_dir: epath.PathLike) -> dict[str, dict[str, float]]:
    """Numbers to compare a run with, by metric and name, which whoever knows them wrote to MODEL_DIR/references.json."""
    found = read_dictionary(epath.Path(model_dir) / REFERENCES)
    return {
        metric: {str(name): float(value) for name, value in of.items() if is_number(value)}
        for metric, of in found.items()
        if isinstance(of, dict)
    }


def _in_columns(lines: list[dict]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(itertools.chain.from_iterable(lines))
    return {name: _numbers([line.get(name) for line in lines]) for name in names if name != "split"}


def _numbers(values: list) -> np.ndarray:
    """As floats; what is none is not a number."""
    with contextlib.suppress(OverflowError):
        if set(map(type, values)) <= {int, float, type(None)}:
            return np.array(values, dtype=float)
    return np.array([value if is_number(value) else np.nan for value in values], dtype=float)


def is_number(value: object) -> bool:
    """Whether JSON's value is one that a float may be; true is none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300)


def _joined(parts: list[dict[str, np.ndarray]]) -> Columns:
    steps = np.concatenate([part["step"] for part in parts]).astype(np.int64)
    names = dict.fromkeys(name for part in parts for name in part if name != "step")
    missing = lambda part: np.full(len(part["step"]), np.nan)
    values = {name: np.concatenate([part.get(name, missing(part)) for part in parts]) for name in names}
    last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]  # of several lines of a step the last one counts
    return Columns(steps[last], {name: column[last] for name, column in values.items()})


def curve(columns: Columns, metric: str, points: int = 250) -> Curve | None:
    """The metric in at most so many points; None where it was never measured."""
    values = columns[metric]
    measured = np.isfinite(values)
    steps, values = columns.steps[measured], values[measured]
    if not len(steps):
        return None
    starts = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int))[:-1]
    ends = np.append(starts[1:], len(steps))
    mean = np.add.reduceat(values, starts) / (ends - starts)
    return Curve(steps[ends - 1], mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))
