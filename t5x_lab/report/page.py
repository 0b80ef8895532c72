"""The page of one run, or of several laid over each other: one file with everything inside it."""

import functools
import os
import pathlib
import shlex
import time
from collections.abc import Sequence
from typing import Any

import jinja2
from etils import epath

from t5x_lab.config.json_files import write_whole
from t5x_lab.report.charts import COLORS, COUNTS, Axes, charts_of_evaluations, charts_of_statistics, charts_of_training
from t5x_lab.report.differences import differences
from t5x_lab.report.facts import facts_of
from t5x_lab.report.figures import figures
from t5x_lab.report.run_directory import RunFiles, read_run

FILE = "report.html"
MOST_STEPS, MOST_SAMPLES = 8, 200  # columns of an evaluation's table; texts of a page
_HERE = pathlib.Path(__file__).parent


def write_report(paths: Sequence[str], output: str | None = None, is_over: bool = False) -> str:
    """Writes the page of run directories, in the order given.

    Args:
      paths: MODEL_DIRs, here or wherever `etils.epath` reaches.
      output: the file, or a directory for report.html; None = the first run's.
      is_over: see `read_run`.

    Returns:
      the path of the page.

    Raises:
      UserError: where a path holds no run.
    """
    runs = [read_run(path, is_over) for path in dict.fromkeys(str(epath.Path(path)) for path in paths)]
    path = epath.Path(output or runs[0].path)
    path = path / FILE if path.is_dir() or str(output or "").endswith("/") else path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page(runs))
    return str(path)


def page(runs: Sequence[RunFiles]) -> str:
    """The page's HTML."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    names, axes = names_of(runs), Axes(runs)
    training = charts_of_training(runs, names, axes)
    statistics = charts_of_statistics(runs, names, axes)
    evaluations = charts_of_evaluations(runs, names, axes)
    charts = [*training, *statistics, *(chart for of in evaluations.values() for chart in of)]
    script, divs = components(figures(charts, axes, has_legends=len(runs) == 1), wrap_script=False) if charts else ("", ())
    drawn = dict(zip(map(id, charts), divs))
    shown = lambda chart: {"title": chart.title, "div": drawn[id(chart)]}
    return (
        _environment()
        .get_template("page.html")
        .render(
            names=names,
            colors=[COLORS[number % len(COLORS)] for number in range(len(runs))],
            states=[state_of(run) for run in runs],
            written=time.strftime("%Y-%m-%d %H:%M %Z"),
            facts=facts_of(runs),
            axes=axes.names,
            training=[shown(chart) for chart in training],
            statistics=[shown(chart) for chart in statistics],
            evaluations=[
                {"name": name, "charts": [shown(chart) for chart in evaluations.get(name, [])], **numbers}
                for name, numbers in tables_of(runs, names).items()
            ],
            differences=differences(runs) if len(runs) > 1 else None,
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
    return jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Of each run, as much of the end of its path as tells it from the others."""
    parts = [pathlib.PurePath(os.path.abspath(run.path) if "://" not in run.path else run.path).parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-length:]) for of in parts]
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def state_of(run: RunFiles) -> dict[str, str]:
    """A word for the run's state, and a sentence."""
    goal = run.facts.get("train_steps")
    step = f"step {run.last_step:,}"
    of = f"{step} of {goal:,}" if goal else step
    start = (
        f"its last checkpoint, of step {run.checkpoints[-1]:,}" if run.checkpoints else "its beginning: it has no checkpoint"
    )
    sentence = {
        "finished": f"finished at {step}",
        "training": f"in training: {of}",
        "diverged": f"diverged: the loss of {step} was not finite. Its training goes on from {start}",
        "stopped": f"stopped after {of}. Its training goes on from {start}",
        "weights": f"no metrics of training, but {start.removeprefix('its last ')}",
        "new": "nothing was trained here yet",
    }
    return {"word": run.state, "sentence": sentence[run.state] + "."}


# ---- evaluations, samples, commands


def tables_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By evaluation: a table, a row for each task and metric, what it wrote itself, and why it lacks something.

    Of one run its columns are steps, of several runs the last results of each.
    """
    found: dict[str, dict[str, Any]] = {}
    for evaluation in dict.fromkeys(name for run in runs for name in run.evaluated):
        splits = [s for s in dict.fromkeys(s for run in runs for s in run.evaluations) if s.partition("/")[0] == evaluation]
        columns: list[tuple[str, RunFiles, int | None]] = [(name, run, None) for name, run in zip(names, runs)]
        steps: list[int] = []
        if len(runs) == 1:
            steps = sorted({step for split in splits for step in runs[0].evaluations[split]})
            columns = [(f"step {step:,}", runs[0], step) for step in spread(steps, MOST_STEPS)]
        rows = []
        for split in splits:
            measured = [(run.evaluations.get(split, {}), step) for _, run, step in columns]
            numbers = [of.get(max(of, default=0) if step is None else step, {}) for of, step in measured]
            for metric in dict.fromkeys(name for of in numbers for name in of if name not in COUNTS):
                cells = [of.get(metric) for of in numbers]
                rows.append({"task": split.partition("/")[2], "metric": metric, "cells": [_number(value) for value in cells]})
        written = [(name, run.tables.get(evaluation, {})) for name, run in zip(names, runs)]
        found[evaluation] = {
            "columns": [name for name, _, _ in columns],
            "rows": rows,
            "steps_left_out": len(steps) - len(columns) if len(steps) > len(columns) else 0,
            "written": [{"name": f"{name}, step {max(of):,}", "text": of[max(of)]} for name, of in written if of],
            "failures": [sentence for run in runs for sentence in run.failures.get(evaluation, [])],
        }
    return found


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def samples_of(runs: Sequence[RunFiles], names: Sequence[str]) -> list[dict[str, Any]]:
    """Texts that evaluations kept, the last step's first, of each run; of each evaluation and step the first ones."""
    found = []
    for name, run in zip(names, runs):
        steps = spread(sorted({sample.step for sample in run.samples}), MOST_STEPS)[::-1]
        evaluations = list(dict.fromkeys(sample.evaluation for sample in run.samples))
        most = max(2, MOST_SAMPLES // max(1, len(steps) * len(evaluations) * len(runs)))
        shown = []
        for step in steps:
            of_step = [[s for s in run.samples if (s.step, s.evaluation) == (step, of)] for of in evaluations]
            shown.append((step, [s for of in of_step for s in of[:most]], sum(max(0, len(of) - most) for of in of_step)))
        if shown:
            found.append({"name": name, "steps": shown})
    return found


def commands_of(run: RunFiles) -> list[tuple[str, str]]:
    """What one does next with a run: why, and the command."""
    at, has_weights = shlex.quote(run.path), bool(run.checkpoints)
    found = []
    if run.train.steps.size or not has_weights:
        further, words = "go on with its training", _flags_to_go_on(run)
        if run.state == "finished":
            further = "train it further; a learning rate that has come to its end needs its settings, too"
        found.append((further, " ".join(["t5x_lab train", *words])))
    if has_weights:
        found += [
            ("let it write", f"t5x_lab generate --model_dir={at} --prompt='The people' --temperature=0.7"),
            ("evaluate its checkpoints", f"t5x_lab eval --model_dir={at} --step=all"),
            ("see its parameters", f"t5x_lab inspect --model_dir={at}"),
        ]
    return [*found, ("compare it with another", f"t5x_lab report {at} OTHER_RUN")]


def _flags_to_go_on(run: RunFiles) -> list[str]:
    """Of training; of a run that is at its end with twice its budget."""
    config, at = shlex.quote(f"{run.path}/config.gin"), shlex.quote(run.path)
    words = [f"--gin_file={config}", f"--gin.MODEL_DIR={at}"]  # it may have been moved
    if run.state != "finished":
        return words
    tokens = run.facts.get("train_tokens")
    budget = f"TRAIN_TOKENS={2 * int(tokens)}" if tokens else f"TRAIN_STEPS={2 * run.last_step - run.first_step}"
    stops = run.settings.get("EARLY_STOPPING", "None") != "None"
    return [*words, f"--gin.{budget}", *(["--gin.EARLY_STOPPING=None"] if stops else [])]
