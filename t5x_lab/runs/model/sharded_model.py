"""A model on a mesh: shardings of its parameters and batches, and compiled functions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.models.classifier import make_model
from t5x_lab.models.config import ModelConfig
from t5x_lab.networks.functional import Params
from t5x_lab.partitioning.mesh import MeshShape, make_mesh
from t5x_lab.partitioning.partitioner import Partitioner
from t5x_lab.partitioning.rules import ShardingRules
from t5x_lab.training.batches import HostBatch, Rows
from t5x_lab.training.step import make_eval_step


class ShardedModel:
    """A model on a mesh.

    Args:
      config: configuration of the model.
      mesh: sizes of the mesh axes.
      devices: devices of the mesh. Default: all.
      rules: sharding rules.
      parameter_dtype: dtype of loaded and fresh parameters. They are trained in float32.

    Raises:
      UserError: if the mesh does not fit the devices, or does not divide the model's sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: MeshShape,
        devices: list | None = None,
        rules: ShardingRules = ShardingRules(),
        parameter_dtype: str = "float32",
    ):
        check_choice("parameter_dtype", parameter_dtype, ("float32", "bfloat16"))
        self.parameter_dtype = parameter_dtype
        self.mesh_shape, self.mesh = mesh, make_mesh(mesh, devices)
        self.partitioner = Partitioner(self.mesh, rules)
        wide_logits = self.mesh.devices.flat[0].platform != "tpu"
        self.model = make_model(config, self.partitioner.constrain, self.partitioner.row_shards, wide_logits)
        self.param_shardings = self.partitioner.parameters(self.model.abstract_params, self.model.axes)
        self.batch_sharding, self.replicated = self.partitioner.batch, self.partitioner.replicated

    @property
    def row_multiple(self) -> int:
        """Number that the rows of a batch must be a multiple of."""
        return self.partitioner.batch_shards

    @property
    def abstract_params(self) -> Params:
        """Shapes, dtypes and shardings of the parameters, for restoring."""
        cast = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.parameter_dtype), self.model.abstract_params)
        return attach_shardings(cast, self.param_shardings)

    def rows(self, batch_size: int) -> Rows:
        """Returns the rows of a batch that this process holds."""
        by_shard = np.arange(batch_size).reshape(self.row_multiple, -1)
        owners = self.partitioner.processes_by_shard().min(axis=1)
        return Rows(by_shard[self._shards].ravel(), by_shard[owners == jax.process_index()].ravel())

    @functools.cached_property
    def _shards(self) -> np.ndarray:
        """Numbers of the batch's `row_multiple` shards that this process holds."""
        return np.flatnonzero((self.partitioner.processes_by_shard() == jax.process_index()).any(axis=1))

    def shard_batch(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Returns global arrays from the rows that this process holds."""

        def to_global(rows: np.ndarray) -> jax.Array:
            per_shard = len(rows) // len(self._shards)

            def shard_rows(index: tuple[slice, ...] | None) -> np.ndarray:
                shard = (index[0].start or 0) // per_shard if index else 0
                first = np.searchsorted(self._shards, shard) * per_shard
                return rows[first : first + per_shard]

            shape = (self.row_multiple * per_shard, *rows.shape[1:])
            return jax.make_array_from_callback(shape, self.batch_sharding, shard_rows)

        return {name: to_global(rows) for name, rows in batch.items()}

    def init_params(self, seed: int) -> Params:
        """Returns fresh sharded parameters, the same numbers on every mesh."""
        # Random generators are long programs that run once. Optimizing them takes longer than it saves on a CPU.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else None
        cast = lambda params: jax.tree.map(lambda x: x.astype(self.parameter_dtype), params)
        init = jax.jit(lambda key: cast(self.model.init(key)), out_shardings=self.param_shardings, compiler_options=options)
        return init(jax.random.split(jax.random.key(seed))[0])  # the other half is for dropout

    @functools.cached_property
    def logits(self) -> Callable:
        return jax.jit(self.model.logits, out_shardings=self.replicated)

    @functools.cached_property
    def class_logits(self) -> Callable:
        """Compiled class logits of a model with a classification head."""
        model: Any = self.model
        return jax.jit(model.class_logits, out_shardings=self.replicated)

    @functools.cached_property
    def loss(self) -> Callable:
        return jax.jit(self.model.loss, out_shardings=self.replicated)

    @functools.cached_property
    def eval_step(self) -> Callable:
        return jax.jit(
            make_eval_step(self.model),
            in_shardings=(self.param_shardings, self.batch_sharding),
            out_shardings=self.replicated,
        )


def check_rows(rows: int, parts: int) -> None:
    """Raises a `UserError` if this number of rows cannot be split over the mesh."""
    if rows % parts:
        raise UserError(
            f"BATCH_SIZE / MICROBATCHES is {rows} rows, which cannot be split over replica * data * fsdp = {parts} devices. "
            f"Choose a multiple of {parts}."
        )


def attach_shardings(abstract, shardings):
    """Returns shapes with their shardings."""
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), abstract, shardings)
