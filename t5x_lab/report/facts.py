"""Summary table of runs: model, data, budget, losses, time and devices."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from t5x_lab.report.run_directory import RunFiles
from t5x_lab.report.time_spent import speed, time_spent

MAX_LOSSES = 4  # evaluation losses in the summary; the table has all


def summarize_runs(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Returns the rows of the summary, one value per run, "" if unknown, without empty rows."""
    rows = {name: [_or_nothing(describe, run) for run in runs] for name, describe in FACTS.items()}
    return {name: cells for name, cells in rows.items() if any(cells)}


def _or_nothing(describe: Callable[[RunFiles], str], run: RunFiles) -> str:
    try:
        return describe(run)
    except (LookupError, TypeError, ValueError, ArithmeticError):  # other versions write other facts
        return ""


def _bound(name: str) -> Callable[[RunFiles], str]:
    return lambda run: (run.setting(name) or "").strip("'\"").removeprefix("@").removesuffix("()")


def _objective(run: RunFiles) -> str:
    name = _bound("OBJECTIVE")(run)
    return "that of the task" if name == "None" else name


def _initialization(run: RunFiles) -> str:
    path = _bound("INITIAL_CHECKPOINT_PATH")(run)
    return "fresh parameters" if path == "None" else path


def _batch(run: RunFiles) -> str:
    lengths = [run.facts[key] for key in ("encoder_length", "decoder_length")]
    return f"{run.facts['rows']:,} rows of {' + '.join(f'{length:,}' for length in lengths if length)} tokens"


def _steps(run: RunFiles) -> str:
    """Steps of the run itself, as its tokens are, without those of the run that it continues."""
    goal, own = run.number("train_steps"), run.last_step - run.first_step
    of_goal = f" of {goal - run.first_step:,.0f}" if goal > run.last_step else ""
    return f"{own:,}{of_goal}" + (f", after {run.first_step:,} of the run that it continues" if run.first_step else "")


def _last(run: RunFiles, metric: str) -> float:
    values = run.train[metric]
    return float(values[np.isfinite(values)][-1])


def _tokens(run: RunFiles) -> str:
    return f"{_last(run, 'tokens_processed') - run.tokens_before:,.0f} processed, padding excluded"


def _flops(run: RunFiles) -> str:
    steps = run.last_step - run.first_step if len(run.train.steps) else 0
    flops = _last(run, "flops") if run.has_total_flops else steps * run.facts["flops_per_step"]
    return f"{flops:.3g}, forward and backward" if steps else ""


def _loss(run: RunFiles) -> str:
    losses, measured = run.train["loss"], np.isfinite(run.train["loss"])
    first, last = losses[measured][[0, -1]]
    at = "at last" if measured[-1] else f"at step {run.train.steps[measured][-1]:,}, not finite at last"
    return f"{first:.3f} at first, {last:.3f} {at}"


def _losses(run: RunFiles) -> str:
    """Returns the last loss of each task, grouped by step."""
    last: list[tuple[int, str, float]] = []
    tasks = [split.partition("/")[2] for split in run.evaluations]
    for split, results in run.evaluations.items():
        losses = {step: loss for step, numbers in results.items() if (loss := numbers.get("loss")) is not None}
        name = split if tasks.count(split.partition("/")[2]) > 1 else split.partition("/")[2]
        last += [(max(losses), name, losses[max(losses)])] if losses else []
    by_step: dict[int, list[str]] = {}
    for step, task, loss in last[:MAX_LOSSES]:
        perplexity = f"{math.exp(loss):.1f}" if loss < 20 else "beyond 10^8"
        by_step.setdefault(step, []).append(f"{task} {loss:.3f} (perplexity {perplexity})")
    more = f", and {len(last) - MAX_LOSSES} more" if len(last) > MAX_LOSSES else ""
    return "; ".join(f"at step {step:,}: {', '.join(losses)}" for step, losses in by_step.items()) + more


def _devices(run: RunFiles) -> str:
    processes = f"{run.facts['processes']} process{'es' if run.facts['processes'] > 1 else ''}"
    return f"{run.facts['devices']} x {run.facts['device_kind']}, {processes}, mesh {run.facts['mesh']}"


def _shares(run: RunFiles) -> str:
    spent = time_spent(run.train)
    if spent is None:
        return ""
    share = lambda seconds: f"{seconds / spent.total:.1%}"
    waiting = f" ({share(spent.data)} waiting for data)" if spent.data > 0.001 * spent.total else ""
    times = "a restart" if spent.restarts == 1 else f"{spent.restarts} restarts"
    return (
        f"{share(spent.steps)} in steps{waiting}, {share(spent.between)} between them (evaluations, checkpoints), "
        f"{share(spent.starting)} starting and compiling"
    ) + (f", {share(spent.lost)} between processes ({times})" if spent.restarts else "")


def _median(metric: str, form: str) -> Callable[[RunFiles], str]:
    def describe(run: RunFiles) -> str:
        values = speed(run.train, metric)
        values = values[np.isfinite(values)]
        return format(float(np.median(values)), form) if len(values) else ""

    return describe


def duration(seconds: float) -> str:
    """Formats a duration in its two largest units, such as "3 d 4 h"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((number for number, (value, _) in enumerate(parts) if value), 3)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2])


FACTS: dict[str, Callable[[RunFiles], str]] = {
    "model": lambda run: f"{run.facts['architecture']}, {run.facts['num_parameters']:,} parameters",
    "trained on": _bound("MIXTURE_OR_TASK_NAME"),
    "objective": _objective,
    "optimizer": _bound("OPTIMIZER"),
    "initialized from": _initialization,
    "batch": _batch,
    "steps": _steps,
    "tokens": _tokens,
    "FLOPs": _flops,
    "training loss": _loss,
    "evaluation loss": _losses,
    "time": lambda run: duration(_last(run, "seconds")),
    "time split": _shares,
    "tokens per second": _median("tokens_per_second", ",.0f"),
    "MFU": _median("mfu", ".1%"),
    "devices": _devices,
    "t5x_lab": lambda run: run.facts["version"],
}
