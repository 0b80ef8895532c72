"""Charts of runs for a page, drawn in the browser by Bokeh: curves over a choice of axes, zoomed together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_lab.models.loss import METRICS
from t5x_lab.observe.curves import TRAIN, Columns, Curve, curve
from t5x_lab.report.run_directory import RunFiles

COLORS = ("#3b82f6", "#f97316", "#22a06b", "#d946ef", "#eab308", "#06b6d4", "#ef4444", "#8b5cf6", "#84cc16", "#a16207")
MOST_CHARTS, MOST_LINES, MOST_NAMES = 48, 40, 12  # beyond which evaluations have tables alone; of a chart; of a legend
GRAY = "#767676"  # to be read on white and on black alike
TRAINING = {  # what is drawn of steps beside the loss
    "accuracy": "accuracy of the next token",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU",
    "data_wait_fraction": "share of time that waits for data",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
      label: in its chart.
      run: the number of its run.
      color: of the page.
      curve: what is drawn.
      x: by axis, where its points are.
      is_train: drawn as a line with a band; else with a mark at each point.
    """

    label: str
    run: int
    color: str
    curve: Curve
    x: dict[str, np.ndarray]
    is_train: bool


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line]
    references: dict[str, float] = dataclasses.field(default_factory=dict)


class Axes:
    """What a page's curves may be drawn over: step, and where all runs know them tokens, FLOPs and time.

    Attributes:
      names: by key, what is written under a chart.
    """

    def __init__(self, runs: Sequence[RunFiles]):
        self._unit, seconds = 1.0, ""
        trained = [run for run in runs if len(run.train.steps)]
        known = lambda metric: trained and all(np.isfinite(run.train[metric]).any() for run in trained)
        if known("seconds"):
            longest = max(float(np.nanmax(run.train["seconds"])) for run in trained)
            self._unit, seconds = next((s, name) for s, name in UNITS if longest > 2 * s or s == 1.0)
        names = {
            "step": "step",
            "tokens": "tokens processed" if known("tokens_processed") else "",
            "flops": "FLOPs" if trained and all(run.facts.get("flops_per_step") for run in trained) else "",
            "time": f"{seconds} since the run began" if seconds else "",
        }
        self.names = {key: name for key, name in names.items() if name}

    def x(self, run: RunFiles, steps: np.ndarray) -> dict[str, np.ndarray]:
        """Where steps of a run are on each axis."""
        found = {"step": steps.astype(float)}
        if "flops" in self.names:
            found["flops"] = (steps - run.first_step) * float(run.facts.get("flops_per_step") or np.nan)
        for key, metric, unit in (("tokens", "tokens_processed", 1.0), ("time", "seconds", self._unit)):
            if key in self.names:
                found[key] = _at(run, metric, steps) / unit
        return found


UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def _at(run: RunFiles, metric: str, steps: np.ndarray) -> np.ndarray:
    """What a total of training was after these steps; 0 before the first."""
    known = np.isfinite(run.train[metric])
    if not known.any():
        return np.full(len(steps), np.nan)
    before = run.tokens_before if metric == "tokens_processed" else 0.0
    totals = np.append(0.0, run.train[metric][known] - before)
    return np.interp(steps, np.append(run.first_step, run.train.steps[known]), totals)


def charts_of_training(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> list[Chart]:
    """The loss, of one run beside that of its evaluations, and what else is measured at each step."""
    loss = Chart("loss of training, nats per token", _of_train("loss", runs, names, axes), _references(runs, names))
    if len(runs) == 1:
        loss = Chart("loss, nats per token", [*loss.lines, *_of_evaluations("loss", runs[0], axes)], loss.references)
    found = [loss]
    found += [Chart(title, _of_train(metric, runs, names, axes)) for metric, title in TRAINING.items()]
    return [chart for chart in found if chart.lines]


def charts_of_statistics(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> list[Chart]:
    """What hooks and losses of the user's own measure at steps."""
    metrics = dict.fromkeys(metric for run in runs for metric in run.train.values if metric.partition("/")[0] not in METRICS)
    found = [Chart(metric, _of_train(metric, runs, names, axes)) for metric in metrics]
    return [chart for chart in found if chart.lines][:MOST_CHARTS]


def charts_of_evaluations(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> dict[str, list[Chart]]:
    """By evaluation, a chart of each metric that was measured more than once: of one run its tasks together, of several runs
    one task for each chart."""
    charts: dict[str, dict[str, Chart]] = {}
    splits = dict.fromkeys(split for run in runs for split in run.evaluations)
    for split in splits:
        evaluation, _, task = split.partition("/")
        for metric in dict.fromkeys(key for run in runs for of in run.evaluations.get(split, {}).values() for key in of):
            if metric in COUNTS:
                continue
            title = metric if len(runs) == 1 else f"{task}: {metric}"
            chart = charts.setdefault(evaluation, {}).setdefault(title, Chart(title, []))
            if len(chart.lines) >= MOST_LINES:
                continue
            for number, run in enumerate(runs):
                if points := _of_evaluation(run.evaluations.get(split, {}), metric):
                    label, color = (task, len(chart.lines)) if len(runs) == 1 else (names[number], number)
                    x = axes.x(run, points.steps)
                    chart.lines.append(Line(label, number, COLORS[color % len(COLORS)], points, x, is_train=False))
    several = lambda chart: any(len(line.curve.steps) > 1 for line in chart.lines)
    drawn = {name: [chart for chart in of.values() if several(chart)] for name, of in charts.items()}
    most = max(1, MOST_CHARTS // max(1, len(drawn)))
    return {name: of[:most] for name, of in drawn.items() if of}


# Of how much was measured, not what was found.
COUNTS = ("raw_tokens", "tokens_processed", "tokens_with_loss", "examples", "cut", "chance", "z_loss", "weight_sum")


def _of_evaluations(metric: str, run: RunFiles, axes: Axes) -> list[Line]:
    """What is evaluated beside training, in the colors after that."""
    lines: list[Line] = []
    for split, numbers in run.evaluations.items():
        points = _of_evaluation(numbers, metric)
        if points and metric in run.train.values:
            color = COLORS[(len(lines) + 1) % len(COLORS)]
            lines.append(Line(split, 0, color, points, axes.x(run, points.steps), is_train=False))
    return lines[: len(COLORS) - 1]


def _references(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, float]:
    """Losses to compare with; where runs have other ones under a name, each with the run's."""
    found: dict[str, dict[str, float]] = {}
    for run_name, run in zip(names, runs):
        for name, value in run.references.get("loss", {}).items():
            found.setdefault(name, {})[run_name] = value
    return {
        name if len(set(of.values())) == 1 else f"{name}, {run_name}": value
        for name, of in found.items()
        for run_name, value in of.items()
    }


def _of_train(metric: str, runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        points = curve(run.train, metric)
        if points is not None and (metric != "data_wait_fraction" or points.high.max() > 0.01):
            x = axes.x(run, points.steps)
            label = names[number] if len(runs) > 1 else TRAIN
            lines.append(Line(label, number, COLORS[number % len(COLORS)], points, x, is_train=True))
    return lines


def _of_evaluation(numbers: dict[int, dict[str, float | None]], metric: str) -> Curve | None:
    found = {step: value for step, of in numbers.items() if (value := of.get(metric)) is not None}
    steps, values = np.array(list(found), int), np.array(list(found.values()), float)
    return curve(Columns(steps, {metric: values}), metric, points=1000) if len(steps) else None


def figures(charts: Sequence[Chart], axes: Axes, has_legends: bool) -> list:
    """Bokeh's figures of charts, which are zoomed together.

    The page's script moves their curves to another axis and hides runs, which it finds by the tags "run-0", "run-1", …
    """
    from bokeh.models import DataRange1d

    together = DataRange1d(range_padding=0.02, only_visible=True)
    return [_figure(chart, axes, together, has_legends) for chart in charts]


def _figure(chart: Chart, axes: Axes, x_range: Any, has_legend: bool):
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    items = len(chart.lines) + len(chart.references)
    has_legend = bool(chart.references) or (has_legend and 1 < items <= MOST_NAMES)
    below = has_legend and items > 4
    height = 240 + (LEGEND_ROW * -(-items // LEGEND_COLUMNS) if below else 0)
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom",
        active_drag=None,
        toolbar_location=None,
        x_range=x_range,
    )
    marks: list[Any] = []
    for line in chart.lines:
        of, color, label = line.curve, line.color, line.label
        band = {"low": of.low, "high": of.high} if line.is_train else {}
        source = ColumnDataSource({**line.x, "mean": of.mean, **band})
        more: dict[str, Any] = {"tags": [f"run-{line.run}"]}
        if line.is_train:
            plot.varea(x="step", y1="low", y2="high", source=source, fill_color=color, fill_alpha=0.18, **more)
        more |= {"name": label, "legend_label": label, "source": source, "color": color}
        marks.append(plot.line(x="step", y="mean", line_width=2, **more))
        if not line.is_train or len(of.steps) == 1:
            marks.append(plot.scatter(x="step", y="mean", size=6, **more))
    for label, value in chart.references.items():
        plot.hspan(y=[value], line_dash="dashed", line_color=GRAY, line_width=1.5, legend_label=f"{label} {value:.4g}")
    tips = [("", "$name"), (chart.title, "@mean{%.4g}")]
    tips += [(name, f"@{key}{{{FORMATS[key]}}}") for key, name in axes.names.items()]
    formatters: dict[str, Any] = {f"@{key}": "printf" for key in ("mean", *axes.names)}
    plot.add_tools(HoverTool(renderers=marks, tooltips=tips, formatters=formatters, mode="mouse"))
    _style(plot, axes.names["step"], has_legend, below)
    return plot


FORMATS = {"step": "%d", "tokens": "%d", "flops": "%.3g", "time": "%.2f"}
LEGEND_COLUMNS, LEGEND_ROW = 3, 22  # of a legend below its chart; the height of a row in pixels


def _style(plot, x_name: str, has_legend: bool, below: bool) -> None:
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GRAY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GRAY
        axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "12px"
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = GRAY, 0.22
    plot.xaxis.axis_label = x_name
    plot.y_range.only_visible = True
    for legend in plot.legend:
        legend.visible = has_legend
        legend.background_fill_color, legend.background_fill_alpha, legend.border_line_color = None, 0.0, None
        legend.label_text_color, legend.label_text_font_size, legend.click_policy = GRAY, "12px", "hide"
        legend.padding, legend.spacing, legend.margin = 4, 1, 4
        if below:
            legend.ncols = LEGEND_COLUMNS
            plot.add_layout(legend, "below")
