"""Checks that the cells of a study are equal in what the study holds equal."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.quantities import Quantities

ALMOST_EQUAL = ("flops", "parameters")  # compared with Study.tolerance


def check_equality(plan: Plan, quantities: Mapping[str, Quantities]) -> list[str]:
    """Returns a sentence for each stage, with the quantities that are equal in its runs.

    Cells with different seeds are compared only with those of the same seed.

    Raises:
      UserError: for a quantity that is not equal, with the cells that differ from the others.
    """
    sentences = []
    for stage in plan.study.stages:
        runs = [run for run in plan.runs.values() if run.stage is stage and run.name in quantities]
        if not runs:
            continue
        for quantity in plan.study.equal:
            for seed in dict.fromkeys(run.seed for run in runs):
                with_seed = [run for run in runs if run.seed == seed]
                _check_stage(stage.name, quantity, with_seed, quantities, plan.study.tolerance)
        sentences.append(f"{stage.name}: {len(runs)} runs with equal {', '.join(plan.study.equal)}")
    return sentences


def _check_stage(
    stage: str, quantity: str, runs: Sequence[PlannedRun], quantities: Mapping[str, Quantities], tolerance: float
) -> None:
    values = {run.name: getattr(quantities[run.name], quantity) for run in runs}
    usual = collections.Counter(values.values()).most_common(1)[0][0]
    different = {name: value for name, value in values.items() if not _is_equal(quantity, value, usual, tolerance)}
    if different:
        cells = "; ".join(f"{name} has {_show(value)}" for name, value in different.items())
        raise UserError(
            f'The runs of the stage "{stage}" are not equal in {quantity}: {cells}, and {len(values) - len(different)} of '
            f"{len(values)} runs have {_show(usual)}. Change the settings of these cells, or remove "
            f'"{quantity}" from Study.equal.'
        )


def _is_equal(quantity: str, value: Any, usual: Any, tolerance: float) -> bool:
    if quantity in ALMOST_EQUAL:
        return abs(value - usual) <= tolerance * abs(usual)
    return value == usual


def _show(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
