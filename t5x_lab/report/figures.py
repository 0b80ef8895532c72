"""Bokeh figures of charts, with linked zoom and tooltips."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_lab.observe.curves import Curve
from t5x_lab.report.charts import Axes, Chart

MAX_NAMES, MAX_LETTERS = 24, 44  # names in a legend, letters in a name
GRAY = "#767676"  # the page's script replaces it with the light or dark color


def make_figures(charts: Sequence[Chart], axes: Axes, has_legends: bool) -> list:
    """Returns Bokeh figures with linked zoom.

    The page's script switches axes and hides runs, which have the tags "run-0", "run-1", and so on.
    """
    from bokeh.models import DataRange1d

    shared_range = DataRange1d(range_padding=0.02, only_visible=True)
    return [_figure(chart, axes, shared_range, has_legends) for chart in charts]


def _figure(chart: Chart, axes: Axes, x_range: Any, has_legend: bool):
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    items = len(chart.lines) + len(chart.references)
    are_named = has_legend and 1 < items <= MAX_NAMES  # with several runs the buttons of the page name the lines
    labels = [_short(name) for name in [*(line.label for line in chart.lines if are_named), *chart.references]]
    longest = max(map(len, labels), default=0)
    columns = 0  # 0 = the legend is inside the chart
    if len(labels) > 4 or longest > MAX_LETTERS // 2:  # the legend is below, as wide as a phone
        columns = max(1, min(3, MAX_LETTERS // longest))
    height = 240 + (LEGEND_ROW * -(-len(labels) // columns) if columns else 0)
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom",
        active_drag=None,
        toolbar_location=None,
        x_range=x_range,
    )
    marks: list[Any] = []
    for number, line in enumerate(chart.lines):
        points, color, label = line.curve, line.color, line.label
        equal = sum(_is_equal(points, before.curve) for before in chart.lines[:number]) if number < MAX_NAMES else 0
        band = {"low": points.low, "high": points.high} if line.is_train else {}
        source = ColumnDataSource({**line.x, "mean": points.mean, **band})
        more: dict[str, Any] = {"tags": [f"run-{line.run}"]}
        legend: dict[str, Any] = {"legend_label": labels[number]} if are_named else {}
        if line.is_train:
            area = plot.varea(x="step", y1="low", y2="high", source=source, **more, **legend)
            area.glyph.fill_color, area.glyph.fill_alpha = color, 0.18
        more |= {"name": label, "color": color} | legend
        dash = DASHES[min(equal, len(DASHES) - 1)]
        marks.append(plot.line(x="step", y="mean", line_width=2, line_dash=dash, source=source, **more))
        if not line.is_train or len(points.steps) == 1:
            marks.append(plot.scatter(x="step", y="mean", size=6, source=source, **more))
        if line.bad:
            marks.append(
                plot.scatter(x="step", y="mean", size=13, marker="x", line_width=3, source=ColumnDataSource(line.bad), **more)
            )
    _show_constants(plot, chart)
    for label, value in chart.references.items():
        plot.hspan(y=[value], line_dash="dashed", line_color=GRAY, line_width=1.5, legend_label=f"{_short(label)} {value:.4g}")
    tips = [("", "$name"), (chart.title, "@mean{%.4g}")]
    tips += [(name, f"@{key}{{{FORMATS[key]}}}") for key, name in axes.names.items()]
    formatters: dict[str, Any] = {f"@{key}": "printf" for key in ("mean", *axes.names)}
    plot.add_tools(HoverTool(renderers=marks, tooltips=tips, formatters=formatters, mode="mouse"))
    _style(plot, axes.names["step"], columns)
    return plot


def _short(name: str) -> str:
    """Shortens a long name in the middle, and separates TeX delimiters, for which Bokeh would load MathJax from a network."""
    half, name = MAX_LETTERS // 2, re.sub(r"([$\\])(?=[$\[(])", "\\1\N{ZERO WIDTH SPACE}", name)
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"


DASHES = ("solid", [8, 8], [2, 6])  # for curves hidden below equal ones


def _is_equal(curve: Curve, other: Curve) -> bool:
    """Returns whether two curves are equal along at least half of the second one."""
    (a, x), (b, y) = ((curve.steps[~np.isnan(curve.mean)], curve.mean[~np.isnan(curve.mean)]) for curve in (curve, other))
    both = b[(b >= a[0]) & (b <= a[-1])]
    if len(both) < max(2, 0.5 * len(b)):
        return False
    return np.allclose(np.interp(both, a, x), np.interp(both, b, y), rtol=1e-6, atol=0.0)


def _show_constants(plot, chart: Chart) -> None:
    """Sets the range of the y axis so that constants are in the middle."""
    values = [value for line in chart.lines for value in (np.nanmin(line.curve.low), np.nanmax(line.curve.high))]
    low, high = min([*values, *chart.references.values()]), max([*values, *chart.references.values()])
    size = max(abs(low), abs(high))
    plot.y_range.default_span = size or 1.0
    if high - low <= 1e-6 * size:
        plot.y_range.min_interval = size or 1.0


FORMATS = {"step": "%d", "tokens": "%d", "flops": "%.3g", "time": "%.2f"}
TICK = """
const value = Number(tick.toPrecision(12));
const size = Math.abs(value);
const isShort = value === Number(value.toPrecision(3));
if (size >= 1e12 || (size >= 1e7 && isShort) || (size > 0 && size < 1e-4)) return value.toExponential().replace("e+", "e");
return value.toLocaleString("en-US", { maximumFractionDigits: 9 });
"""
LEGEND_ROW = 22  # height of a legend row in pixels


def _style(plot, x_name: str, columns_of_legend: int) -> None:
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    from bokeh.models import CustomJSTickFormatter

    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GRAY
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GRAY
        axis.formatter = CustomJSTickFormatter(code=TICK)
        axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "12px"
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = GRAY, 0.22
    plot.xaxis.axis_label = x_name
    plot.y_range.only_visible = True
    for legend in plot.legend:
        legend.background_fill_color, legend.background_fill_alpha, legend.border_line_color = None, 0.0, None
        legend.label_text_color, legend.label_text_font_size, legend.click_policy = GRAY, "12px", "hide"
        legend.padding, legend.spacing, legend.margin = 4, 1, 4
        if columns_of_legend:
            legend.ncols = columns_of_legend
            plot.add_layout(legend, "below")
