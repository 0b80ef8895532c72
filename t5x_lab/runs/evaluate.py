"""Teacher-forced evaluation: the loss of every task on its validation split."""

import jax

from t5x_lab.data.config import DataConfig
from t5x_lab.models.model import Params
from t5x_lab.observe.console import say
from t5x_lab.runs.assemble import Placed
from t5x_lab.training.step import per_token


class Evaluation:
    """Evaluates parameters on the same batches every time.

    Args:
      placed: model and mesh.
      tasks: a `t5x_lab.data.tasks.WeightedTasks`.
      data: lengths, batch size, number of batches.
    """

    def __init__(self, placed: Placed, tasks, data: DataConfig):
        self._placed, self._vocabulary, self._data = placed, tasks.vocabulary, data
        self._tasks = [task for task in tasks.tasks if "validation" in task.splits]
        for task in tasks.tasks:
            if task not in self._tasks:
                say(f'Task "{task.name}" has no validation split; it is not evaluated.')

    def __call__(self, params: Params) -> dict[str, dict[str, float]]:
        """Loss, z-loss and accuracy per token with loss, and token counts, by split ("eval/<task>")."""
        return {f"eval/{task.name}": metrics for task in self._tasks if (metrics := self._task(task, params))}

    def _task(self, task, params: Params) -> dict[str, float]:
        from t5x_lab.data.pipeline import eval_batches

        total = None
        architecture = self._placed.model.config.network.architecture
        for batch in eval_batches(
            task, self._vocabulary, self._data, architecture, jax.process_index(), jax.process_count()
        ):
            result = self._placed.eval_step(params, self._placed.put(batch))
            total = result if total is None else jax.tree.map(lambda a, b: a + b, total, result)
        if total is None:
            say(f'The validation split of task "{task.name}" is empty; it is not evaluated.')
            return {}
        sums, counts = jax.device_get(total)
        return {name: float(value) for name, value in {**per_token(sums), **counts}.items()}
