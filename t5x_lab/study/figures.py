"""Figures of a study, as PNG, PDF and SVG: bars of its measures, and losses over tokens, FLOPs and time."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator

from t5x_lab.observe.curves import TRAIN, curve, read_columns
from t5x_lab.study.config import slug
from t5x_lab.study.isoflop import Fit
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.quantities import Quantities
from t5x_lab.study.results import MeasureReport, measured_run
from t5x_lab.study.savings import Losses, held_out_losses

FOLDER, KINDS = "figures", ("png", "pdf", "svg")
POINTS = 200  # of a curve
LEGEND_COLUMNS = 3
AXES = {"tokens": "tokens, padding included", "flops": "FLOPs, forward and backward", "seconds": "hours of training"}


def write_figures(
    plan: Plan, quantities: Mapping[str, Quantities], reports: Sequence[MeasureReport], fits: Mapping[str, Fit | None]
) -> list[str]:
    """Writes all figures that have data. Returns the names of their PNG files, relative to the study directory.

    Args:
      plan: the plan.
      quantities: quantities of the training runs.
      reports: reports of its measures.
      fits: fits of compute-optimal sizes.
    """
    folder = pathlib.Path(plan.study_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    names = [_write_isoflop(fits, folder)]
    names += [_write_bars(report, folder) for report in reports]
    names += [_write_held_out(plan, report, quantities, folder) for report in reports if not fits]
    names += [_write_losses(plan, stage.name, quantities, folder) for stage in plan.study.stages if stage.command == "train"]
    return [f"{FOLDER}/{name}.png" for name in names if name]


def _write_isoflop(fits: Mapping[str, Fit | None], folder: pathlib.Path) -> str | None:
    """Draws the losses of each budget over the size, with their parabolas, and the best sizes over the budgets."""
    drawn = {title: fit for title, fit in fits.items() if fit}
    if not drawn:
        return None
    figure, all_axes = plt.subplots(1, len(drawn) + 1, figsize=(5 * (len(drawn) + 1), 4), layout="constrained")
    budgets = list(dict.fromkeys(optimum.budget for fit in drawn.values() for optimum in fit.optima))
    for axes, (title, fit) in zip(all_axes, drawn.items()):
        for optimum in fit.optima:
            points = [point for point in fit.points if point.budget == optimum.budget]
            sizes = np.array([point.parameters for point in points])
            color = f"C{budgets.index(optimum.budget)}"
            axes.plot(sizes, [point.loss for point in points], "o", markersize=4, color=color, label=optimum.budget)
            grid = np.geomspace(min(*sizes, optimum.parameters), max(*sizes, optimum.parameters), 100)
            parabola = optimum.loss + optimum.curvature * np.log(grid / optimum.parameters) ** 2
            axes.plot(grid, parabola, linestyle="--", linewidth=1, color=color)
            axes.plot(optimum.parameters, optimum.loss, "*", markersize=9, color=color)
        axes.set(xscale="log", xlabel="parameters", ylabel="held-out loss, nats per token", title=title)
        axes.legend(title="FLOPs")
    for number, (title, fit) in enumerate(drawn.items()):
        flops, best, low, high = (
            np.array([getattr(optimum, name) for optimum in fit.optima]) for name in ("flops", "parameters", "low", "high")
        )
        errors = [np.nan_to_num(np.maximum(best - low, 0.0)), np.nan_to_num(np.maximum(high - best, 0.0))]
        all_axes[-1].errorbar(flops, best, errors, marker="*", linestyle="", capsize=3, color=f"C{number}", label=title)
        all_axes[-1].plot(flops, [fit.best_parameters(each) for each in flops], linewidth=1, color=f"C{number}")
    all_axes[-1].set(xscale="log", yscale="log", xlabel="FLOPs, forward and backward", ylabel="best number of parameters")
    longest = max(drawn.values(), key=lambda fit: len(fit.optima))
    all_axes[-1].set_xticks([optimum.flops for optimum in longest.optima], [optimum.budget for optimum in longest.optima])
    all_axes[-1].xaxis.set_minor_locator(NullLocator())
    all_axes[-1].legend()
    for axes in all_axes:
        axes.grid(alpha=0.3)
    return _save(figure, folder, "isoflop")


def _write_bars(report: MeasureReport, folder: pathlib.Path) -> str | None:
    """Draws a bar for each cell, with its interval, a dot for each seed, and lines at chance and the constant answer."""
    cells = [cell for cell in report.cells if report.means[cell.title].units]
    if not cells:
        return None
    scale = 100 if report.measure.percent else 1
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.4 * len(cells)), layout="constrained")
    for row, cell in enumerate(cells):
        mean = report.means[cell.title]
        error = None if math.isnan(mean.low) else scale * (mean.mean - mean.low)
        axes.barh(row, scale * mean.mean, xerr=error, color="C0", alpha=0.6, height=0.6, capsize=3)
        for seed in {seed for seed, _ in cell.values}:
            values = [value for (other, _), value in cell.numbers(report.units).items() if other == seed]
            axes.plot(scale * float(np.mean(values)), row, marker="o", markersize=3, color="black")
    for name, label, style in (("chance", "random answer", ":"), ("constant", "constant answer", "--")):
        if not math.isnan(value := report.reference(name)):
            axes.axvline(scale * value, linestyle=style, color="gray", label=label)
    axes.set_yticks(range(len(cells)), [cell.title for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel(f"{report.measure.name}{', percent' if report.measure.percent else ''}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return _save(figure, folder, f"measure-{slug(report.title)}")


def _write_losses(plan: Plan, stage: str, quantities: Mapping[str, Quantities], folder: pathlib.Path) -> str | None:
    """Draws the training losses of a stage: the mean over seeds, and their range."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in plan.runs.values():
        if run.stage.name == stage and run.name in quantities:
            groups.setdefault(", ".join(run.values.values()), []).append(run)
    rows = math.ceil(len(groups) / LEGEND_COLUMNS)
    figure, all_axes = plt.subplots(1, len(AXES), figsize=(12, 4 + 0.18 * rows), layout="constrained", sharey=True)
    has_data = False
    for color, (title, runs) in enumerate(groups.items()):
        curves = [(quantities[run.name], points) for run in runs if (points := _loss_of(run)) is not None]
        if not curves:
            continue
        has_data = True
        length = min(len(points["loss"]) for _, points in curves)
        losses_SP = np.array([points["loss"][:length] for _, points in curves])
        for axes, (name, label) in zip(all_axes, AXES.items(), strict=True):
            x = np.mean([_x_values(name, numbers, points)[:length] for numbers, points in curves], axis=0)
            _draw(axes, x, losses_SP, color, title)
            axes.set_xlabel(label)
    if not has_data:
        plt.close(figure)
        return None
    all_axes[0].set_ylabel("training loss, nats per token with loss")
    _add_legend(figure)
    return _save(figure, folder, f"loss-{stage}")


def _write_held_out(
    plan: Plan, report: MeasureReport, quantities: Mapping[str, Quantities], folder: pathlib.Path
) -> str | None:
    """Draws a held-out loss over the tokens of its stage, and over the FLOPs of this and earlier stages."""
    groups = held_out_curves(plan, report, quantities) if report.measure.metric == "loss" else {}
    if not groups:
        return None
    rows = math.ceil(len(groups) / LEGEND_COLUMNS)
    figure, all_axes = plt.subplots(1, 2, figsize=(10, 4 + 0.18 * rows), layout="constrained", sharey=True)
    for color, (title, curves) in enumerate(groups.items()):
        length = min(len(losses.losses) for losses, _ in curves)
        losses_SP = np.array([losses.losses[:length] for losses, _ in curves])
        tokens_SP = np.array([losses.tokens[:length] for losses, _ in curves])
        flops_SP = np.array([flops[:length] for _, flops in curves])
        for axes, x_SP in zip(all_axes, (tokens_SP, flops_SP), strict=True):
            _draw(axes, x_SP.mean(axis=0), losses_SP, color, title, marker="o")
    all_axes[0].set(xlabel="tokens of the stage, padding included", ylabel=report.measure.name)
    all_axes[1].set(xlabel="FLOPs of this stage and earlier ones")
    _add_legend(figure)
    return _save(figure, folder, f"curve-{slug(report.title)}")


def held_out_curves(
    plan: Plan, report: MeasureReport, quantities: Mapping[str, Quantities]
) -> dict[str, list[tuple[Losses, np.ndarray]]]:
    """Returns the losses of each seed by the title of a cell, with the FLOPs until each evaluation, [P]."""
    groups: dict[str, list[tuple[Losses, np.ndarray]]] = {}
    for title, cell in ((each.title, cell) for each in report.cells for cell in plan.cells if cell.title == each.title):
        run = measured_run(plan, cell, report.measure)
        if run is None or run.name not in quantities:
            continue
        numbers, names = quantities[run.name], list(cell.runs.values())
        losses = held_out_losses(run.model_dir, report.measure.evaluation, numbers)
        before = sum(quantities[name].flops for name in names[: names.index(run.name)] if name in quantities)
        if len(losses.losses) > 1:
            per_token = numbers.flops / (numbers.steps * numbers.batch_tokens)
            groups.setdefault(title, []).append((losses, before + losses.tokens * per_token))
    return groups


def _draw(axes, x: np.ndarray, losses_SP: np.ndarray, color: int, label: str, **style) -> None:
    """Draws the mean over seeds, and their range."""
    axes.plot(x, losses_SP.mean(axis=0), color=f"C{color}", label=label, linewidth=1, markersize=3, **style)
    axes.fill_between(x, losses_SP.min(axis=0), losses_SP.max(axis=0), color=f"C{color}", alpha=0.2, linewidth=0)
    axes.grid(alpha=0.3)


def _add_legend(figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize="small")


def _loss_of(run: PlannedRun) -> dict[str, np.ndarray] | None:
    """Returns the points of a run's training loss: `steps` of the run itself, `loss`, and `seconds` since its start."""
    columns = read_columns(run.model_dir).get(TRAIN)
    points = curve(columns, "loss", points=POINTS) if columns is not None else None
    if columns is None or points is None:
        return None
    seconds = np.cumsum(np.nan_to_num(columns["seconds_per_step"]))
    position = np.searchsorted(columns.steps, points.steps)
    return {"steps": points.steps - columns.steps[0] + 1, "loss": points.mean, "seconds": seconds[position]}


def _x_values(name: str, numbers: Quantities, points: Mapping[str, np.ndarray]) -> np.ndarray:
    if name == "seconds":
        return points["seconds"] / 3600
    per_step = numbers.batch_tokens if name == "tokens" else numbers.flops / numbers.steps
    return points["steps"] * per_step


def _save(figure, folder: pathlib.Path, name: str) -> str:
    for kind in KINDS:
        figure.savefig(folder / f"{name}.{kind}", dpi=120)
    plt.close(figure)
    return name
