"""Evaluation: the loss of every task on its validation split, and the metrics that tasks define themselves."""

import re
import time
from collections.abc import Iterable, Iterator

import jax

from t5x_lab.checkpoints.formats import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.environment import check_environment
from t5x_lab.models.model import Params
from t5x_lab.observe.console import say
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.partitioning.waiting import fetch
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.run import Run
from t5x_lab.runs.sharded_model import ShardedModel, check_rows
from t5x_lab.training.step import per_token


class LossEvaluation:
    """Evaluates parameters on the same batches every time.

    Args:
      sharded: model and mesh.
      tasks: a `t5x_lab.data.mixture.WeightedTasks`.
      data: lengths, batch size, number of batches.
    """

    def __init__(self, sharded: ShardedModel, tasks, data: DataConfig):
        self._sharded, self._tasks, self._data = sharded, tasks, data
        self._parts = [part for part in tasks.parts if data.eval_split in part.task.splits]
        for part in tasks.parts:
            if part not in self._parts:
                say(f'Task "{part.task.name}" has no split "{data.eval_split}"; it is not evaluated.')

    def __call__(self, params: Params) -> dict[str, dict[str, float]]:
        """Loss, z-loss and accuracy per token with loss, and token counts, by split ("eval/<task>")."""
        return {f"eval/{part.task.name}": metrics for part in self._parts if (metrics := self._part(part, params))}

    def _part(self, part, params: Params) -> dict[str, float]:
        from t5x_lab.data.pipeline import eval_batches

        total = None
        for batch in eval_batches(self._tasks, part, self._data, self._sharded.rows(self._data.batch_size)):
            result = self._sharded.eval_step(params, self._sharded.shard_batch(batch))
            total = result if total is None else jax.tree.map(lambda a, b: a + b, total, result)
        if total is None:
            say(f'The split "{self._data.eval_split}" of task "{part.task.name}" is empty; it is not evaluated.')
            return {}
        sums, counts = fetch(total, "the evaluation's loss, which all processes compute together")
        return {name: float(value) for name, value in {**per_token(sums), **counts}.items()}


class TaskEvaluation:
    """Measures the tasks' own metrics on what parameters make a model generate and score.

    Args:
      config: the run's; see `InferEvalConfig`.
      sharded: model and mesh.
      tasks: a `t5x_lab.data.mixture.WeightedTasks`; what cannot be measured of them is said.
    """

    def __init__(self, config: GinConfig, sharded: ShardedModel, tasks):
        from t5x_lab.evaluation.task_metrics import TaskMetrics

        how, data = config.infer_eval(), config.data()
        self._metrics = TaskMetrics(tasks, how, data.task_feature_lengths)
        if not sharded.model.generates:
            self._metrics.leave_out_generation()
        self._model = Run(config, sharded, {}, step=0)
        self.period = how.period or 0
        self.has_tasks = bool(self._metrics.tasks)
        if how.period and not self._metrics.defined:
            say(
                f'INFER_EVAL_PERIOD is {how.period}, but no task of "{tasks.name}" has a split "{how.split}" and metrics '
                "(metric_fns): the loss alone is evaluated, at EVAL_PERIOD."
            )

    def __call__(self, params: Params, step: int, directory: str | None = None) -> dict[str, dict[str, float]]:
        """Metrics by "infer/<task>"; predictions go to files of `directory`."""
        model = self._model.with_params(params, step)
        return self._metrics(model, step, directory if jax.process_index() == 0 else None)


def evaluate_checkpoints(
    config: GinConfig, model_dir: str, step: str, wait_minutes: float = 60.0, weights: str = "last"
) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """Evaluates a run's checkpoints one after the other; what tasks with metrics predict goes to `model_dir`/inference.

    Args:
      config: the run's configuration.
      model_dir: its directory.
      step: "latest", "all", numbers joined by commas, or "new": those that are there and then every new one, until that of
        TRAIN_STEPS.
      weights: "last" or "average", see `t5x_lab.load`.
      wait_minutes: "new" ends when there has been none for so long.

    Yields:
      (step, metrics by split)
    """
    model, data = config.model(), config.data()
    steps = _steps(model_dir, step, config, wait_minutes)  # a mistake in `step` is found before data are read
    sharded = ShardedModel(model, config.mesh(), rules=config.sharding())
    check_rows(data.batch_size, sharded.row_multiple)
    check_environment()
    from t5x_lab.data.pipeline import resolve_tasks

    tasks = resolve_tasks(data, model.network.architecture, model.network.vocab_size)
    evaluation, measure = LossEvaluation(sharded, tasks, data), TaskEvaluation(config, sharded, tasks)
    for number in steps:
        if step == "new" and not broadcast(number in finished_steps(model_dir)):
            continue  # removed to make room for newer ones
        params = load_params(find(model_dir, number, weights), sharded.abstract_params, sharded.model.axes)
        results = evaluation(params)
        if measure.has_tasks:
            results |= measure(params, number, f"{model_dir}/inference")
        yield number, results


def _steps(model_dir: str, step: str, config: GinConfig, wait_minutes: float) -> Iterable[int]:
    if step == "new":
        return _as_they_come(model_dir, config.run().train_steps, wait_minutes)
    if step == "all":
        find_checkpoint(model_dir)
        return finished_steps(model_dir)
    if step == "latest":
        return [broadcast(int(find_checkpoint(model_dir).name))]
    if not re.fullmatch(r"\d+(,\d+)*", step, re.ASCII):
        raise UserError(f'--step is "{step}"; give a number, several joined by commas, latest, all or new.')
    return [int(find_checkpoint(model_dir, int(number)).name) for number in step.split(",")]


def _as_they_come(model_dir: str, last: int | None, wait_minutes: float) -> Iterator[int]:
    """New steps; the first process looks for them, since a directory may change between two processes' looks."""
    none_yet, none_for_long = -1, -2
    seen: set[int] = set()
    news = time.monotonic()
    while last not in seen:
        waiting = [step for step in finished_steps(model_dir) if step not in seen]
        late = time.monotonic() - news >= 60 * wait_minutes
        found = broadcast(waiting[0] if waiting else none_for_long if late else none_yet)
        if found == none_for_long:
            return
        if found == none_yet:
            time.sleep(1.0)
            continue
        seen.add(found)
        yield found
        news = time.monotonic()
