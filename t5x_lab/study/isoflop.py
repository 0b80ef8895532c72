"""IsoFLOP analysis: compute-optimal model sizes from runs of several sizes at several FLOP budgets (Hoffmann et al. 2022).

For each budget C a parabola of the loss over log N (N: parameters) has its minimum at the best size N(C). Over the budgets
log N(C) = log a + b log C is fitted by least squares. Intervals come from a bootstrap over the runs of each budget.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

MIN_SIZES, MIN_BUDGETS = 3, 2  # needed for a parabola and for a line
SAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Point:
    """A run.

    Attributes:
      budget: name of its FLOP budget.
      flops: its FLOPs.
      parameters: parameters of its model.
      loss: its held-out loss.
      seed: its seed.
    """

    budget: str
    flops: float
    parameters: float
    loss: float
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best size of a budget.

    Attributes:
      budget: name of the budget.
      flops: mean FLOPs of its runs.
      parameters: best number of parameters.
      loss: loss at this size.
      curvature: a model of N parameters has the loss `loss + curvature * log(N / parameters)**2`, by the parabola.
      low, high: 95 % interval of the parameters.
      is_inside: whether the best size lies between the smallest and the largest one that was trained.
    """

    budget: str
    flops: float
    parameters: float
    loss: float
    curvature: float
    low: float
    high: float
    is_inside: bool


@dataclasses.dataclass(frozen=True)
class Fit:
    """Compute-optimal sizes N = a C^b.

    Attributes:
      optima: the best size of each budget.
      coefficient, exponent: a and b.
      exponent_low, exponent_high: 95 % interval of b.
      points: the runs.
    """

    optima: Sequence[Optimum]
    coefficient: float
    exponent: float
    exponent_low: float
    exponent_high: float
    points: Sequence[Point]

    def best_parameters(self, flops: float) -> float:
        return self.coefficient * flops**self.exponent


def fit_isoflop(points: Sequence[Point], seed: int = 0) -> Fit | None:
    """Returns the fit, None if fewer than two budgets have runs of three sizes and a minimum.

    Args:
      points: runs of one architecture and objective.
      seed: seed of the bootstrap.
    """
    by_budget: dict[str, list[Point]] = {}
    for point in points:
        if math.isfinite(point.loss):
            by_budget.setdefault(point.budget, []).append(point)
    minima = {budget: minimum for budget, group in by_budget.items() if (minimum := _minimum(group))}
    if len(minima) < MIN_BUDGETS:
        return None
    flops = {budget: float(np.mean([point.flops for point in by_budget[budget]])) for budget in minima}
    coefficient, exponent = _power_law(flops, {budget: size for budget, (size, *_) in minima.items()})
    draw = np.random.default_rng(seed)
    sizes: dict[str, list[float]] = collections.defaultdict(list)
    exponents = []
    for _ in range(SAMPLES):
        resampled = {}
        for budget in minima:
            minimum = _minimum(_resample(by_budget[budget], draw))
            if minimum:
                resampled[budget] = minimum[0]
                sizes[budget].append(minimum[0])
        if len(resampled) == len(minima):
            exponents.append(_power_law(flops, resampled)[1])
    optima = []
    for budget, (size, loss, curvature) in minima.items():
        trained = [point.parameters for point in by_budget[budget]]
        low, high = np.quantile(sizes[budget], [0.025, 0.975]) if sizes[budget] else (math.nan, math.nan)
        is_inside = min(trained) <= size <= max(trained)
        optima.append(Optimum(budget, flops[budget], size, loss, curvature, float(low), float(high), is_inside))
    low, high = np.quantile(exponents, [0.025, 0.975]) if exponents else (math.nan, math.nan)
    of_budgets = [point for group in by_budget.values() for point in group]
    optima = sorted(optima, key=lambda optimum: optimum.flops)
    return Fit(optima, coefficient, exponent, float(low), float(high), of_budgets)


def _minimum(group: Sequence[Point]) -> tuple[float, float, float] | None:
    """Returns (parameters, loss) at the minimum of the parabola over log N, and its curvature. None without one."""
    sizes = np.log([point.parameters for point in group])
    if len(set(sizes)) < MIN_SIZES:
        return None
    center = float(np.mean(sizes))
    curvature, slope, offset = np.polyfit(sizes - center, [point.loss for point in group], 2)
    if curvature <= 0:
        return None
    x = -slope / (2 * curvature)
    return math.exp(center + x), float(offset + slope * x + curvature * x**2), float(curvature)


def _resample(group: Sequence[Point], draw: np.random.Generator) -> list[Point]:
    """Resamples the runs of each size, so that no size is lost; with one run of each, the residuals of the parabola."""
    by_size: dict[float, list[Point]] = {}
    for point in group:
        by_size.setdefault(point.parameters, []).append(point)
    if max(map(len, by_size.values())) > 1:
        return [runs[i] for runs in by_size.values() for i in draw.integers(0, len(runs), len(runs))]
    sizes = np.log([point.parameters for point in group])
    losses = np.array([point.loss for point in group])
    degree = min(2, len(group) - 1)
    fitted = np.polyval(np.polyfit(sizes - sizes.mean(), losses, degree), sizes - sizes.mean())
    freedom = max(len(group) - degree - 1, 1)
    residuals = (losses - fitted) * math.sqrt(len(group) / freedom)  # least squares makes them too small
    sampled = fitted + draw.choice(residuals, len(group))
    return [dataclasses.replace(point, loss=float(loss)) for point, loss in zip(group, sampled, strict=True)]


def _power_law(flops: Mapping[str, float], sizes: Mapping[str, float]) -> tuple[float, float]:
    """Returns (a, b) of N = a C^b by least squares of the logarithms."""
    log_flops = np.log([flops[budget] for budget in sizes])
    exponent, offset = np.polyfit(log_flops - log_flops.mean(), np.log(list(sizes.values())), 1)
    return math.exp(offset - exponent * log_flops.mean()), float(exponent)
