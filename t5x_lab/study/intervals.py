"""Confidence intervals of results over seeds and units, such as data sets, and of differences between cells.

An interval is a 95 % interval of Student's t. With several seeds and several units it is the wider one of two: over units, with
seeds averaged, and over seeds, with units averaged. Examples of one data set are not units: they are not independent. P-values
are those of the same t-tests. Those of many comparisons are adjusted to their false discovery rate.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

LEVEL = 0.95
_ROUNDING = 1e-9  # of equal values
Results = Mapping[tuple[int, str], float]  # value by (seed, unit)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval.

    Attributes:
      mean: mean over seeds and units.
      low, high: ends of the interval; NaN with one seed and one unit.
      seeds, units: their numbers.
      p_value: probability of a mean so far from zero in either direction if the true one is zero, the larger one of the two
        tests. NaN if there is no spread to compare it with: with one seed and one unit, or with equal values, which coarse
        scores have by chance.
    """

    mean: float
    low: float
    high: float
    seeds: int
    units: int
    p_value: float


def interval(results: Results) -> Interval:
    """Returns the mean of results and its interval. Seeds have the units that all of them have."""
    values_SU = _table(results)
    if not values_SU.size:
        return Interval(math.nan, math.nan, math.nan, 0, 0, math.nan)
    seeds, units = values_SU.shape
    samples = [values for values in (values_SU.mean(axis=0), values_SU.mean(axis=1)) if len(values) > 1]
    mean, half_width = float(values_SU.mean()), max(map(_half_width, samples), default=math.nan)
    return Interval(
        mean, mean - half_width, mean + half_width, seeds, units, float(np.max([*map(_p_value, samples)] or [math.nan]))
    )


def adjust(p_values: Sequence[float]) -> list[float]:
    """Returns p-values of several comparisons adjusted to their false discovery rate (Benjamini and Hochberg, 1995).

    Of the comparisons whose adjusted p-value is at most 0.05, at most five in a hundred are expected to be wrong, if the tests
    are independent or positively dependent, which pairs of the same cells nearly are. NaN stays NaN, and is no comparison.
    """
    values = np.array(p_values, float)
    is_number = ~np.isnan(values)
    values[is_number] = scipy.stats.false_discovery_control(values[is_number])
    return values.tolist()


def paired_difference(first: Results, second: Results) -> Interval:
    """Returns the interval of the difference between two cells, over the seeds and units that both have."""
    return interval({key: first[key] - second[key] for key in first if key in second})


def mean_over_units(results: Results) -> Results:
    """Returns the mean of each seed as that of a single unit, so that intervals are over seeds alone."""
    by_seed: dict[int, list[float]] = {}
    for (seed, _), value in results.items():
        by_seed.setdefault(seed, []).append(value)
    return {(seed, "mean"): sum(values) / len(values) for seed, values in by_seed.items()}


def _table(results: Results) -> np.ndarray:
    """Returns results as an array [seeds, units], without units that a seed lacks."""
    seeds = sorted({seed for seed, _ in results})
    units = [unit for unit in dict.fromkeys(unit for _, unit in results) if all((seed, unit) in results for seed in seeds)]
    return np.array([[results[seed, unit] for unit in units] for seed in seeds])


def _half_width(values: Sequence[float] | np.ndarray) -> float:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(scipy.stats.t.ppf(0.5 + LEVEL / 2, len(values) - 1)) * error


def _p_value(values: np.ndarray) -> float:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error <= _ROUNDING * max(1.0, float(np.abs(values).max())):
        return math.nan if abs(values.mean()) > _ROUNDING else 1.0
    return float(2 * scipy.stats.t.sf(abs(values.mean()) / error, len(values) - 1))
