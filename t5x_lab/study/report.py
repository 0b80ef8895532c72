"""Report of a study: tables of its measures, orderings and the equality checks, as Markdown and as JSON.

Everything is read from the run directories. A cell without results is "missing", and averages name the units that they are of.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.json_files import write_atomically, write_json
from t5x_lab.study.execution import GIN, command
from t5x_lab.study.figures import write_figures
from t5x_lab.study.isoflop import Fit
from t5x_lab.study.plan import Plan
from t5x_lab.study.quantities import Quantities
from t5x_lab.study.results import MeasureReport, fit_sizes, make_measure_report

MARKDOWN, JSON = "report.md", "report.json"
MISSING = "missing"


def write_report(plan: Plan, quantities: Mapping[str, Quantities], equal: Sequence[str]) -> pathlib.Path:
    """Writes report.md, report.json and figures into the study directory. Returns the path of report.md.

    Args:
      plan: the plan.
      quantities: quantities of the training runs.
      equal: sentences on the quantities that are equal.
    """
    folder = pathlib.Path(plan.study_dir)
    reports = [make_measure_report(plan, measure) for measure in plan.study.measures]
    figures = write_figures(plan, quantities, reports)
    write_json(folder / JSON, {report.measure.name: _to_json(report) for report in reports}, indent=1)
    write_atomically(folder / MARKDOWN, _to_markdown(plan, quantities, equal, reports, figures))
    return folder / MARKDOWN


def _to_json(report: MeasureReport) -> dict[str, Any]:
    finite = lambda value: value if math.isfinite(value) else None
    show = lambda x: {name: finite(value) for name, value in dataclasses.asdict(x).items()}
    return {
        "units": list(report.units),
        "units_at_the_constant_answer": list(report.uninformative),
        "cells": {
            cell.title: {
                **show(report.means[cell.title]),
                "missing_seeds": list(cell.missing),
                "values": [[seed, unit, value.value] for (seed, unit), value in cell.values.items()],
            }
            for cell in report.cells
        },
        "orderings": [
            {"better": o.better, "worse": o.worse, "shown": o.is_shown, **show(o.difference)} for o in report.orderings
        ],
    }


def _to_markdown(
    plan: Plan,
    quantities: Mapping[str, Quantities],
    equal: Sequence[str],
    reports: Sequence[MeasureReport],
    figures: Sequence[str],
) -> str:
    names = ", ".join(f"{factor.name} ({', '.join(factor.values)})" for factor in plan.study.factors)
    seeds = ", ".join(map(str, plan.study.seeds))
    lines = ["# Study", "", f"Factors: {names}. Seeds: {seeds}. Scale: {plan.study.scale}.", ""]
    lines += ["Checked: " + "; ".join(equal) + ".", ""] if equal else []
    for report in reports:
        lines += _measure_section(report)
        if plan.study.isoflop and plan.study.isoflop.measure == report.measure.name:
            lines += _isoflop_section(fit_sizes(plan, report, quantities))
    lines += [line for figure in figures for line in (f"![{pathlib.Path(figure).stem}]({figure})", "")]
    lines += ["## Runs", "", *_runs_table(plan, quantities), "", "Commands, in this order:", "", "```"]
    lines += [" ".join(["t5x_lab", *command(plan, run)]) for run in plan.runs.values()]
    return "\n".join([*lines, "```", "", f"Their settings are in {GIN}/.", ""])


def _measure_section(report: MeasureReport) -> list[str]:
    measure, scale = report.measure, 100 if report.measure.percent else 1
    number = lambda value: "" if math.isnan(value) else f"{scale * value:.{1 if measure.percent else 4}f}"
    published = bool(measure.published)
    header = [measure.name, "mean", "95 % interval", "seeds", *(["published"] if published else [])]
    rows = []
    for cell in report.cells:
        mean = report.means[cell.title]
        is_known = bool(mean.units)
        bounds = "" if math.isnan(mean.low) else f"{number(mean.low)} … {number(mean.high)}"
        seeds = f"{mean.seeds}" + (f", {MISSING}: {', '.join(map(str, cell.missing))}" if cell.missing else "")
        row = [cell.title, number(mean.mean) if is_known else MISSING, bounds, seeds if is_known else ""]
        rows.append([*row, *([str(measure.published.get(cell.title, ""))] if published else [])])
    for name, title in (("constant", "constant answer"), ("chance", "random answer")):
        if not math.isnan(value := report.reference(name)):
            rows.append([title, number(value), *[""] * (len(header) - 2)])
    shown = [o for o in report.orderings if o.is_shown]
    units = f"Mean over {len(report.units)} units: {', '.join(report.units)}." if report.units else "No unit has results."
    lines = [f"## {measure.name}", "", *_table(header, rows), "", units]
    if report.uninformative:
        lines += ["", f"At the constant answer in all cells, and not in the mean: {', '.join(report.uninformative)}."]
    lines += [
        "",
        f"{len(shown)} of {len(report.orderings)} orderings are shown, {len(report.orderings) - len(shown)} are open.",
        "",
    ]
    if shown:
        difference = lambda o: f"{number(o.difference.mean)} ({number(o.difference.low)} … {number(o.difference.high)})"
        lines += [*_table(["better", "worse", "difference"], [[o.better, o.worse, difference(o)] for o in shown]), ""]
    return lines


def _isoflop_section(fits: Mapping[str, Fit | None]) -> list[str]:
    """Returns tables of the best size of each budget, and of the power laws."""
    rows = [
        [
            title, optimum.budget, f"{optimum.flops:.3g}", f"{optimum.parameters:,.0f}",
            f"{optimum.low:,.0f} … {optimum.high:,.0f}" + ("" if optimum.is_inside else ", outside of the trained sizes"),
            f"{optimum.loss:.4f}",
        ]
        for title, fit in fits.items()
        for optimum in (fit.optima if fit else ())
    ]  # fmt: skip
    laws = [
        [title, f"N = {fit.coefficient:.3g} C^{fit.exponent:.3f}", f"{fit.exponent_low:.3f} … {fit.exponent_high:.3f}"]
        if fit
        else [title, "no fit: it needs two budgets with three sizes and a minimum", ""]
        for title, fit in fits.items()
    ]
    return [
        "Compute-optimal sizes: N parameters for C FLOPs, with 95 % intervals of a bootstrap over runs.", "",
        *_table(["cells", "budget", "FLOPs", "best parameters", "95 % interval", "loss"], rows), "",
        *_table(["cells", "law", "95 % interval of the exponent"], laws), "",
    ]  # fmt: skip


def _runs_table(plan: Plan, quantities: Mapping[str, Quantities]) -> list[str]:
    rows = [[name, f"{q.steps:,}", f"{q.tokens:,}", f"{q.flops:.3g}", f"{q.parameters:,}"] for name, q in quantities.items()]
    return _table(["run", "steps", "tokens", "FLOPs", "parameters"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table with numbers aligned to the right."""
    align = "|".join(["---", *["---:"] * (len(header) - 1)])
    return [f"| {' | '.join(header)} |", f"|{align}|", *(f"| {' | '.join(row)} |" for row in rows)]
