"""Metrics of a run as columns, and curves with a limited number of points for plots."""

import contextlib
import dataclasses
import itertools

import numpy as np
from etils import epath

from t5x_lab.config.json_files import read_dictionary
from t5x_lab.observe.metrics import iterate_metrics

TRAIN = "train"
REFERENCES = "references.json"
LINES_PER_BATCH = 20_000


@dataclasses.dataclass(frozen=True)
class Columns:
    """The metrics of a split.

    Attributes:
      steps: increasing step numbers, [N].
      values: values by metric, [N], NaN if missing.
    """

    steps: np.ndarray
    values: dict[str, np.ndarray]

    def __getitem__(self, metric: str) -> np.ndarray:
        return self.values.get(metric, np.full(len(self.steps), np.nan))


NO_LINES = Columns(np.zeros(0, np.int64), {})


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric in P points, each of which summarizes consecutive steps.

    Attributes:
      steps: last step of each point, [P].
      mean, low, high: mean, minimum and maximum of each point, [P].
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_columns(model_dir: epath.PathLike, damaged: list[str] | None = None) -> dict[str, Columns]:
    """Reads the metrics of a run by split, as columns. See `iterate_metrics`."""
    pending: dict[str, list[dict]] = {}
    batches: dict[str, list[dict[str, np.ndarray]]] = {}
    for line in iterate_metrics(model_dir, damaged):
        lines = pending.setdefault(line["split"], [])
        lines.append(line)
        if len(lines) == LINES_PER_BATCH:
            batches.setdefault(line["split"], []).append(_to_columns(lines))
            lines.clear()
    for split, lines in pending.items():
        if lines:
            batches.setdefault(split, []).append(_to_columns(lines))
    return {split: _concatenate(parts) for split, parts in batches.items()}


def read_references(model_dir: epath.PathLike) -> dict[str, dict[str, float]]:
    """Returns reference values by metric and name from MODEL_DIR/references.json, which users may write."""
    references = read_dictionary(epath.Path(model_dir) / REFERENCES)
    return {
        metric: {str(name): float(value) for name, value in values.items() if is_number(value)}
        for metric, values in references.items()
        if isinstance(values, dict)
    }


def _to_columns(lines: list[dict]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(itertools.chain.from_iterable(lines))
    return {name: _numbers([line.get(name) for line in lines]) for name in names if name != "split"}


def _numbers(values: list) -> np.ndarray:
    """Returns values as floats, NaN for anything else."""
    with contextlib.suppress(OverflowError):
        if set(map(type, values)) <= {int, float, type(None)}:
            return np.array(values, dtype=float)
    return np.array([value if is_number(value) else np.nan for value in values], dtype=float)


def is_number(value: object) -> bool:
    """Returns whether a JSON value is a number in the range of floats."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e300)


def _concatenate(parts: list[dict[str, np.ndarray]]) -> Columns:
    steps = np.concatenate([part["step"] for part in parts]).astype(np.int64)
    names = dict.fromkeys(name for part in parts for name in part if name != "step")
    missing = lambda part: np.full(len(part["step"]), np.nan)
    values = {name: np.concatenate([part.get(name, missing(part)) for part in parts]) for name in names}
    last = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]  # the last line of a step counts
    return Columns(steps[last], {name: column[last] for name, column in values.items()})


def curve(columns: Columns, metric: str, points: int = 250) -> Curve | None:
    """Returns the curve of a metric with at most `points` points; None without values."""
    values = columns[metric]
    is_finite = np.isfinite(values)
    steps, values = columns.steps[is_finite], values[is_finite]
    if not len(steps):
        return None
    starts = np.unique(np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int))[:-1]
    ends = np.append(starts[1:], len(steps))
    mean = np.add.reduceat(values, starts) / (ends - starts)
    return Curve(steps[ends - 1], mean, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))
