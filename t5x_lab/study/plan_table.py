"""Table of a study's runs, printed before it begins."""

from collections.abc import Mapping

from t5x_lab.study.plan import Plan
from t5x_lab.study.quantities import Quantities
from t5x_lab.study.timing import StepTime

HEADER = ("run", "steps", "tokens", "FLOPs", "parameters", "cells")


def plan_table(plan: Plan, quantities: Mapping[str, Quantities], times: Mapping[str, StepTime] = {}, jobs: int = 1) -> str:
    """Returns a table with a row for each run and the sums of all runs.

    Args:
      plan: the plan.
      quantities: quantities of the training runs.
      times: time of a step of the training runs, for their hours. {} = without.
      jobs: number of runs at a time, by which the sum of the hours is divided.
    """
    hours = {name: time.seconds * quantities[name].steps / 3600 for name, time in times.items()}
    rows = [(*HEADER, *(["hours", "known by"] if times else []))]
    for name in plan.runs:
        cells = f"{len(plan.cells_of(name))}"
        more = [f"{hours[name]:.2f}", times[name].note] if name in times else []
        if name in quantities:
            q = quantities[name]
            rows.append((name, f"{q.steps:,}", f"{q.tokens:,}", f"{q.flops:.3g}", f"{q.parameters:,}", cells, *more))
        else:
            rows.append((name, "evaluation", "", "", "", cells))
    tokens, flops = (sum(getattr(q, kind) for q in quantities.values()) for kind in ("tokens", "flops"))
    more = [f"{sum(hours.values()) / jobs:.2f}", *([f"{jobs} at a time"] if jobs > 1 else [])] if times else []
    rows.append((f"{len(plan.runs)} runs", "", f"{tokens:,}", f"{flops:.3g}", "", f"{len(plan.cells)}", *more))
    columns = range(max(map(len, rows)))
    rows = [(*row, *[""] * (len(columns) - len(row))) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in columns]
    align = lambda row: [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))]
    return "\n".join("  ".join(align(row)).rstrip() for row in rows)
