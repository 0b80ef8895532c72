"""Report of a study: tables of its measures, orderings and the equality checks, as Markdown, HTML and JSON.

Everything is read from the run directories. A cell without results is "missing", and averages name the units that they are of.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.json_files import write_atomically, write_json
from t5x_lab.report.markdown_page import to_html
from t5x_lab.study.config import Saving
from t5x_lab.study.execution import GIN, command
from t5x_lab.study.figures import write_figures
from t5x_lab.study.isoflop import Fit
from t5x_lab.study.plan import Plan
from t5x_lab.study.quantities import Quantities
from t5x_lab.study.results import MeasureReport, fit_sizes, make_measure_reports
from t5x_lab.study.savings import Saved, compute_savings, mean_ratio

MARKDOWN, HTML, JSON = "report.md", "report.html", "report.json"
MISSING, AT_CONSTANT = "missing", "at the constant answer"


def write_report(plan: Plan, quantities: Mapping[str, Quantities], equal: Sequence[str]) -> pathlib.Path:
    """Writes report.md, report.html, report.json and figures into the study directory. Returns the path of report.html.

    Args:
      plan: the plan.
      quantities: quantities of the training runs.
      equal: sentences on the quantities that are equal.
    """
    folder = pathlib.Path(plan.study_dir)
    reports = [report for measure in plan.study.measures for report in make_measure_reports(plan, measure)]
    savings = [(saving, compute_savings(plan, saving, quantities)) for saving in plan.study.savings]
    fits = _fit_sizes(plan, reports, quantities)
    figures = write_figures(plan, quantities, reports, fits)
    content = {
        "measures": {report.title: _to_json(report) for report in reports},
        "sizes": {title: fit and _fit_to_json(fit) for title, fit in fits.items()},
        "savings": {saving.name: [_finite(dataclasses.asdict(seed)) for seed in seeds] for saving, seeds in savings},
    }
    write_json(folder / JSON, content, indent=1)
    text = _to_markdown(plan, quantities, equal, reports, fits, savings, figures)
    write_atomically(folder / MARKDOWN, text)
    images = {name: (folder / name).with_suffix(".svg").read_bytes() for name in figures}
    write_atomically(folder / HTML, to_html("Study", text, images))
    return folder / HTML


def _fit_sizes(plan: Plan, reports: Sequence[MeasureReport], quantities: Mapping[str, Quantities]) -> Mapping[str, Fit | None]:
    """Returns the fits of compute-optimal sizes, if the study has them. See `fit_sizes`."""
    isoflop = plan.study.isoflop
    if isoflop is None:
        return {}
    return fit_sizes(plan, [report for report in reports if report.measure.name == isoflop.measure], quantities)


def _fit_to_json(fit: Fit) -> dict[str, Any]:
    numbers = {name: _number(getattr(fit, name)) for name in ("coefficient", "exponent", "exponent_low", "exponent_high")}
    return {**numbers, "optima": [_finite(dataclasses.asdict(optimum)) for optimum in fit.optima]}


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if isinstance(value, float) else value for name, value in numbers.items()}


def _number(value: float) -> float | None:
    """Returns a number for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def _to_json(report: MeasureReport) -> dict[str, Any]:
    show = lambda x: _finite(dataclasses.asdict(x))
    return {
        "units": list(report.units),
        "units_at_the_constant_answer": list(report.uninformative),
        "cells": {
            cell.title: {
                **show(report.means[cell.title]),
                "missing_seeds": list(cell.missing),
                "values": [[seed, unit, _number(value.value)] for (seed, unit), value in cell.values.items()],
            }
            for cell in report.cells
        },
        "orderings": [
            {
                "better": o.better,
                "worse": o.worse,
                "shown": o.is_shown,
                "adjusted_p": _number(o.adjusted),
                **show(o.difference),
            }
            for o in report.orderings
        ],
    }


def _to_markdown(
    plan: Plan,
    quantities: Mapping[str, Quantities],
    equal: Sequence[str],
    reports: Sequence[MeasureReport],
    fits: Mapping[str, Fit | None],
    savings: Sequence[tuple[Saving, Sequence[Saved]]],
    figures: Sequence[str],
) -> str:
    names = ", ".join(f"{factor.name} ({', '.join(factor.values)})" for factor in plan.study.factors)
    seeds = ", ".join(map(str, plan.study.seeds))
    lines = ["# Study", "", f"Factors: {names}. Seeds: {seeds}. Scale: {plan.study.scale}.", ""]
    lines += ["Checked: " + "; ".join(equal) + ".", ""] if equal else []
    for report in reports:
        lines += _measure_section(report)
    lines += _isoflop_section(fits) if fits else []
    for saving, by_seed in savings:
        lines += _saving_section(saving, by_seed)
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
        without_mean = AT_CONSTANT if cell.values and report.uninformative else MISSING
        row = [cell.title, number(mean.mean) if is_known else without_mean, bounds, seeds if is_known else ""]
        rows.append([*row, *(["" if cell.published is None else str(cell.published)] if published else [])])
    for name, title in (("constant", "constant answer"), ("chance", "random answer")):
        if not math.isnan(value := report.reference(name)):
            rows.append([title, number(value), *[""] * (len(header) - 2)])
    lines = [f"## {report.title}", "", *_table(header, rows), "", *_unit_sentences(report), ""]
    shown = [o for o in report.orderings if o.is_shown]
    open_ones = len(report.orderings) - len(shown)
    lines += [f"{len(shown)} of {len(report.orderings)} orderings are shown, {open_ones} are open.", ""] if report.units else []
    if shown:
        difference = lambda o: f"{number(o.difference.mean)} ({number(o.difference.low)} … {number(o.difference.high)})"
        lines += _table(
            ["better", "worse", "difference", "adjusted p"],
            [[o.better, o.worse, difference(o), f"{o.adjusted:.3f}"] for o in shown],
        )
        lines.append("")
    return lines


def _unit_sentences(report: MeasureReport) -> list[str]:
    """Returns what the mean is of."""
    units, uninformative = report.units, ", ".join(report.uninformative)
    if not units and not uninformative:
        return ["No unit has results."]
    sentences = [f"Mean over {len(units)} units: {', '.join(units)}."] if len(units) > 1 else []
    if len(units) == 1:
        sentences = [f"Of one unit, {units[0]}: orderings are those of this unit, and say nothing about others."]
    if uninformative:
        sentences += ["", f"At the constant answer in all cells, and not in the mean: {uninformative}."]
    return sentences


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
        "## Compute-optimal sizes", "",
        "N parameters for C FLOPs, with 95 % intervals of a bootstrap over runs.", "",
        *_table(["cells", "budget", "FLOPs", "best parameters", "95 % interval", "loss"], rows), "",
        *_table(["cells", "law", "95 % interval of the exponent"], laws), "",
    ]  # fmt: skip


def _saving_section(saving: Saving, seeds: Sequence[Saved]) -> list[str]:
    """Returns a table of the tokens of each seed, and the mean ratios."""
    ratio = lambda value, at_least: f"more than {at_least:.2f}" if math.isnan(value) else f"{value:.2f}"
    rows = [
        [
            f"{s.seed}", f"{s.tokens:,.0f}", f"{s.loss:.4f}",
            "not reached" if math.isnan(s.scratch_tokens) else f"{s.scratch_tokens:,.0f}",
            ratio(s.ratio, s.all_scratch_tokens / s.tokens),
            "not reached" if math.isnan(s.tokens_to_scratch) else f"{s.ratio_at_scratch:.2f}",
        ]
        for s in seeds
    ]  # fmt: skip
    at_scratch = "ratio at the last loss from scratch"
    header = ["seed", "tokens of adaptation", "loss", "tokens from scratch to this loss", "ratio", at_scratch]
    lines = [f"## Tokens saved: {saving.name}", "", *(_table(header, rows) if rows else ["No seed has results."]), ""]
    for name, ratios in (("ratio", [s.ratio for s in seeds]), (at_scratch, [s.ratio_at_scratch for s in seeds])):
        if ratios and not any(map(math.isnan, ratios)):
            mean = mean_ratio(ratios)
            bounds = "" if math.isnan(mean.low) else f" ({mean.low:.2f} … {mean.high:.2f})"
            lines += [f"Mean {name}: {mean.mean:.2f}{bounds}.", ""]
    return lines + ([f"Published: {saving.published}.", ""] if saving.published is not None else [])


def _runs_table(plan: Plan, quantities: Mapping[str, Quantities]) -> list[str]:
    rows = [[name, f"{q.steps:,}", f"{q.tokens:,}", f"{q.flops:.3g}", f"{q.parameters:,}"] for name, q in quantities.items()]
    return _table(["run", "steps", "tokens", "FLOPs", "parameters"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table with numbers aligned to the right."""
    align = "|".join(["---", *["---:"] * (len(header) - 1)])
    return [f"| {' | '.join(header)} |", f"|{align}|", *(f"| {' | '.join(row)} |" for row in rows)]
