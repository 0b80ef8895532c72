"""Teacher-forced evaluation: the loss of every task on its validation split."""

from collections.abc import Iterator

import jax

from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps
from t5x_lab.checkpoints.manager import restore_params
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.environment import check_environment
from t5x_lab.models.model import Params
from t5x_lab.observe.console import say
from t5x_lab.observe.model_info import model_info
from t5x_lab.runs.assemble import Placed, check_rows
from t5x_lab.runs.config import GinConfig
from t5x_lab.training.step import per_token


class Evaluation:
    """Evaluates parameters on the same batches every time.

    Args:
      placed: model and mesh.
      tasks: a `t5x_lab.data.tasks.WeightedTasks`.
      data: lengths, batch size, number of batches.
    """

    def __init__(self, placed: Placed, tasks, data: DataConfig):
        self._placed, self._tasks, self._data = placed, tasks, data
        self._parts = [part for part in tasks.parts if "validation" in part.task.splits]
        for part in tasks.parts:
            if part not in self._parts:
                say(f'Task "{part.task.name}" has no validation split; it is not evaluated.')

    def __call__(self, params: Params) -> dict[str, dict[str, float]]:
        """Loss, z-loss and accuracy per token with loss, and token counts, by split ("eval/<task>")."""
        return {f"eval/{part.task.name}": metrics for part in self._parts if (metrics := self._part(part, params))}

    def _part(self, part, params: Params) -> dict[str, float]:
        from t5x_lab.data.pipeline import eval_batches

        total = None
        for batch in eval_batches(self._tasks, part, self._data, self._placed.rows(self._data.batch_size)):
            result = self._placed.eval_step(params, self._placed.put(batch))
            total = result if total is None else jax.tree.map(lambda a, b: a + b, total, result)
        if total is None:
            say(f'The validation split of task "{part.task.name}" is empty; it is not evaluated.')
            return {}
        sums, counts = jax.device_get(total)
        return {name: float(value) for name, value in {**per_token(sums), **counts}.items()}


def dry_run(config: GinConfig) -> str:
    """The resolved configuration and the parameter and memory table; touches no data."""
    placed = Placed(config.model(), config.mesh())
    return config.text + "\n" + model_info(placed.model, placed.mesh)


def evaluate_checkpoints(config: GinConfig, model_dir: str, step: str) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """Evaluates a run's checkpoints one after the other.

    Args:
      config: the run's configuration.
      model_dir: its directory.
      step: a number, "latest" or "all".

    Yields:
      (step, metrics by split)
    """
    model, data = config.model(), config.data()
    if step not in ("latest", "all") and not (step.isascii() and step.isdigit()):
        raise UserError(f'--step is "{step}"; give a number, latest or all.')
    path = find_checkpoint(model_dir, int(step) if step.isdigit() else None)
    steps = finished_steps(model_dir) if step == "all" else [int(path.name)]
    placed = Placed(model, config.mesh())
    check_rows(data.batch_size, placed.row_multiple)
    check_environment()
    from t5x_lab.data.pipeline import resolve_tasks

    tasks = resolve_tasks(data, model.network.architecture, model.network.vocab_size)
    evaluation = Evaluation(placed, tasks, data)
    for number in steps:
        yield number, evaluation(restore_params(find_checkpoint(model_dir, number), placed.abstract_params))
