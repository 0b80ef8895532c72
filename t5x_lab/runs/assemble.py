"""The training step and its state, on a sharded model: everything between the configuration and the loop."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import shown, tried
from t5x_lab.models.model import Params
from t5x_lab.optim.groups import current_rates, flat_names, learning_rates, select, trained
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.runs.batch import BatchOfTasks
from t5x_lab.runs.config import RunConfig
from t5x_lab.runs.sharded_model import ShardedModel, check_rows, with_shardings
from t5x_lab.training.hooks import Statistics
from t5x_lab.training.state import TrainState, initial_state
from t5x_lab.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Training:
    """What it takes to train a sharded model.

    Attributes:
      sharded: model and mesh.
      abstract_state: shapes and shardings of a `TrainState`, for restoring.
      init_state: parameters -> the state of step 0.
      step: the compiled training step; it donates the state.
    """

    sharded: ShardedModel
    abstract_state: TrainState
    init_state: Callable[[Params], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def assemble(
    sharded: ShardedModel,
    optimizer: Optimizer,
    *,
    batch_size: int,
    microbatches: int,
    seed: int,
    num_tasks: int = 1,
    statistics: Statistics = Statistics(),
    skip_bad_steps: bool = False,
    average_decay: float | None = None,
    trainable: str | None = None,
) -> Training:
    """Builds the training step and the shardings of its state, which counts the tokens of `num_tasks` tasks.

    Raises:
      UserError: when the batch cannot be split over the mesh.
    """
    check_rows(batch_size // microbatches, sharded.row_multiple)
    model = sharded.model
    is_trained = trained(optimizer, list(flat_names(model.axes)), trainable)
    transformation = _transformation(optimizer, select(model.axes, is_trained))
    start = functools.partial(
        initial_state, transformation, num_tasks=num_tasks, is_trained=is_trained, with_average=average_decay is not None
    )
    abstract = jax.eval_shape(start, model.abstract_params)
    shardings = jax.tree.map(lambda leaf: sharded.replicated, abstract)
    shardings = dataclasses.replace(
        shardings,
        params=sharded.param_shardings,
        average=None if average_decay is None else sharded.param_shardings,
        opt_state=sharded.partitioner.optimizer(abstract.opt_state, model.abstract_params, model.axes),
    )
    step = make_train_step(
        model,
        transformation,
        functools.partial(current_rates, optimizer),
        seed=seed,
        microbatches=microbatches,
        sum_over_slices=sharded.partitioner.sum_over_slices,
        is_trained=is_trained,
        statistics=statistics,
        skip_bad_steps=skip_bad_steps,
        average_decay=average_decay,
    )
    compiled = jax.jit(
        step,
        in_shardings=(shardings, sharded.batch_sharding),
        out_shardings=(shardings, sharded.replicated),
        donate_argnums=0,
    )
    first = jax.jit(start, out_shardings=shardings)
    return Training(sharded, with_shardings(abstract, shardings), first, compiled)


def _transformation(optimizer: Optimizer, axes: dict) -> optax.GradientTransformation:
    """What an optimizer makes; a user's mistake in it is found here."""
    name = type(optimizer).__name__
    made = tried(f"{name}.make fails", lambda: optimizer.make(axes))
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise UserError(f"{name}.make(axes) returned {made!r}; it must return an optax transformation, with init and update.")
    for schedule in learning_rates(optimizer).values():
        if not callable(schedule):
            raise UserError(f"{name}.learning_rate is {schedule!r}; it is a function of the step, such as @LinearDecay().")
        step = jax.ShapeDtypeStruct((), jnp.int32)
        rate = tried(f"{name}.learning_rate fails", lambda schedule=schedule: jax.eval_shape(schedule, step))
        if getattr(rate, "shape", None) != ():
            raise UserError(f"{name}.learning_rate gave {shown(rate)} for a step; it must give a scalar.")
    return made


def assemble_run(run: RunConfig, sharded: ShardedModel, batch: BatchOfTasks, statistics: Statistics | None = None) -> Training:
    """`assemble`, with the run's own settings.

    Raises:
      UserError: also where the model or a loss fails on such a batch.
    """
    model = sharded.model
    tried(
        f"The model fails on a batch of {', '.join(batch.features)}",
        lambda: jax.eval_shape(model.loss, model.abstract_params, batch.features),
    )
    return assemble(
        sharded,
        run.optimizer,
        batch_size=run.data.batch_size,
        microbatches=run.microbatches,
        seed=run.seed,
        num_tasks=len(batch.counted),
        statistics=statistics or Statistics(run.hooks),
        skip_bad_steps=run.bad_steps > 0,
        average_decay=run.average_decay,
        trainable=run.trainable,
    )
