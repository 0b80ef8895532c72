"""Builds the training step and the training state of a sharded model from its configuration."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.user_code import call_user_code, shown
from t5x_lab.networks.functional import Params
from t5x_lab.optim.groups import current_rates, flat_names, learning_rates, select, trained_predicate
from t5x_lab.optim.optimizers import Optimizer, gradient_point
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.model.sharded_model import ShardedModel, attach_shardings, check_rows
from t5x_lab.runs.train.batch import ResolvedBatch
from t5x_lab.training.hooks import Statistics
from t5x_lab.training.state import TrainState, initial_state
from t5x_lab.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Training:
    """The training step of a sharded model and its state.

    Attributes:
      sharded: model and mesh.
      abstract_state: shapes and shardings of a `TrainState`, for restoring.
      init_state: function that returns the state of step 0 for parameters.
      step: compiled training step. It donates the state.
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
    """Builds the training step and the shardings of its state. The state counts the tokens of `num_tasks` tasks.

    Raises:
      UserError: if the batch cannot be split over the mesh.
    """
    check_rows(batch_size // microbatches, sharded.row_multiple)
    model = sharded.model
    is_trained = trained_predicate(optimizer, list(flat_names(model.axes)), trainable)
    transformation = _transformation(optimizer, select(model.axes, is_trained))
    init = functools.partial(
        initial_state, transformation, num_tasks=num_tasks, is_trained=is_trained, with_average=average_decay is not None
    )
    abstract = jax.eval_shape(init, model.abstract_params)
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
        sum_over_slices=functools.partial(
            sharded.partitioner.sum_over_slices, shardings=select(sharded.param_shardings, is_trained)
        ),
        is_trained=is_trained,
        statistics=statistics,
        skip_bad_steps=skip_bad_steps,
        average_decay=average_decay,
        gradient_point=functools.partial(gradient_point, optimizer),
    )
    compiled = jax.jit(
        step,
        in_shardings=(shardings, sharded.batch_sharding),
        out_shardings=(shardings, sharded.replicated),
        donate_argnums=0,
    )
    init_state = jax.jit(init, out_shardings=shardings)
    return Training(sharded, attach_shardings(abstract, shardings), init_state, compiled)


def _transformation(optimizer: Optimizer, axes: dict) -> optax.GradientTransformation:
    """Returns the optax transformation of an optimizer, with errors for an invalid one."""
    name = type(optimizer).__name__
    transformation = call_user_code(f"{name}.make fails", lambda: optimizer.make(axes))
    if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
        raise UserError(f"{name}.make(axes) returned {transformation!r}. It must return an optax GradientTransformation.")
    for schedule in learning_rates(optimizer).values():
        if not callable(schedule):
            raise UserError(f"{name}.learning_rate is {schedule!r}. It must be a function of the step, such as @LinearDecay().")
        step = jax.ShapeDtypeStruct((), jnp.int32)
        rate = call_user_code(f"{name}.learning_rate fails", lambda schedule=schedule: jax.eval_shape(schedule, step))
        if getattr(rate, "shape", None) != ():
            raise UserError(f"{name}.learning_rate returned {shown(rate)} for a step. It must return a scalar.")
    return transformation


def assemble_run(run: RunConfig, sharded: ShardedModel, batch: ResolvedBatch, statistics: Statistics | None = None) -> Training:
    """Calls `assemble` with the settings of a run.

    Raises:
      UserError: also if the model or a loss fails on a batch of the run's features.
    """
    model = sharded.model
    if getattr(run.model.network, "dtype", None) == "float16":
        raise UserError(
            "A network with dtype float16 cannot be trained: most gradients are below its smallest number and would be 0. Set "
            f"{gin_flag(f'{type(run.model.network).__name__}.dtype', 'bfloat16')} (or float32)."
        )
    for _, size in run.data.named_batch_sizes():
        check_rows(size // run.microbatches, sharded.row_multiple)
    call_user_code(
        f"The model fails on a batch of {', '.join(batch.features)}",
        lambda: jax.eval_shape(model.loss, model.abstract_params, batch.features),
    )
    return assemble(
        sharded,
        run.optimizer,
        batch_size=run.data.batch_size,
        microbatches=run.microbatches,
        seed=run.seed,
        num_tasks=len(batch.counted_tasks),
        statistics=statistics or Statistics(run.hooks),
        skip_bad_steps=run.bad_steps > 0,
        average_decay=run.average_decay,
        trainable=run.trainable,
    )
