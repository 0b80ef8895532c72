"""Results of a study: for each cell and measure the values by seed and unit, read from run directories alone."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from t5x_lab.study.intervals import LEVEL, Interval, Results, adjust, interval, mean_over_units, paired_difference
from t5x_lab.study.isoflop import Fit, Point, fit_isoflop
from t5x_lab.study.measures import ChosenStep, Measure, Value
from t5x_lab.study.plan import Cell, Plan, PlannedRun
from t5x_lab.study.quantities import Quantities


@dataclasses.dataclass(frozen=True)
class CellResults:
    """Results of a measure in a cell, over its seeds.

    Attributes:
      title: values of the cell, joined by ", ".
      published: the published number of `Measure.published`. None if there is none.
      values: value by (seed, unit).
      missing: seeds without results.
    """

    title: str
    published: float | None
    values: Mapping[tuple[int, str], Value]
    missing: Sequence[int]

    def numbers(self, units: Collection[str]) -> Results:
        """Returns the values of some units by (seed, unit)."""
        return {key: value.value for key, value in self.values.items() if key[1] in units}


def read_results(plan: Plan, measure: Measure) -> list[CellResults]:
    """Returns the results of a measure in the cells that are compared."""
    return [_read_cell(plan, title, cells, measure) for title, cells in _compared_cells(plan, measure).items()]


def _read_cell(plan: Plan, title: str, cells: Sequence[Cell], measure: Measure) -> CellResults:
    runs = {cell.seed: measured_run(plan, cell, measure) for cell in cells}
    by_seed = {seed: measure.read(run.model_dir) if run else {} for seed, run in runs.items()}
    values = {(seed, unit): value for seed, units in by_seed.items() for unit, value in units.items()}
    published = measure.published.get(_title_without(cells[0], measure.best_of))
    return CellResults(title, published, values, [seed for seed, units in by_seed.items() if not units])


def measured_run(plan: Plan, cell: Cell, measure: Measure) -> PlannedRun | None:
    """Returns the cell's last run that may have the evaluation. None if it has no such run."""
    names = [name for stage, name in cell.runs.items() if not measure.stages or stage in measure.stages]
    return plan.runs[names[-1]] if names else None


def _title_without(cell: Cell, factors: Collection[str]) -> str:
    return ", ".join(value for factor, value in cell.values.items() if factor not in factors)


def _compared_cells(plan: Plan, measure: Measure) -> dict[str, list[Cell]]:
    """Returns the cells of all seeds by title: the best of those titles that differ in factors of `Measure.best_of` alone."""
    alike: dict[str, dict[str, list[Cell]]] = {}
    for cell in plan.cells:
        alike.setdefault(_title_without(cell, measure.best_of), {}).setdefault(cell.title, []).append(cell)
    best = [_best_title(plan, titles, measure) for titles in alike.values()]
    return {title: titles[title] for title, titles in zip(best, alike.values())}


def _best_title(plan: Plan, titles: Mapping[str, Sequence[Cell]], measure: Measure) -> str:
    """Returns the title with the best mean over seeds of the evaluation that chooses, at the best step of each seed.

    Titles with fewer seeds or units than others are not chosen: the best of them may have been lucky.
    """
    if len(titles) == 1:
        return next(iter(titles))
    bests: dict[str, list[ChosenStep]] = {}
    for title, cells in titles.items():
        runs = filter(None, (measured_run(plan, cell, measure) for cell in cells))
        bests[title] = list(filter(None, (measure.choose_step(run.model_dir) for run in runs)))
    extents = {title: (len(best), sum(step.num_units for step in best)) for title, best in bests.items()}
    most = max(extents.values())
    means = {title: sum(step.mean for step in best) / max(len(best), 1) for title, best in bests.items()}
    return measure.best({title: mean for title, mean in means.items() if extents[title] == most})


def common_units(results: Sequence[CellResults]) -> list[str]:
    """Returns the units that all cells with results have in all their seeds, so that means compare the same units."""
    with_results = [cell for cell in results if cell.values]
    seeds = [{seed for seed, _ in cell.values} for cell in with_results]
    units = dict.fromkeys(unit for cell in with_results for _, unit in cell.values)
    is_in_all = lambda unit: all((seed, unit) in cell.values for cell, own in zip(with_results, seeds) for seed in own)
    return list(filter(is_in_all, units))


def informative_units(results: Sequence[CellResults], units: Sequence[str], best_is: str) -> list[str]:
    """Returns the units in which some cell is better than the constant answer by two standard errors over seeds.

    The 95 % interval of Student's t is then above the constant answer. Units without a constant answer are kept, and so are all
    with a single seed, for which there is no standard error. Of many cells one may be lucky: orderings are tested together.
    """
    sign = 1 if best_is == "highest" else -1

    def is_informative(unit: str) -> bool:
        for cell in filter(lambda cell: cell.values, results):
            above = interval({key: sign * (x.value - x.constant) for key, x in cell.values.items() if key[1] == unit})
            if math.isnan(above.low) or above.low > 1e-6:  # scores may be rounded
                return True
        return False

    return [unit for unit in units if is_informative(unit)]


@dataclasses.dataclass(frozen=True)
class Ordering:
    """A comparison of two cells.

    Attributes:
      better, worse: titles.
      difference: interval of the difference, in favour of `better`.
      adjusted: p-value of the difference, adjusted to the false discovery rate of all comparisons of the measure.
    """

    better: str
    worse: str
    difference: Interval
    adjusted: float

    @property
    def is_shown(self) -> bool:
        """Whether the ordering is shown at a false discovery rate of 5 %. Otherwise it is open."""
        return self.adjusted <= 1 - LEVEL


def orderings(numbers: Mapping[str, Results], best_is: str) -> list[Ordering]:
    """Returns the comparisons of all pairs of cells with results, paired over seeds and units.

    Args:
      numbers: results by the title of a cell.
      best_is: "highest" or "lowest".
    """
    sign = 1 if best_is == "highest" else -1
    numbers = {title: {key: sign * value for key, value in own.items()} for title, own in numbers.items() if own}
    pairs = []
    for first, second in itertools.combinations(numbers, 2):
        difference = paired_difference(numbers[first], numbers[second])
        if difference.mean < 0:
            first, second, difference = second, first, paired_difference(numbers[second], numbers[first])
        pairs.append((first, second, difference))
    adjusted = adjust([difference.p_value for _, _, difference in pairs])
    return [Ordering(*pair, p_value) for pair, p_value in zip(pairs, adjusted)]


@dataclasses.dataclass(frozen=True)
class MeasureReport:
    """A measure in cells that are compared.

    Attributes:
      measure: the measure.
      group: the values that all of these cells have, of the factors of `Measure.within`, joined by ", ". "" = all cells.
      cells: results of each cell.
      units: units that count: those that all cells have, without those at the constant answer.
      uninformative: units at the constant answer in all cells.
      means: mean over seeds and units by cell.
      orderings: comparisons of all pairs of cells.
    """

    measure: Measure
    group: str
    cells: Sequence[CellResults]
    units: Sequence[str]
    uninformative: Sequence[str]
    means: Mapping[str, Interval]
    orderings: Sequence[Ordering]

    @property
    def title(self) -> str:
        return f"{self.measure.name}: {self.group}" if self.group else self.measure.name

    def reference(self, name: str) -> float:
        """Returns the mean of "chance" or "constant" over the units that count. NaN if it is unknown for any of them."""
        values = [getattr(value, name) for cell in self.cells for (_, unit), value in cell.values.items() if unit in self.units]
        return sum(values) / len(values) if values else math.nan


def fit_sizes(plan: Plan, reports: Sequence[MeasureReport], quantities: Mapping[str, Quantities]) -> dict[str, Fit | None]:
    """Returns the fits of compute-optimal sizes by the values of the other factors. None where there is none.

    FLOPs are those of all trainings of a cell, parameters those of the last one.
    """
    isoflop = plan.study.isoflop
    assert isoflop is not None
    losses: dict[str, Results] = {cell.title: cell.numbers(report.units) for report in reports for cell in report.cells}
    chosen = [factor for report in reports for factor in report.measure.best_of]
    points: dict[str, list[Point]] = {}
    for cell in plan.cells:
        trainings = [quantities[name] for name in cell.runs.values() if name in quantities]
        values = [value for (seed, _), value in losses.get(cell.title, {}).items() if seed == cell.seed]
        others = _title_without(cell, (isoflop.budget, isoflop.size, *chosen))
        group = points.setdefault(others or "all cells", [])
        if values and trainings:
            flops, loss = sum(training.flops for training in trainings), sum(values) / len(values)
            group.append(Point(cell.values[isoflop.budget], flops, trainings[-1].parameters, loss, cell.seed))
    return {title: fit_isoflop(group) for title, group in points.items()}


def make_measure_reports(plan: Plan, measure: Measure) -> list[MeasureReport]:
    """Reads a measure of all cells and compares those of each group of `Measure.within`."""
    group_of = {cell.title: ", ".join(cell.values[factor] for factor in measure.within) for cell in plan.cells}
    groups: dict[str, list[CellResults]] = {}
    for cell in read_results(plan, measure):
        groups.setdefault(group_of[cell.title], []).append(cell)
    return [_make_measure_report(measure, group, cells) for group, cells in groups.items()]


def _make_measure_report(measure: Measure, group: str, cells: Sequence[CellResults]) -> MeasureReport:
    shared = common_units(cells)
    units = informative_units(cells, shared, measure.best_is)
    numbers = {cell.title: cell.numbers(units) for cell in cells}
    if "units" not in measure.over:
        numbers = {title: mean_over_units(own) for title, own in numbers.items()}
    means = {title: interval(own) for title, own in numbers.items()}
    uninformative = [unit for unit in shared if unit not in units]
    return MeasureReport(measure, group, cells, units, uninformative, means, orderings(numbers, measure.best_is))
