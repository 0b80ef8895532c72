"""The evaluations of checkpoints: of one run's, one after the other or as they come, and of several as an ensemble."""

import re
import time
from collections.abc import Iterator, Sequence

import jax
from etils import epath

from t5x_lab.checkpoints.formats import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import absolute_path, find_checkpoint, finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.data.environment import check_environment
from t5x_lab.models.model import Params
from t5x_lab.observe.console import say
from t5x_lab.observe.end import read_end
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.evaluate import Evaluations, Found, by_split
from t5x_lab.runs.load import load
from t5x_lab.runs.run import Run
from t5x_lab.runs.sharded_model import ShardedModel


class EvaluationFailed(UserError):
    """Some of what was to be measured was not; the rest was."""

    status = 1


def evaluate_checkpoints(
    config: GinConfig,
    model_dir: str,
    step: str,
    wait_minutes: float = 60.0,
    weights: str | None = None,
    follow: bool = False,
) -> Iterator[tuple[int, Found]]:
    """Evaluates a run's checkpoints one after the other, with all evaluations of EVALS, and writes their results.

    Args:
      config: the run's configuration.
      model_dir: its directory.
      step: "latest", "all", or numbers joined by commas.
      weights: "last" or "average", see `t5x_lab.load`; None = what each evaluation says.
      wait_minutes: to follow ends when there has been no checkpoint for so long.
      follow: whether to evaluate those that are there and then every new one instead, until the run ends; what has results
        already is left out.

    Yields:
      (step, metrics by split)

    Raises:
      EvaluationFailed: at the end, where some metrics failed.
    """
    steps = _as_they_come(model_dir, wait_minutes) if follow else _steps(model_dir, step)
    first = None if follow else steps[0]  # type: ignore[index]  # a mistake in `step` is found before data are read
    sharded = ShardedModel(config.model(), config.mesh(), rules=config.sharding())
    check_environment()
    evaluations = _evaluations(config, sharded, model_dir, weights, first)
    failed: list[str] = []
    for number in steps:
        entries = evaluations.entries
        if follow:
            entries = evaluations.without_results(number, entries)
            if not entries or not broadcast(number in finished_steps(model_dir)):
                continue  # done before, or removed to make room for newer ones
        try:
            params = {of: _params(model_dir, number, of, sharded) for of in dict.fromkeys(entry.weights for entry in entries)}
        except Exception as error:
            is_there = number in finished_steps(model_dir)
            if not follow or is_there or jax.process_count() > 1 or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            say(f"The checkpoint of step {number} went away while it was read, and is left out: keep more (keep).")
            continue
        found: Found = {}
        for entry, measured in evaluations.measure(entries, number, params.get("last"), params.get("average")):
            found |= by_split(entry.how.name if weights else entry.name, measured)
            failed += [f"{entry.name} of step {number}"] * bool(measured.failures)
        yield number, found
    _check_failed(failed)


def evaluate_ensemble(
    config: GinConfig, directories: Sequence[str], step: int | None, weights: str
) -> Iterator[tuple[int, Found]]:
    """Evaluates several runs' models as one, with all evaluations of EVALS; results lie in the first one's directory.

    Args:
      config: of the evaluations, the first run's.
      directories: of the runs.
      step: of each; None for its latest.
      weights: "last" or "average".

    Yields:
      (the latest of the members' steps, metrics by split)

    Raises:
      EvaluationFailed: at the end, where some metrics failed.
    """
    check_environment()
    steps = [find(directory, step, weights).step for directory in directories]
    model = load(directories, step=step, weights=weights)
    members = [
        f"{absolute_path(directory)}{'' if number == model.step else f' (step {number})'}"
        for directory, number in zip(directories, steps, strict=True)
    ]
    has_average = weights == "average"
    evaluations = Evaluations(config.evals(), model, directories[0], has_average, weights=weights, members=members)
    found: Found = {}
    failed = []
    for entry, measured in evaluations.measure(evaluations.entries, model.step, model.params, model.params):
        found |= by_split(entry.name, measured)
        failed += [entry.name] * bool(measured.failures)
    yield model.step, found
    _check_failed(failed)


def _check_failed(failed: Sequence[str]) -> None:
    if failed:
        raise EvaluationFailed(f"Some metrics failed, as was said: {', '.join(failed)}. All others are written.")


def _evaluations(
    config: GinConfig, sharded: ShardedModel, model_dir: str, weights: str | None, step: int | None
) -> Evaluations:
    """Those of the configuration, for checkpoints like that of the step."""
    has_average = weights == "average" or config.keeps_average()
    if step is not None:
        has_average = weights == "average" or (find_checkpoint(model_dir, step) / "average").exists()
    return Evaluations(config.evals(), Run(config, sharded, {}, step=0), model_dir, has_average, weights=weights)


def _params(model_dir: str, step: int, weights: str, sharded: ShardedModel) -> Params:
    return load_params(find(model_dir, step, weights), sharded.abstract_params, sharded.model.axes)


def _steps(model_dir: str, step: str) -> list[int]:
    if step == "all":
        find_checkpoint(model_dir)
        return finished_steps(model_dir)
    if step == "latest":
        return [broadcast(int(find_checkpoint(model_dir).name))]
    if not re.fullmatch(r"\d+(,\d+)*", step, re.ASCII):
        raise UserError(f'--step is "{step}"; give a number, several joined by commas, latest or all.')
    return [int(find_checkpoint(model_dir, int(number)).name) for number in step.split(",")]


def wait_for_run(model_dir: str, minutes: float) -> None:
    """Returns when a run directory is there, or it is late."""
    began = time.monotonic()
    while not (epath.Path(model_dir) / "config.gin").exists() and time.monotonic() - began < 60 * minutes:
        time.sleep(1.0)


def _as_they_come(model_dir: str, wait_minutes: float) -> Iterator[int]:
    """New steps, until that which the run ended at; the first process looks for them, since a directory may change between
    two processes' looks."""
    none_yet, no_more = -1, -2
    seen: set[int] = set()
    news = time.monotonic()
    while True:
        end = read_end(model_dir)  # before the steps: what was saved before the end is seen then
        waiting = [step for step in finished_steps(model_dir) if step not in seen]
        late = time.monotonic() - news >= 60 * wait_minutes
        found = broadcast(waiting[0] if waiting else no_more if late or end is not None else none_yet)
        if found == no_more:
            return
        if found == none_yet:
            time.sleep(1.0)
            continue
        seen.add(found)
        yield found
        news = time.monotonic()
