"""The page of one run, or of several laid over each other: one file with everything inside it."""

import dataclasses
import functools
import os
import pathlib
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import binding, flag
from t5x_lab.config.json_files import write_whole
from t5x_lab.report.charts import (
    COUNTS,
    Axes,
    Charts,
    charts_of_evaluations,
    charts_of_statistics,
    charts_of_training,
    color_of,
)
from t5x_lab.report.differences import differences
from t5x_lab.report.facts import duration, facts_of
from t5x_lab.report.figures import figures
from t5x_lab.report.run_directory import Numbers, RunFiles, read_run

FILE, FILE_OF_SEVERAL = "report.html", "compared.html"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}  # which a browser shows as boxes
MOST_STEPS, MOST_SAMPLES, MOST_DAMAGED = 8, 200, 3  # columns of an evaluation's table; texts of a page; files of a sentence
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
    runs = []
    for name in dict.fromkeys(str(epath.Path(path)) for path in paths):
        try:
            runs.append(read_run(name, is_over))
        except OSError as error:
            raise UserError(f"{name} cannot be read: {error.strerror or error}. Give a run that you may read.") from error
    path = epath.Path(output or runs[0].path)
    if path.is_dir() or not path.suffix or str(output).endswith("/"):
        path /= FILE if len(runs) == 1 else FILE_OF_SEVERAL
    text = page(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        why = f"{error.filename} is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise UserError(f"The page cannot be written to {path}: {why}. Choose another place with --output.") from error
    return str(path)


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

    def shown(part: Charts) -> dict[str, Any]:
        each = [{"title": chart.title, "left_out": chart.left_out, "div": drawn[id(chart)]} for chart in part.drawn]
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
            training=shown(training),
            statistics=shown(statistics),
            evaluations=[
                {"name": name, "charts": shown(evaluations.get(name, Charts([]))), **numbers}
                for name, numbers in tables_of(runs, names).items()
            ],
            differences=differences(runs) if len(runs) > 1 else None,
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
    goal = run.number("train_steps")
    step, checkpoint = f"step {run.last_step:,}", f"step {max(run.checkpoints, default=0):,}"
    of = f"{step} of {goal:,.0f}" if goal > 0 else step
    start = f"its last checkpoint, of {checkpoint}" if run.checkpoints else "its beginning: it has no checkpoint"
    further = f"Its training goes on from {start}" if run.config else "It has no config.gin, without which it cannot go on"
    what = "loss" if len(run.train.steps) and not np.isfinite(run.train["loss"][-1]) else "gradient"
    sentence = {
        "finished": f"finished at {step}",
        "training": f"in training: {of}. The last sign of life was {duration(run.silent or 0.0)} old when this was written",
        "diverged": f"diverged: the {what} of {step} was not finite. {further}",
        "stopped": f"stopped after {of}. {further}",
        "weights": f"no metrics of training, but a checkpoint of {checkpoint}",
        "new": "nothing was trained here yet",
    }
    return {"word": run.state, "sentence": sentence[run.state] + "."}


def damage_of(run: RunFiles) -> str:
    """A sentence of what cannot be read of a run's files; "" where all can."""
    more = f" and {len(run.damaged) - MOST_DAMAGED} more" if len(run.damaged) > MOST_DAMAGED else ""
    said = ", ".join(run.damaged[:MOST_DAMAGED]) + more
    return f"Not whole, and left out: {said}." if run.damaged else ""


# ---- evaluations, samples, commands


def tables_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By evaluation: a table, a row for each task and metric, what it wrote itself, and why it lacks something.

    Of one run its columns are steps, of several runs the last results of each, with their steps.
    """
    found: dict[str, dict[str, Any]] = {}
    for evaluation in dict.fromkeys(name for run in runs for name in run.evaluated):
        splits = [s for s in dict.fromkeys(s for run in runs for s in run.evaluations) if s.partition("/")[0] == evaluation]
        measured = [sorted({step for split in splits for step in run.evaluations.get(split, {})}) for run in runs]
        if len(runs) == 1:
            columns = [(f"step {step:,}", runs[0], step) for step in spread(measured[0], MOST_STEPS)]
        else:
            last = [(f", step {steps[-1]:,}", steps[-1]) if steps else ("", 0) for steps in measured]
            columns = [(name + words, run, step) for name, run, (words, step) in zip(names, runs, last)]
        rows = []
        for split in splits:
            results = [_results(run.evaluations.get(split, {}), step, len(runs) > 1) for _, run, step in columns]
            for metric in dict.fromkeys(name for numbers, _ in results for name in numbers if name not in COUNTS):
                cells = [_number(numbers.get(metric)) + (other if metric in numbers else "") for numbers, other in results]
                rows.append({"task": split.partition("/")[2], "metric": metric, "cells": cells})
        written = [(name, run.tables.get(evaluation, {})) for name, run in zip(names, runs)]
        of_run = [f"{name}: " if len(runs) > 1 else "" for name in names]
        found[evaluation] = {
            "columns": [name for name, _, _ in columns],
            "rows": rows,
            "steps_left_out": len(measured[0]) - len(columns) if len(runs) == 1 else 0,
            "written": [{"name": f"{name}, step {max(of):,}", "text": of[max(of)]} for name, of in written if of],
            "failures": [of + why for of, run in zip(of_run, runs) for why in run.failures.get(evaluation, [])],
            "has_samples": any(sample.evaluation == evaluation for run in runs for sample in run.samples),
        }
    return found


def _results(of: Mapping[int, Numbers], step: int, or_last: bool) -> tuple[Numbers, str]:
    """Those of a step; where there are none the last ones, if they will do, with words that say of which step."""
    if step in of or not of or not or_last:
        return of.get(step, {}), ""
    return of[max(of)], f" (step {max(of):,})"


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
        all_steps = sorted({sample.step for sample in run.samples})
        steps = spread(all_steps, MOST_STEPS)[::-1]
        evaluations = list(dict.fromkeys(sample.evaluation for sample in run.samples))
        most = max(2, MOST_SAMPLES // max(1, len(steps) * len(evaluations) * len(runs)))
        shown = []
        for step in steps:
            of_step = [[s for s in run.samples if (s.step, s.evaluation) == (step, of)] for of in evaluations]
            texts = [dataclasses.replace(s, text=s.text.translate(_CONTROLS)) for of in of_step for s in of[:most]]
            shown.append((step, texts, sum(max(0, len(of) - most) for of in of_step)))
        if shown:
            found.append({"name": name, "steps": shown, "steps_left_out": len(all_steps) - len(steps)})
    return found


def commands_of(run: RunFiles) -> list[tuple[str, str]]:
    """What one does next with a run: why, and the command."""
    at, has_weights = shlex.quote(run.path), bool(run.checkpoints)
    found = []
    if run.config and (run.train.steps.size or not has_weights):
        further, words = "go on with its training", _flags_to_go_on(run)
        if run.state == "finished":
            further = "train it further; a learning rate that has come to its end needs its settings, too"
        found.append((further, " ".join(["t5x_lab train", *words])))
    if has_weights:
        writes = run.facts.get("architecture") != "encoder"
        found += [("let it write", f"t5x_lab generate --model_dir={at} --prompt='The people' --temperature=0.7")] * writes
        found += [
            ("evaluate its checkpoints", f"t5x_lab eval --model_dir={at} --step=all"),
            ("see its parameters", f"t5x_lab inspect --model_dir={at}"),
        ]
    return [*found, ("compare it with another", f"t5x_lab report {at} OTHER_RUN")]


def _flags_to_go_on(run: RunFiles) -> list[str]:
    """Of training; of a run that is at its end with twice its own budget, unless early stopping left some of that."""
    is_text = binding(f"MODEL_DIR={run.path}") == f"MODEL_DIR = {run.path!r}"  # 2024 would be a number
    at = flag("MODEL_DIR", run.path if is_text else repr(run.path))  # it may have been moved
    words = [f"--gin_file={shlex.quote(f'{run.path}/config.gin')}", at]
    if run.state != "finished":
        return words
    stops = (run.setting("EARLY_STOPPING") or "None") != "None"
    steps, tokens = run.number("train_steps"), run.number("train_tokens")
    processed = run.train["tokens_processed"]
    if stops and (run.last_step < steps or (len(processed) and processed[-1] < tokens)):
        return [*words, flag("EARLY_STOPPING", None)]
    if tokens > 0:
        budget = flag("TRAIN_TOKENS", int(2 * tokens - run.tokens_before))
    else:
        budget = flag("TRAIN_STEPS", 2 * run.last_step - run.first_step)
    return [*words, budget, *([flag("EARLY_STOPPING", None)] if stops else [])]
