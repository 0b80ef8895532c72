"""Model, mesh, shardings and compiled steps of a run: everything between the configuration and the loop."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_lab.config.errors import UserError
from t5x_lab.models.model import Model, ModelConfig, Params
from t5x_lab.optim.optimizers import Adafactor, AdamW
from t5x_lab.partitioning.mesh import MeshShape, make_mesh
from t5x_lab.partitioning.rules import (
    activation_constraint,
    batch_sharding,
    batch_shards,
    check_divides,
    optimizer_shardings,
    param_shardings,
    parts_of_processes,
)
from t5x_lab.training.batches import HostBatch, Rows
from t5x_lab.training.state import TrainState, initial_state
from t5x_lab.training.step import make_eval_step, make_train_step


class Placed:
    """A model on a mesh: where its parameters and batches go.

    Raises:
      UserError: when the mesh does not fit the devices, or does not divide the model's sizes.
    """

    def __init__(self, config: ModelConfig, mesh: MeshShape, devices: list | None = None):
        self.mesh: Mesh = make_mesh(mesh, devices)
        self.model = Model(config, activation_constraint(self.mesh), batch_shards(self.mesh))
        check_divides(self.model.abstract_params, self.model.axes, self.mesh.shape)
        self.param_shardings = param_shardings(self.model.axes, self.mesh)
        self.batch_sharding = batch_sharding(self.mesh)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    @property
    def row_multiple(self) -> int:
        """Batches have a multiple of so many rows."""
        return batch_shards(self.mesh)

    @property
    def abstract_params(self) -> Params:
        """Shapes and shardings, for restoring."""
        return _with_shardings(self.model.abstract_params, self.param_shardings)

    def rows(self, batch_size: int) -> Rows:
        """The rows of a batch that this process holds."""
        parts = np.arange(batch_size).reshape(self.row_multiple, -1)
        owners = parts_of_processes(self.mesh).min(axis=1)
        return Rows(parts[self._parts].ravel(), parts[owners == jax.process_index()].ravel())

    @functools.cached_property
    def _parts(self) -> np.ndarray:
        """The parts of a batch, `row_multiple` in all, that this process holds."""
        return np.flatnonzero((parts_of_processes(self.mesh) == jax.process_index()).any(axis=1))

    def put(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Global arrays, made of the rows that this process holds."""

        def whole(rows: np.ndarray) -> jax.Array:
            per_part = len(rows) // len(self._parts)

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                start = index[0].start if index else 0
                first = np.searchsorted(self._parts, (start or 0) // per_part) * per_part
                return rows[first : first + per_part]

            return jax.make_array_from_callback((self.row_multiple * per_part, *rows.shape[1:]), self.batch_sharding, part)

        return {name: whole(rows) for name, rows in batch.items()}

    def init_params(self, seed: int) -> Params:
        """Fresh parameters, made where they will live; the same numbers on every mesh."""
        # Random generators are long programs that run once; a CPU's compiler need not polish them.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        init = jax.jit(self.model.init, out_shardings=self.param_shardings, compiler_options=options)
        return init(jax.random.split(jax.random.key(seed))[0])  # the other half is for dropout

    @functools.cached_property
    def eval_step(self) -> Callable:
        return jax.jit(
            make_eval_step(self.model),
            in_shardings=(self.param_shardings, self.batch_sharding),
            out_shardings=self.replicated,
        )


@dataclasses.dataclass(frozen=True)
class Training:
    """A placed model with its optimizer.

    Attributes:
      placed: model and mesh.
      optimizer: the optax transformation.
      abstract_state: shapes and shardings of a `TrainState`, for restoring.
      start: the state of step 0, of parameters.
      step: the compiled training step; it donates the state.
    """

    placed: Placed
    optimizer: optax.GradientTransformation
    abstract_state: TrainState
    start: Callable[[Params], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def assemble(
    placed: Placed, optimizer: Adafactor | AdamW, *, batch_size: int, microbatches: int, seed: int, num_tasks: int = 1
) -> Training:
    """Builds the training step and the shardings of its state, which counts the tokens of so many tasks.

    Raises:
      UserError: when the batch cannot be split over the mesh.
    """
    check_rows(batch_size // microbatches, placed.row_multiple)
    model = placed.model
    transformation = optimizer.make(model.axes)
    start = functools.partial(initial_state, model, transformation, num_tasks=num_tasks)
    abstract = jax.eval_shape(start, model.abstract_params)
    shardings = jax.tree.map(lambda leaf: placed.replicated, abstract)
    shardings = dataclasses.replace(
        shardings,
        params=placed.param_shardings,
        opt_state=optimizer_shardings(abstract.opt_state, model.abstract_params, model.axes, placed.mesh),
    )
    step = make_train_step(model, transformation, optimizer.learning_rate, seed=seed, microbatches=microbatches)
    compiled = jax.jit(
        step,
        in_shardings=(shardings, placed.batch_sharding),
        out_shardings=(shardings, placed.replicated),
        donate_argnums=0,
    )
    first = jax.jit(start, out_shardings=shardings)
    return Training(placed, transformation, _with_shardings(abstract, shardings), first, compiled)


def check_rows(rows: int, parts: int) -> None:
    """Raises a `UserError` when that many rows cannot be split over the mesh."""
    if rows % parts:
        raise UserError(
            f"BATCH_SIZE / MICROBATCHES is {rows} rows, which cannot be split over replica * data * fsdp = {parts} devices. "
            f"Choose a multiple of {parts}."
        )


def _with_shardings(abstract, shardings):
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), abstract, shardings)
