"""Checks that the cells of a study are equal in what the study holds equal."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.quantities import Quantities

ALMOST_EQUAL = ("flops", "parameters")  # compared with Study.tolerance
MAX_SHOWN = 5


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
        shown = {name: _show_difference(value, usual) for name, value in list(different.items())[:MAX_SHOWN]}
        cells = "; ".join(f"{name} has {value} (usual: {other})" for name, (value, other) in shown.items())
        more = f"; {len(different) - len(shown)} more cells differ" if len(different) > len(shown) else ""
        raise UserError(
            f'The runs of the stage "{stage}" are not equal in {quantity}: {cells}{more}. {len(values) - len(different)} of '
            f"{len(values)} runs have the usual value. Change the settings of these cells, or remove "
            f'"{quantity}" from Study.equal.'
        )


def _is_equal(quantity: str, value: Any, usual: Any, tolerance: float) -> bool:
    if quantity in ALMOST_EQUAL:
        return abs(value - usual) <= tolerance * abs(usual)
    return value == usual


def _show_difference(value: Any, usual: Any) -> tuple[str, str]:
    """Returns both values as text; of objects whose fields have the same names, only the fields that differ."""
    if isinstance(value, int | float):
        return f"{value:,}", f"{usual:,}"
    fields, usual_fields = (re.split(r"[(),]+ ?", str(each)) for each in (value, usual))
    if [field.split("=")[0] for field in fields] != [field.split("=")[0] for field in usual_fields]:
        return str(value), str(usual)
    differing = [pair for pair in zip(fields, usual_fields) if pair[0] != pair[1]]
    return ", ".join(pair[0] for pair in differing), ", ".join(pair[1] for pair in differing)
