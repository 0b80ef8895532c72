"""The page of one run, or of several laid over each other: one file with everything inside it."""

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
    charts_of_evaluations,
    charts_of_statistics,
    charts_of_training,
    color_of,
)
from t5x_lab.report.commands import commands_of
from t5x_lab.report.differences import differences, referred
from t5x_lab.report.facts import duration, facts_of
from t5x_lab.report.figures import MOST_NAMES, figures
from t5x_lab.report.results import samples_of, tables_of
from t5x_lab.report.run_directory import RunFiles, read_run
from t5x_lab.report.time_spent import restarts

FILE, FILE_OF_SEVERAL = "report.html", "compared.html"
MOST_DAMAGED = 3  # files of a sentence
_HERE = pathlib.Path(__file__).parent


def write_report(paths: Sequence[str], output: str | None = None, is_over: bool = False) -> str:
    """Writes the page of run directories, in the order given.

    Args:
      paths: MODEL_DIRs, here or wherever `etils.epath` reaches.
      output: the file, or a directory for report.html, of several runs compared.html; None = the first run's.
      is_over: see `read_run`.

    Returns:
      the path of the page.

    Raises:
      UserError: where a path holds no run, or one that cannot be read; where the page cannot be written.
    """
    places: dict[str, str] = {}
    for path in paths:
        places.setdefault(_place(path), path)  # a run that is named twice is shown once
    runs = [_read(path, is_over) for path in places.values()]
    path = output or runs[0].path
    if not path.lower().endswith((".html", ".htm")):
        path = f"{path.rstrip('/')}/{FILE if len(runs) == 1 else FILE_OF_SEVERAL}"
    _write(path, page(runs).encode(errors="replace").decode())  # a name or a text may be no Unicode
    return path


def _write(where: str, text: str) -> None:
    try:
        path = epath.Path(where)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except _errors_of(where) as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = f"{where.rpartition('/')[0]} is a file" if is_file else _why(error)
        raise UserError(f"The page cannot be written to {where}: {why}. Choose another place with --output.") from error


def _place(path: str) -> str:
    """One name of a directory, however it is spelt."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _read(path: str, is_over: bool) -> RunFiles:
    try:
        return read_run(str(epath.Path(path)), is_over)
    except UserError:
        raise
    except _errors_of(path) as error:
        raise UserError(f"{path} cannot be read: {_why(error)}. Give a run that you may read.") from error


def _errors_of(path: str) -> type[Exception]:
    """What reading and writing may raise: remote file systems have errors of their own."""
    return Exception if "://" in path else OSError


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or describe_error(error)


def page(runs: Sequence[RunFiles]) -> str:
    """The page's HTML."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    names, axes = names_of(runs), Axes(runs)
    training = charts_of_training(runs, names, axes)
    statistics = charts_of_statistics(runs, names, axes)
    evaluations = charts_of_evaluations(runs, names, axes)
    charts = [chart for part in (training, statistics, *evaluations.values()) for chart in part.drawn]
    script, divs = components(figures(charts, axes, has_legends=len(runs) == 1), wrap_script=False) if charts else ("", ())
    drawn = dict(zip(map(id, charts), divs))

    differ, tables = differences(runs), tables_of(runs, names)
    referred_to = set().union(*(referred(run.settings) for run in runs))

    def shown(part: Charts) -> dict[str, Any]:
        each = [{"title": chart.title, "notes": notes_of(chart, len(runs)), "div": drawn[id(chart)]} for chart in part.drawn]
        return {"each": each, "left_out": part.left_out}

    return (
        _environment()
        .get_template("page.html")
        .render(
            names=names,
            colors=[color_of(number) for number in range(len(runs))],
            states=[state_of(run) for run in runs],
            damaged=[damage_of(run) for run in runs],
            written=time.strftime("%Y-%m-%d %H:%M %Z"),
            facts=facts_of(runs),
            axes=axes.names,
            has_bad_steps=any(line.bad for chart in training.drawn for line in chart.lines),
            has_restarts=any(restarts(run.train).any() for run in runs),
            training=shown(training),
            statistics=shown(statistics),
            evaluations=[
                {"name": name, "charts": shown(evaluations.get(name, Charts([]))), **numbers}
                for name, numbers in tables.items()
            ],
            writing=[name for name, numbers in tables.items() if numbers["has_samples"]],
            differences={name: of for name, of in differ.items() if name in referred_to} if len(runs) > 1 else None,
            has_unbound=any(cell is None and run.settings for cells in differ.values() for cell, run in zip(cells, runs)),
            unreferred={name: of for name, of in differ.items() if name not in referred_to},
            unconfigured=[name for name, run in zip(names, runs) if not run.settings],
            samples=samples_of(runs, names),
            commands=[commands_of(run) for run in runs],
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
    environment.filters["counted"] = counted
    return environment


def counted(number: int, noun: str, words: str = "") -> str:
    """ "1 more step", "2 more steps"."""
    return " ".join([f"{number:,}", *words.split(), noun if number == 1 else f"{noun}s"])


def notes_of(chart: Chart, runs: int) -> list[str]:
    """What a chart does not show, in words behind its title."""
    unnamed = ["names are at the curves, under a mouse"] if runs == 1 and len(chart.lines) > MOST_NAMES else []
    return unnamed + ([f"without {counted(chart.left_out, 'curve', 'more')}"] if chart.left_out else [])


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Of each run, as much of the end of its path as tells it from the others."""
    parts = [pathlib.PurePath(os.path.abspath(run.path) if "://" not in run.path else run.path).parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-length:]) for of in parts]
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def state_of(run: RunFiles) -> dict[str, str]:
    """A word for the run's state, and the rest of the sentence that it begins."""
    goal = run.number("train_steps")
    step, checkpoint = f"step {run.last_step:,}", f"step {max(run.checkpoints, default=0):,}"
    of = f"{step} of {goal:,.0f}" if goal > 0 else step
    start = f"its last checkpoint, of {checkpoint}" if run.checkpoints else "its beginning: it has no checkpoint"
    further = f"Its training goes on from {start}" if run.config else "It has no config.gin, without which it cannot go on"
    what = "loss" if len(run.train.steps) and not np.isfinite(run.train["loss"][-1]) else "gradient"
    sentence = {
        "finished": f"at {step}",
        "training": f"{of}. The last sign of life was {duration(run.silent or 0.0)} old when this was written",
        "diverged": f"the {what} of {step} was not finite. {further}",
        "stopped": f"after {of}. {further}",
        "weights": f"no metrics of training, but a checkpoint of {checkpoint}",
        "new": "no metrics of training, but of evaluations" if run.evaluations else "nothing was trained here yet",
    }
    return {"word": run.state, "sentence": sentence[run.state] + "."}


def damage_of(run: RunFiles) -> str:
    """A sentence of what is left out of a run's files; "" where nothing is."""
    more = f" and {len(run.damaged) - MOST_DAMAGED} more" if len(run.damaged) > MOST_DAMAGED else ""
    said = ", ".join(run.damaged[:MOST_DAMAGED]) + more
    return f"Left out, as damaged or lost: {said}." if run.damaged else ""
