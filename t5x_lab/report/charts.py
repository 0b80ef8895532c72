"""The charts of a report, and their curves over several axes."""

import colorsys
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from t5x_lab.models.loss import METRICS
from t5x_lab.observe.curves import TRAIN, Columns, Curve, curve
from t5x_lab.report.run_directory import RunFiles
from t5x_lab.report.time_spent import restarts, speed

# Contrast of at least 3 to light and dark backgrounds (WCAG 2.2, 1.4.11).
COLORS = ("#3b82f6", "#e25c0a", "#1f9363", "#c93fe0", "#a87a0b", "#0a8ea8", "#ef4444", "#8b5cf6", "#5f9312", "#64748b")
MAX_CHARTS, MAX_LINES, MAX_MARKS = 48, 40, 400  # charts per section, lines per chart, marks per line
BRIGHTNESS = 0.21  # luminance of generated colors relative to white
SPEED_METRICS = ("tokens_per_second", "mfu", "data_wait_fraction")  # not meaningful in a step that compiles
TRAINING = {  # metrics of training steps in addition to the loss
    "accuracy": "accuracy of the next token",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU",
    "data_wait_fraction": "fraction of time waiting for data",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
      label: label in the chart.
      run: index of its run.
      color: CSS color.
      curve: points of the line.
      x: coordinates of the points by axis.
      is_train: draw a line with a band; otherwise a mark at each point.
      bad: coordinates of non-finite steps by axis and "mean".
    """

    label: str
    run: int
    color: str
    curve: Curve
    x: dict[str, np.ndarray]
    is_train: bool
    bad: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines that share their axes.

    Attributes:
      title: metric and unit.
      references: values of dashed lines by name.
      left_out: number of omitted lines.
    """

    title: str
    lines: list[Line]
    references: dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: int = 0


@dataclasses.dataclass(frozen=True)
class Charts:
    """The charts of a section, and the number of omitted charts."""

    drawn: list[Chart]
    left_out: int = 0


def pick_color(number: int) -> str:
    """Returns the color of a run or task: one of `COLORS`, then generated hues of equal brightness."""
    if number < len(COLORS):
        return COLORS[number]
    red, green, blue = colorsys.hls_to_rgb((number * 0.61803) % 1.0, 0.5, 0.6)
    scale = (BRIGHTNESS / (0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)) ** (1 / 2.2)
    return "#" + "".join(f"{min(255, round(255 * scale * part)):02x}" for part in (red, green, blue))


class Axes:
    """The x axes of a page: step, and tokens, FLOPs and time if all runs have them.

    Attributes:
      names: axis labels by key.
    """

    def __init__(self, runs: Sequence[RunFiles]):
        self._unit, seconds = 1.0, ""
        drawn = [run for run in runs if len(run.train.steps) or run.evaluations]
        is_known = lambda metric: drawn and all(np.isfinite(run.train[metric]).any() for run in drawn)
        if is_known("seconds"):
            longest = max(float(np.nanmax(run.train["seconds"])) for run in drawn)
            self._unit, seconds = next((s, name) for s, name in UNITS if longest > 2 * s or s == 1.0)
        names = {
            "step": "step",
            "tokens": "tokens processed" if is_known("tokens_processed") else "",
            "flops": "FLOPs" if is_known("loss") and all(run.number("flops_per_step") > 0 for run in drawn) else "",
            "time": f"{seconds} since the run began" if seconds else "",
        }
        self.names = {key: name for key, name in names.items() if name}

    def x(self, run: RunFiles, steps: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the coordinates of a run's steps on each axis."""
        coordinates = {"step": steps.astype(float)}
        if "flops" in self.names:
            equal = (steps - run.first_step) * run.number("flops_per_step")
            coordinates["flops"] = _interpolate(run, "flops", steps) if run.has_total_flops else equal
        for key, metric, unit in (("tokens", "tokens_processed", 1.0), ("time", "seconds", self._unit)):
            if key in self.names:
                coordinates[key] = _interpolate(run, metric, steps) / unit
        return coordinates


UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def _interpolate(run: RunFiles, metric: str, steps: np.ndarray) -> np.ndarray:
    """Returns the total of a training metric after these steps; 0 before the first step."""
    is_known = np.isfinite(run.train[metric])
    if not is_known.any():
        return np.full(len(steps), np.nan)
    before = run.tokens_before if metric == "tokens_processed" else 0.0
    totals = np.append(0.0, run.train[metric][is_known] - before)
    return np.interp(steps, np.append(run.first_step, run.train.steps[is_known]), totals)


def training_charts(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> Charts:
    """Returns the charts of training metrics. With one run the loss chart includes its evaluations."""
    loss = _step_chart("loss", "loss of training, nats per token", runs, names, axes)
    if len(runs) == 1 and loss.lines:
        evaluated = _evaluation_lines("loss", runs[0], axes)
        lines = [*loss.lines, *evaluated[: MAX_LINES - 1]]
        loss = Chart("loss, nats per token", lines, loss.references, max(0, len(evaluated) - MAX_LINES + 1))
    collected = [loss, *(_step_chart(metric, title, runs, names, axes) for metric, title in TRAINING.items())]
    return Charts([chart for chart in collected if chart.lines])


def statistics_charts(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> Charts:
    """Returns the charts of statistics from hooks and additional losses."""
    metrics = dict.fromkeys(metric for run in runs for metric in run.train.values if metric.partition("/")[0] not in METRICS)
    collected = [chart for metric in metrics if (chart := _step_chart(metric, metric, runs, names, axes)).lines]
    return Charts(collected[:MAX_CHARTS], max(0, len(collected) - MAX_CHARTS))


def evaluation_charts(runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> dict[str, Charts]:
    """Returns charts by evaluation, for metrics with several values. With several runs each task has its own chart."""
    charts: dict[str, dict[str, Chart]] = {}
    order = _order(runs)
    for split in order:
        evaluation, _, task = split.partition("/")
        for metric in dict.fromkeys(
            key for run in runs for series in run.evaluations.get(split, {}).values() for key in series
        ):
            if metric in COUNTS:
                continue
            title = metric if len(runs) == 1 else f"{task}: {metric}"
            series = charts.setdefault(evaluation, {})
            chart = series.setdefault(title, Chart(title, [], _references(metric, runs, names)))
            if len(chart.lines) >= MAX_LINES and len(runs) == 1:
                series[title] = dataclasses.replace(chart, left_out=chart.left_out + 1)
                continue
            for number, run in enumerate(runs):
                if points := _evaluation_curve(run.evaluations.get(split, {}), metric):
                    label, color = (task, 1 + order[split]) if len(runs) == 1 else (names[number], number)
                    x = axes.x(run, points.steps)
                    chart.lines.append(Line(label, number, pick_color(color), points, x, is_train=False))
    several = lambda chart: any(len(line.curve.steps) > 1 for line in chart.lines)
    collected = {name: [chart for chart in series.values() if several(chart)] for name, series in charts.items()}
    most = max(1, MAX_CHARTS // max(1, len(collected)))
    cut = {name: series[:most] if number < MAX_CHARTS else [] for number, (name, series) in enumerate(collected.items())}
    return {name: Charts(cut[name], len(series) - len(cut[name])) for name, series in collected.items()}


# Sizes of evaluations, which are not results.
COUNTS = ("raw_tokens", "tokens_processed", "tokens_with_loss", "examples", "cut", "chance", "z_loss", "weight_sum")


def _evaluation_lines(metric: str, run: RunFiles, axes: Axes) -> list[Line]:
    """Returns the lines of evaluations, in the colors after that of training."""
    lines: list[Line] = []
    for split, number in _order([run]).items():
        points = _evaluation_curve(run.evaluations[split], metric)
        if points:
            lines.append(Line(split, 0, pick_color(1 + number), points, axes.x(run, points.steps), is_train=False))
    return lines


def _order(runs: Sequence[RunFiles]) -> dict[str, int]:
    """Returns an index for each "<evaluation>/<task>", the same in all charts."""
    splits = dict.fromkeys(split for run in runs for split in run.evaluations)
    return {split: number for number, split in enumerate(splits)}


def _references(metric: str, runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, float]:
    """Returns reference values by name, with the name of the run if they differ between runs."""
    collected: dict[str, dict[str, float]] = {}
    for run_name, run in zip(names, runs):
        for name, value in run.references.get(metric, {}).items():
            collected.setdefault(name, {})[run_name] = value
    return {
        name if len(set(by_run.values())) == 1 else f"{name}, {run_name}": value
        for name, by_run in collected.items()
        for run_name, value in by_run.items()
    }


def _step_chart(metric: str, title: str, runs: Sequence[RunFiles], names: Sequence[str], axes: Axes) -> Chart:
    lines = []
    for number, run in enumerate(runs):
        train = run.train
        if metric in SPEED_METRICS:
            train = Columns(train.steps, {metric: speed(train, metric)})
        points = curve(train, metric, points=max(60, min(250, 2500 // len(runs))))
        if points is not None and (metric != "data_wait_fraction" or points.high.max() > 0.01):
            label = names[number] if len(runs) > 1 else TRAIN
            bad = _marks(run, points, axes) if metric == "loss" else {}
            gaps = np.searchsorted(points.steps, run.train.steps[restarts(run.train)])
            points, x = _with_gaps(points, axes.x(run, points.steps), gaps)
            lines.append(Line(label, number, pick_color(number), points, x, is_train=True, bad=bad))
    return Chart(title, lines, _references(metric, runs, names))


def _with_gaps(points: Curve, x: dict[str, np.ndarray], before: np.ndarray) -> tuple[Curve, dict[str, np.ndarray]]:
    """Inserts a gap before the given points, the first after a restart."""
    at = np.repeat(np.unique(before[(before > 0) & (before < len(points.steps))]), 2)
    ends = at - np.tile([1, 0], len(at) // 2)  # the point before and the one behind each break
    with_ends = lambda values, source: np.insert(values, at, source[ends])
    mean = np.insert(points.mean, at, np.nan)
    low, high = with_ends(points.low, points.mean), with_ends(points.high, points.mean)
    collected = {key: with_ends(values, values) for key, values in x.items()}
    return Curve(with_ends(points.steps, points.steps), mean, low, high), collected


def _marks(run: RunFiles, loss: Curve, axes: Axes) -> dict[str, np.ndarray]:
    """Returns the coordinates of non-finite steps on the loss curve."""
    steps = run.train.steps[run.is_bad]
    if len(steps) > MAX_MARKS:  # one of those at nearly the same place
        near = (steps - steps[0]) * MAX_MARKS // max(1, steps[-1] - steps[0])
        steps = steps[np.unique(near, return_index=True)[1]]
    return {**axes.x(run, steps), "mean": np.interp(steps, loss.steps, loss.mean)} if len(steps) else {}


def _evaluation_curve(numbers: Mapping[int, Mapping[str, float | None]], metric: str) -> Curve | None:
    by_step = {step: value for step, metrics in numbers.items() if (value := metrics.get(metric)) is not None}
    steps, values = np.array(list(by_step), int), np.array(list(by_step.values()), float)
    return curve(Columns(steps, {metric: values}), metric, points=1000) if len(steps) else None
