"""IsoFLOP fits recover the sizes that a known law of the loss makes optimal."""

import json
import math

import numpy as np
import pytest

from t5x_lab.study.config import Factor, IsoFlop, Stage, Study
from t5x_lab.study.isoflop import Point, fit_isoflop
from t5x_lab.study.measures import Measure
from t5x_lab.study.plan import make_plan
from t5x_lab.study.quantities import Quantities
from t5x_lab.study.report import write_report
from t5x_lab.study.results import fit_sizes, make_measure_reports

# Hoffmann et al. 2022, equation 10: L(N, D) = E + A / N^alpha + B / D^beta, with C = 6 N D.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
BUDGETS = (1e17, 1e18, 1e19, 1e20)


def best_size(flops: float) -> float:
    """Returns the minimum of L over N in closed form (Hoffmann et al. 2022, equation 4)."""
    factor = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    return factor * (flops / 6) ** (BETA / (ALPHA + BETA))


def points(noise: float, seeds: int = 1, around: float = 2.0, sizes: int = 7) -> list[Point]:
    draw = np.random.default_rng(0)
    return [
        Point(f"{flops:.0e}", flops, n, E + A / n**ALPHA + B / (flops / 6 / n) ** BETA + noise * draw.normal(), seed)
        for flops in BUDGETS
        for n in best_size(flops) * np.exp(np.linspace(-math.log(around), math.log(around), sizes))
        for seed in range(seeds)
    ]


def test_the_law_is_recovered():
    fit = fit_isoflop(points(noise=0.0, around=1.5))
    assert fit.exponent == pytest.approx(BETA / (ALPHA + BETA), abs=0.002)
    for optimum, flops in zip(fit.optima, BUDGETS, strict=True):
        assert optimum.parameters == pytest.approx(best_size(flops), rel=0.01) and optimum.is_inside
    assert fit.best_parameters(1e19) == pytest.approx(best_size(1e19), rel=0.01)


@pytest.mark.parametrize("seeds", [1, 4])
def test_intervals_contain_the_law_and_grow_with_the_noise(seeds):
    widths = []
    for noise in (0.002, 0.01):
        fit = fit_isoflop(points(noise, seeds, around=3.0))
        assert fit.exponent_low < BETA / (ALPHA + BETA) < fit.exponent_high
        assert all(optimum.low < optimum.parameters < optimum.high for optimum in fit.optima)
        widths.append(fit.exponent_high - fit.exponent_low)
    assert widths[1] > 2 * widths[0] > 0


def test_too_few_sizes_or_budgets_and_curves_without_a_minimum_have_no_fit():
    assert fit_isoflop(points(0.0, sizes=2)) is None
    assert fit_isoflop([point for point in points(0.0) if point.budget == "1e+17"]) is None
    falling = [Point(f"{c}", c, n, 5.0 - 0.1 * math.log(n) ** 2 / 50) for c in BUDGETS for n in (1e6, 1e7, 1e8)]
    assert fit_isoflop(falling) is None
    small = [point for point in points(0.0, around=4.0) if point.parameters < best_size(point.flops) * 0.8]
    assert not any(optimum.is_inside for optimum in fit_isoflop(small).optima)


def test_a_study_fits_each_architecture(tmp_path):
    """Writes the losses of the law as the results of a study of three sizes, four budgets and two architectures.

    The names of the tasks contain the objective, so that the losses of the two architectures have no unit in common.
    """
    sizes = {"small": 0.5, "medium": 1.0, "large": 2.0}
    factors = (
        Factor(name="architecture", values={"decoder": (), "encoder-decoder": ()}),
        Factor(name="budget", values={f"{flops:.0e}": () for flops in BUDGETS}),
        Factor(name="size", values={name: () for name in sizes}),
    )
    stage = Stage(name="pretrain", factors=("architecture", "budget", "size"))
    loss = Measure(
        name="loss",
        evaluation="eval",
        metric="loss",
        best_is="lowest",
        percent=False,
        within=("architecture",),
        over=("seeds",),
    )
    isoflop = IsoFlop(measure="loss", budget="budget", size="size")
    study = Study(factors=factors, stages=(stage,), measures=(loss,), isoflop=isoflop, equal=())
    plan, quantities = make_plan(study, str(tmp_path)), {}
    for cell in plan.cells:
        flops, n = float(cell.values["budget"]), best_size(float(cell.values["budget"])) * sizes[cell.values["size"]]
        better = 0.1 if cell.values["architecture"] == "decoder" else 0.0
        task = "text_full_lm" if cell.values["architecture"] == "decoder" else "text_prefix_lm"
        (name,) = cell.runs.values()
        folder = tmp_path / "runs" / name / "evals" / "eval"
        folder.mkdir(parents=True)
        value = E + A / n**ALPHA + B / (flops / 6 / n) ** BETA - better
        (folder / "9.json").write_text(json.dumps({"step": 9, "results": {task: {"loss": value}}}))
        quantities[name] = Quantities(1, 1, 1, 1, flops, int(n), 0, "", 0.0, "", "", "")
    fits = fit_sizes(plan, make_measure_reports(plan, loss), quantities)
    assert list(fits) == ["decoder", "encoder-decoder"]
    assert fits["decoder"].exponent == pytest.approx(BETA / (ALPHA + BETA), abs=0.01)
    difference = fits["encoder-decoder"].optima[0].loss - fits["decoder"].optima[0].loss
    assert difference == pytest.approx(0.1)
    write_report(plan, quantities, [])
    text = (tmp_path / "report.md").read_text()
    assert text.count("C^0.4") == 2 and "| decoder | 1e+17 | 1e+17 |" in text
    assert "(figures/isoflop.png)" in text and (tmp_path / "figures" / "isoflop.pdf").stat().st_size > 1000
    sizes_of = json.loads((tmp_path / "report.json").read_text())["sizes"]["decoder"]
    assert sizes_of["exponent"] == fits["decoder"].exponent
    for optimum, n in zip(fits["decoder"].optima, map(best_size, BUDGETS), strict=True):  # the parabola is that of the points
        values = [point.loss for point in fits["decoder"].points if point.budget == optimum.budget]
        at = lambda n: optimum.loss + optimum.curvature * math.log(n / optimum.parameters) ** 2
        np.testing.assert_allclose([at(n * size) for size in sizes.values()], values, atol=1e-3)
