"""The teacher-forced loss of tasks, on the same batches every time."""

from typing import Any

import jax

from t5x_lab.config.errors import UserError
from t5x_lab.data.pipeline import EvalBatches
from t5x_lab.evaluation.config import LossEvaluation, Measured
from t5x_lab.evaluation.tasks import EvaluatedTasks, evaluated_tasks, naming
from t5x_lab.observe.console import say
from t5x_lab.partitioning.waiting import fetch
from t5x_lab.training.step import per_token

KEPT = 128 << 20  # bytes of batches in the host's memory, so that they are prepared once


class LossOfTasks:
    """Measures the loss of a model.

    Args:
      found: the tasks.
      how: see there.
      sharded: the model's mesh and programs.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, found: EvaluatedTasks, how: LossEvaluation, sharded: Any):
        self._name = how.name
        size, batches = found.data.batch_size, how.num_batches or found.data.eval_steps
        rows = sharded.rows(size)
        self._batches = {
            part.task.name: EvalBatches(
                found.tasks, part, found.data, rows, batches, how.num_examples, KEPT // len(found.parts)
            )
            for part in found.parts
        }
        sizes = {"batch_size": str(size), "num_batches": str(batches), "pack": str(found.data.pack)}
        self.settings = {**found.settings(how), **sizes}

    @classmethod
    def of(cls, how: LossEvaluation, model: Any) -> "LossOfTasks | None":
        found = evaluated_tasks(how, model, batch_size=how.batch_size)
        for part in found.tasks.parts:
            if part not in found.parts and not found.is_asked_for:
                say(f'Task "{part.task.name}" has no split "{found.data.eval_split}"; it is not evaluated.')
        with naming(how.name):
            if found.data.batch_size % model.sharded.row_multiple:
                raise UserError(
                    f"a batch of {found.data.batch_size} rows cannot be split over {model.sharded.row_multiple} devices "
                    "(replica * data * fsdp). Choose a multiple."
                )
        return cls(found, how, model.sharded) if found.parts else None

    def __call__(self, model: Any) -> Measured:
        """Loss, z-loss and accuracy per token with loss, and token counts, by task."""
        found = {task: self._measure(task, batches, model) for task, batches in self._batches.items()}
        return Measured({task: metrics for task, metrics in found.items() if metrics})

    def _measure(self, task: str, batches: EvalBatches, model: Any) -> dict[str, float]:
        total = None
        for batch in batches:
            result = model.sharded.eval_step(model.params, model.sharded.shard_batch(batch))
            total = result if total is None else jax.tree.map(lambda a, b: a + b, total, result)
        if total is None:
            say(f'Evaluation "{self._name}": the split "{batches.split}" of task "{task}" is empty; it is not evaluated.')
            return {}
        sums, counts = fetch(total, "the evaluation's loss, which all processes compute together")
        return {name: float(value) for name, value in {**per_token(sums), **counts}.items()}
