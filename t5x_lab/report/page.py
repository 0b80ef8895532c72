"""The report page: a self-contained HTML file of one run, or a comparison of several."""

import functools
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import write_atomically
from t5x_lab.config.user_code import describe_error
from t5x_lab.report.charts import (
    Axes,
    Chart,
    Charts,
    evaluation_charts,
    pick_color,
    statistics_charts,
    training_charts,
)
from t5x_lab.report.commands import next_commands
from t5x_lab.report.differences import find_differences, referenced_settings
from t5x_lab.report.facts import duration, summarize_runs
from t5x_lab.report.figures import MAX_NAMES, make_figures
from t5x_lab.report.results import collect_samples, evaluation_tables
from t5x_lab.report.run_directory import RunFiles, read_run
from t5x_lab.report.time_spent import restarts

FILE, COMPARISON_FILE = "report.html", "compared.html"
MAX_DAMAGED = 3  # damaged files listed in a note
_HERE = pathlib.Path(__file__).parent


def write_report(paths: Sequence[str], output: str | None = None, is_over: bool = False) -> str:
    """Writes the report page of run directories.

    Args:
      paths: run directories, local or remote.
      output: file, or directory for report.html (several runs: compared.html). Default: the first run directory.
      is_over: see `read_run`.

    Returns:
      The path of the page.

    Raises:
      UserError: if a path is not a readable run directory, or the page cannot be written.
    """
    unique: dict[str, str] = {}
    for path in paths:
        unique.setdefault(_real_path(path), path)
    runs = [_read(path, is_over) for path in unique.values()]
    path = output or runs[0].path
    if not path.lower().endswith((".html", ".htm")):
        path = f"{path.rstrip('/')}/{FILE if len(runs) == 1 else COMPARISON_FILE}"
    _write(path, render_page(runs).encode(errors="replace").decode())  # names and texts may be invalid Unicode
    return path


def _write(output: str, text: str) -> None:
    try:
        path = epath.Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except _storage_errors(output) as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = f"{output.rpartition('/')[0]} is a file" if is_file else _reason(error)
        raise UserError(f"The page cannot be written to {output}: {reason}. Choose another --output.") from error


def _real_path(path: str) -> str:
    """Returns a unique path of a directory."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _read(path: str, is_over: bool) -> RunFiles:
    try:
        return read_run(str(epath.Path(path)), is_over)
    except UserError:
        raise
    except _storage_errors(path) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}. Use a run directory that you can read.") from error


def _storage_errors(path: str) -> type[Exception]:
    """Returns the exceptions of reading and writing. Remote file systems raise various ones."""
    return Exception if "://" in path else OSError


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or describe_error(error)


def render_page(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML of the page."""
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources

    names, axes = short_names(runs), Axes(runs)
    training = training_charts(runs, names, axes)
    statistics = statistics_charts(runs, names, axes)
    evaluations = evaluation_charts(runs, names, axes)
    charts = [chart for part in (training, statistics, *evaluations.values()) for chart in part.drawn]
    figures, document = make_figures(charts, axes, has_legends=len(runs) == 1), Document()
    with document.models.freeze():  # else Bokeh visits all models again for each figure
        for figure in figures:
            document.add_root(figure)
    script, divs = components(figures, wrap_script=False) if figures else ("", ())
    drawn = dict(zip(map(id, charts), divs))

    differ, tables = find_differences(runs), evaluation_tables(runs, names)
    referenced = set().union(*(referenced_settings(run.settings) for run in runs))

    def render(part: Charts) -> dict[str, Any]:
        each = [{"title": chart.title, "notes": chart_notes(chart, len(runs)), "div": drawn[id(chart)]} for chart in part.drawn]
        return {"each": each, "left_out": part.left_out}

    return (
        _environment()
        .get_template("page.html")
        .render(
            names=names,
            colors=[pick_color(number) for number in range(len(runs))],
            states=[describe_state(run) for run in runs],
            damaged=[describe_damage(run) for run in runs],
            written=time.strftime("%Y-%m-%d %H:%M %Z"),
            facts=summarize_runs(runs),
            axes=axes.names,
            has_bad_steps=any(line.bad for chart in training.drawn for line in chart.lines),
            has_restarts=any(restarts(run.train).any() for run in runs),
            training=render(training),
            statistics=render(statistics),
            evaluations=[
                {"name": name, "charts": render(evaluations.get(name, Charts([]))), **numbers}
                for name, numbers in tables.items()
            ],
            writing=[name for name, numbers in tables.items() if numbers["has_samples"]],
            differences={name: values for name, values in differ.items() if name in referenced} if len(runs) > 1 else None,
            has_unbound=any(cell is None and run.settings for cells in differ.values() for cell, run in zip(cells, runs)),
            unreferred={name: values for name, values in differ.items() if name not in referenced},
            unconfigured=[name for name, run in zip(names, runs) if not run.settings],
            samples=collect_samples(runs, names),
            commands=[next_commands(run) for run in runs],
            configs=[run.config for run in runs],
            bokeh="\n".join(Resources(mode="inline", components=["bokeh"]).js_raw) if charts else "",
            script=script.replace("</", "<\\/"),
            style=(_HERE / "page.css").read_text(),
            behaviour=(_HERE / "page.js").read_text(),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["counted"] = count_phrase
    return environment


def count_phrase(number: int, noun: str, adjective: str = "") -> str:
    """Returns a phrase such as "1 more step" or "2 more steps"."""
    return " ".join([f"{number:,}", *adjective.split(), noun if number == 1 else f"{noun}s"])


def chart_notes(chart: Chart, runs: int) -> list[str]:
    """Returns notes on omitted parts of a chart."""
    unnamed = ["hover over curves for their names"] if runs == 1 and len(chart.lines) > MAX_NAMES else []
    return unnamed + ([f"without {count_phrase(chart.left_out, 'curve', 'more')}"] if chart.left_out else [])


def short_names(runs: Sequence[RunFiles]) -> list[str]:
    """Returns the shortest suffixes of the paths that are unique."""
    parts = [pathlib.PurePath(os.path.abspath(run.path) if "://" not in run.path else run.path).parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def describe_state(run: RunFiles) -> dict[str, str]:
    """Returns the state of a run as a word and a sentence."""
    goal = run.number("train_steps")
    step, checkpoint = f"step {run.last_step:,}", f"step {max(run.checkpoints, default=0):,}"
    progress = f"{step} of {goal:,.0f}" if goal > 0 else step
    start = f"its last checkpoint ({checkpoint})" if run.checkpoints else "step 0, because it has no checkpoint"
    further = f"It can continue from {start}" if run.config else "It cannot continue without config.gin"
    quantity = "loss" if len(run.train.steps) and not np.isfinite(run.train["loss"][-1]) else "gradient"
    sentence = {
        "finished": f"at {step}",
        "training": f"{progress}. The last heartbeat was {duration(run.silent or 0.0)} before this report",
        "diverged": f"the {quantity} of {step} was not finite. {further}",
        "stopped": f"after {progress}. {further}",
        "weights": f"no training metrics, but a checkpoint of {checkpoint}",
        "new": "no training metrics, but evaluations" if run.evaluations else "no training yet",
    }
    return {"word": run.state, "sentence": sentence[run.state] + "."}


def describe_damage(run: RunFiles) -> str:
    """Returns a note on damaged files; "" if there are none."""
    more = f" and {len(run.damaged) - MAX_DAMAGED} more" if len(run.damaged) > MAX_DAMAGED else ""
    listed = ", ".join(run.damaged[:MAX_DAMAGED]) + more
    return f"Omitted because damaged or lost: {listed}." if run.damaged else ""
