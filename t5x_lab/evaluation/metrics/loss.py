"""Teacher-forced loss of tasks, on the same batches in every evaluation."""

from typing import Any

import jax

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.pipeline.evaluation_batches import EvalBatches
from t5x_lab.evaluation.evaluation import EvaluationResult, TaskEvaluation
from t5x_lab.evaluation.tasks import EvaluationTasks, evaluation_context, resolve_evaluation_tasks
from t5x_lab.partitioning.waiting import fetch
from t5x_lab.training.step import per_token

CACHE_BYTES = 128 << 20  # batches of up to this size stay in host memory and are prepared once


class LossEvaluator:
    """Computes the loss of a model.

    Args:
      tasks: the tasks to read.
      evaluation: settings of the evaluation.
      num_batches: batches of each task, or None for DataConfig.eval_steps.
      sharded: the model's mesh and compiled functions.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, tasks: EvaluationTasks, evaluation: TaskEvaluation, num_batches: int | None, sharded: Any):
        self._name = evaluation.name
        size, num_batches = tasks.data.batch_size, num_batches or tasks.data.eval_steps
        rows, keep = sharded.rows(size), CACHE_BYTES // len(tasks.components)
        self._batches = {
            component.task.name: EvalBatches(
                tasks.mixture, component, tasks.data, rows, num_batches, evaluation.num_examples, keep
            )
            for component in tasks.components
        }
        sizes = {"batch_size": str(size), "num_batches": str(num_batches), "pack": str(tasks.data.pack)}
        self.settings = {**tasks.settings(evaluation), **sizes}

    @classmethod
    def create(cls, evaluation: TaskEvaluation, num_batches: int | None, model: Any) -> "LossEvaluator | None":
        """Returns the evaluator, or None if no task has the split. See `Evaluation.prepare`."""
        tasks = resolve_evaluation_tasks(evaluation, model, batch_size=evaluation.batch_size)
        for component in tasks.mixture.components:
            if component not in tasks.components and not tasks.is_explicit:
                log(f'Task "{component.task.name}" has no split "{tasks.data.eval_split}". It is not evaluated.')
        with evaluation_context(evaluation.name):
            if tasks.data.batch_size % model.sharded.row_multiple:
                raise UserError(
                    f"a batch of {tasks.data.batch_size} rows cannot be split over {model.sharded.row_multiple} devices "
                    "(replica * data * fsdp). Choose a multiple."
                )
        return cls(tasks, evaluation, num_batches, model.sharded) if tasks.components else None

    def __call__(self, model: Any) -> EvaluationResult:
        """Returns loss, z-loss and accuracy per token with loss, and token counts, by task."""
        results = {task: self._evaluate(task, batches, model) for task, batches in self._batches.items()}
        return EvaluationResult({task: metrics for task, metrics in results.items() if metrics})

    def _evaluate(self, task: str, batches: EvalBatches, model: Any) -> dict[str, float]:
        total = None
        for batch in batches:
            result = model.sharded.eval_step(model.params, model.sharded.shard_batch(batch))
            total = result if total is None else jax.tree.map(lambda a, b: a + b, total, result)
        if total is None:
            log(f'Evaluation "{self._name}": the split "{batches.split}" of task "{task}" is empty. It is not evaluated.')
            return {}
        sums, counts = fetch(total, "the evaluation loss, which all processes compute together")
        return {name: float(value) for name, value in {**per_token(sums), **counts}.items()}
