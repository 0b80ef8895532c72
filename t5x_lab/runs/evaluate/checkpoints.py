"""Evaluation of checkpoints: of one run, once or while it trains, and of several runs as an ensemble."""

import time
from collections.abc import Iterator, Sequence

import jax
from etils import epath

from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import absolute_path, find_checkpoint, finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.steps import parse_step
from t5x_lab.networks.functional import Params
from t5x_lab.observe.end import read_end
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.data_layer import load_data_layer
from t5x_lab.runs.evaluate.evaluations import Evaluations, MetricsBySplit, metrics_by_split
from t5x_lab.runs.model.load import load
from t5x_lab.runs.model.run import Run
from t5x_lab.runs.model.sharded_model import ShardedModel


class EvaluationFailed(UserError):
    """Some metrics failed. The others are written."""

    status = 1


def evaluate_checkpoints(
    config: GinConfig,
    model_dir: str,
    step: str,
    wait_minutes: float = 60.0,
    weights: str | None = None,
    follow: bool = False,
    parameter_dtype: str = "float32",
    output: str | None = None,
) -> Iterator[tuple[int, MetricsBySplit]]:
    """Runs all evaluations of EVALS on a run's checkpoints and writes their results.

    Args:
      config: the run's configuration.
      model_dir: run directory.
      step: "latest", "all", or numbers separated by commas.
      wait_minutes: `follow` ends if there is no new checkpoint for this time.
      weights: "last" or "average". See `t5x_lab.load`. None = as configured for each evaluation.
      follow: evaluate all checkpoints and then every new one, until the run ends. Evaluations with results are skipped.
      parameter_dtype: see `t5x_lab.load`.
      output: directory for the results. Default: the run directory.

    Yields:
      (step, metrics by split)

    Raises:
      EvaluationFailed: after the last checkpoint, if some metrics failed.
    """
    steps = _follow_steps(model_dir, wait_minutes) if follow else _parse_steps(model_dir, step)
    first = None if follow else steps[0]  # type: ignore[index]  # an invalid `step` is reported before data are read
    sharded = ShardedModel(config.model(), config.mesh(), rules=config.sharding(), parameter_dtype=parameter_dtype)
    load_data_layer()
    evaluations = _prepare(config, sharded, model_dir, output or model_dir, weights, first)
    failed: list[str] = []
    for number in steps:
        entries = evaluations.entries
        if follow:
            entries = evaluations.without_results(number, entries)
            if not entries or not broadcast(number in finished_steps(model_dir)):
                continue  # evaluated before, or deleted by the trainer
        try:
            kinds = dict.fromkeys(entry.weights for entry in entries)
            params = {kind: _load_params(model_dir, number, kind, sharded) for kind in kinds}
        except Exception as error:
            exists = number in finished_steps(model_dir)
            if not follow or exists or jax.process_count() > 1 or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            log(
                f"The checkpoint of step {number} was deleted while it was read. To keep more, raise SaveCheckpointConfig.keep."
            )
            continue
        metrics: MetricsBySplit = {}
        for entry, result in evaluations.evaluate(entries, number, params.get("last"), params.get("average")):
            metrics |= metrics_by_split(entry.evaluation.name if weights else entry.name, result)
            failed += [f"{entry.name} of step {number}"] * bool(result.failures)
        yield number, metrics
    _check_failed(failed)


def evaluate_model(
    config: GinConfig,
    directories: Sequence[str],
    step: int | None,
    weights: str,
    trust: bool,
    output: str,
    parameter_dtype: str = "float32",
) -> Iterator[tuple[int, MetricsBySplit]]:
    """Runs all evaluations of EVALS on an ensemble of runs, or on a checkpoint that is not of a run directory.

    Args:
      config: configuration of the evaluations: the first run's, or the checkpoint's.
      directories: run directories, or a checkpoint.
      step: step of every run. None = the latest of each.
      weights: "last" or "average".
      trust, parameter_dtype: see `t5x_lab.load`.
      output: directory for the results.

    Yields:
      (step, metrics by split), where the step of an ensemble is the largest of its members'

    Raises:
      EvaluationFailed: after the last checkpoint, if some metrics failed.
    """
    load_data_layer()
    is_ensemble = len(directories) > 1
    mesh = None if is_ensemble else config.mesh()
    model = load(directories, step, mesh, weights, trust=trust, parameter_dtype=parameter_dtype, config=config)
    members = []
    for directory in directories if is_ensemble else ():
        number = find(directory, step, weights).step
        members.append(f"{absolute_path(directory)}{'' if number == model.step else f' (step {number})'}")
    evaluations = Evaluations(config.evals(), model, output, weights == "average", weights=weights, members=members)
    metrics: MetricsBySplit = {}
    failed = []
    for entry, result in evaluations.evaluate(evaluations.entries, model.step, model.params, model.params):
        metrics |= metrics_by_split(entry.name, result)
        failed += [entry.name] * bool(result.failures)
    yield model.step, metrics
    _check_failed(failed)


def _check_failed(failed: Sequence[str]) -> None:
    if failed:
        raise EvaluationFailed(
            f"Some metrics failed, see the messages above: {', '.join(failed)}. All other results are written."
        )


def _prepare(
    config: GinConfig, sharded: ShardedModel, model_dir: str, output: str, weights: str | None, step: int | None
) -> Evaluations:
    """Prepares the evaluations of the configuration for the checkpoint of a step."""
    has_average = weights == "average" or config.keeps_average()
    if step is not None:
        has_average = weights == "average" or (find_checkpoint(model_dir, step) / "average").exists()
    return Evaluations(config.evals(), Run(config, sharded, {}, step=0), output, has_average, weights=weights)


def _load_params(model_dir: str, step: int, weights: str, sharded: ShardedModel) -> Params:
    return load_params(find(model_dir, step, weights), sharded.abstract_params, sharded.model.axes)


def _parse_steps(model_dir: str, step: str) -> list[int]:
    if step == "all":
        find_checkpoint(model_dir)
        return finished_steps(model_dir)
    if step == "latest":
        return [broadcast(int(find_checkpoint(model_dir).name))]
    numbers = [parse_step(number) for number in step.split(",")]
    if None in numbers:
        raise UserError(f'--step is "{step}". It must be a number, several numbers separated by commas, "latest" or "all".')
    return [int(find_checkpoint(model_dir, number).name) for number in numbers]


def wait_for_run(model_dir: str, minutes: float) -> None:
    """Waits until a run directory exists, at most for this time."""
    start = time.monotonic()
    while not (epath.Path(model_dir) / "config.gin").exists() and time.monotonic() - start < 60 * minutes:
        time.sleep(1.0)


def _follow_steps(model_dir: str, wait_minutes: float) -> Iterator[int]:
    """Yields the steps of new checkpoints until the run ends. The first process lists them, so that all processes agree."""
    none_yet, no_more = -1, -2
    evaluated: set[int] = set()
    last_new = time.monotonic()
    while True:
        end = read_end(model_dir)  # read before the steps, so that no step saved before the end is missed
        waiting = [step for step in finished_steps(model_dir) if step not in evaluated]
        is_late = time.monotonic() - last_new >= 60 * wait_minutes
        step = broadcast(waiting[0] if waiting else no_more if is_late or end is not None else none_yet)
        if step == no_more:
            return
        if step == none_yet:
            time.sleep(1.0)
            continue
        evaluated.add(step)
        yield step
        last_new = time.monotonic()
