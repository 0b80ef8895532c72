"""Shardings of parameters, optimizer states, batches and activations on a mesh."""

import contextvars
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_lab.config.errors import UserError
from t5x_lab.partitioning.mesh import SLICES
from t5x_lab.partitioning.rules import ACTIVATION_RULES, ShardingRules, is_axes, mesh_axes_of, num_parts, split_further


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationSharding:
    """Shards activations by their logical axes. Networks get it as `constrain`. Kernels use it as `ops.shards.Shards`."""

    mesh: Mesh
    rules: ShardingRules

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Shards an activation."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self._spec(axes, x.shape)))

    def entry(self, axis: str, size: int) -> Any:
        """Returns the axes of the mesh that shard a logical axis of this size evenly, or None."""
        (entry,) = self._spec((axis,), (size,))
        return None if size % num_parts(self.mesh.shape, entry) else entry

    def map(self, function: Callable, in_axes: Sequence[tuple], out_axes: Sequence[tuple]) -> Callable:
        """Returns a function that calls another one on each shard of arrays with these logical axes.

        Results have the sizes of arguments along the same axes. An axis that cannot be sharded evenly is not sharded.
        """

        def call(*arrays: jax.Array) -> Any:
            sizes = {axis: size for names, x in zip(in_axes, arrays) for axis, size in zip(names, x.shape) if axis}
            entries = {axis: self.entry(axis, size) for axis, size in sizes.items()}
            specs = lambda axes: tuple(PartitionSpec(*(entries.get(axis) for axis in names)) for names in axes)
            # Kernels do not say how their results vary over the mesh.
            mapped = jax.shard_map(
                function, mesh=self.mesh, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False
            )
            return mapped(*arrays)

        return call

    def _spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        if not _in_one_slice.get():
            return self.rules.activation_entries(axes, shape, self.mesh.shape)
        spec = self.rules.activation_entries(axes, shape, {**self.mesh.shape, SLICES: 1})
        entries = (tuple(axis for axis in mesh_axes_of(entry) if axis != SLICES) or None for entry in spec)
        return PartitionSpec(*entries)


class Partitioner:
    """A mesh with sharding rules.

    Args:
      mesh: device mesh.
      rules: changes of the default rules.

    Attributes:
      constrain: sharding of activations, which networks call.
      replicated: sharding of replicated arrays.
      batch: sharding of a batch's features [batch, ...].
      batch_shards: number of shards of a batch's rows.
      slices: number of slices that the batch is sharded over.
    """

    def __init__(self, mesh: Mesh, rules: ShardingRules = ShardingRules()):
        self.mesh, self.rules = mesh, rules
        self.constrain = ActivationSharding(mesh, rules)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.batch = NamedSharding(mesh, PartitionSpec(ACTIVATION_RULES["batch"]))
        self.batch_shards = num_parts(mesh.shape, ACTIVATION_RULES["batch"])
        self.slices = mesh.shape[SLICES]

    def row_shards(self) -> int:
        """Returns the number of shards of the rows; within `sum_over_slices`, of a slice's rows."""
        return self.batch_shards // (self.slices if _in_one_slice.get() else 1)

    def sum_over_slices(self, function: Callable, shardings: Any) -> Callable:
        """Returns (shared, rows) -> sum of function(slice, shared, rows of the slice) over slices.

        Slices communicate once, at the end. Automatic sharding would communicate in every microbatch, and every device would
        send all of a gradient that a slice does not split. Here each device sends its share, and the devices of a slice gather.

        Args:
          function: function (slice int [], shared, rows) -> (gradients, other sums). `slice` is None if there is only one.
          shardings: shardings of the gradients.
        """
        if self.slices == 1:
            return lambda shared, rows: function(None, shared, rows)
        within = tuple(axis for axis in ACTIVATION_RULES["batch"] if axis != SLICES)
        slice_sharding = NamedSharding(self.mesh, PartitionSpec(SLICES, within))

        def split_by_slice(x):
            return jax.lax.with_sharding_constraint(x.reshape(self.slices, -1, *x.shape[1:]), slice_sharding)

        def sum_slices(shared, rows):
            token = _in_one_slice.set(True)
            try:
                mapped = jax.vmap(function, in_axes=(0, None, 0), spmd_axis_name=SLICES)
                sums = mapped(jnp.arange(self.slices), shared, jax.tree.map(split_by_slice, rows))
            finally:
                _in_one_slice.reset(token)
            gradients, others = sums
            return jax.tree.map(self._sum_shares, gradients, shardings), jax.tree.map(lambda x: jnp.sum(x, axis=0), others)

        return sum_slices

    def _sum_shares(self, of_slices: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Returns the sum of an array [slices, ...] over slices, in a sharding, after each device has summed a share of it."""
        entries = split_further(sharding.spec, of_slices.shape[1:], {**self.mesh.shape, SLICES: 1})
        parts = lambda spec: math.prod(num_parts(self.mesh.shape, entry) for entry in spec)
        if parts(entries) == parts(sharding.spec):  # each device has no more than its share, and needs no copy of it
            return jnp.sum(of_slices, axis=0)

        def sum_share(share):
            # As a vector, which is sent without the padding of a TPU's tiles.
            vector = jax.lax.optimization_barrier(share.ravel())
            return jax.lax.optimization_barrier(jax.lax.psum(vector, SLICES)).reshape(share.shape[1:])

        of_share = PartitionSpec(SLICES, *entries), PartitionSpec(*entries)
        shares = jax.shard_map(sum_share, mesh=self.mesh, in_specs=of_share[:1], out_specs=of_share[1], check_vma=False)
        return jax.lax.with_sharding_constraint(shares(of_slices), sharding)

    def processes_by_shard(self) -> np.ndarray:
        """Returns the process index of each device, int [batch shards, devices per shard]."""
        processes = [device.process_index for device in self.mesh.devices.flat]
        return np.array(processes).reshape(self.batch_shards, -1)

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the partition spec of a parameter."""
        return self.rules.parameter_entries(axes, shape, self.mesh.shape)

    def parameters(self, abstract_params: dict, axes: dict) -> dict:
        """Returns the shardings of the parameters.

        Raises:
          UserError: if a dimension cannot be split evenly.
        """
        for path, shape, names in _parameters(abstract_params, axes):
            for name, size, entry in zip(names, shape, self.spec(names, shape), strict=True):
                if size % num_parts(self.mesh.shape, entry):
                    self._raise_uneven("/".join(path), name, size, entry)
                if name == "heads":
                    self._check_heads(size)
        return jax.tree.map(
            lambda names, leaf: NamedSharding(self.mesh, self.spec(names, leaf.shape)), axes, abstract_params, is_leaf=is_axes
        )

    def _check_heads(self, num_heads: int) -> None:
        """Raises a `UserError` if devices that split texts cannot split the heads of attention."""
        if num_heads % self.mesh.shape["sequence"]:
            raise UserError(
                f"MESH splits texts over sequence={self.mesh.shape['sequence']} devices, which split heads in attention, but "
                f"num_heads = {num_heads} is not a multiple of that. Choose a size of sequence that divides {num_heads}."
            )

    def _raise_uneven(self, path: str, name: str | None, size: int, entry: Any) -> None:
        mesh_axes = mesh_axes_of(entry)
        over = " * ".join(f"{axis}={self.mesh.shape[axis]}" for axis in mesh_axes)
        raise UserError(
            f"MESH shards {_SETTINGS.get(name or '', name)} = {size} over {over} devices, but {size} is not a multiple of that "
            f"({path}). Choose a size of {' * '.join(mesh_axes)} that divides {size}, or do not shard this dimension: "
            f'ShardingRules.parameters = {{"{name}": None}}.'
        )

    def optimizer(self, abstract_state: Any, abstract_params: dict, axes: dict) -> Any:
        """Returns the shardings of an optimizer state. A leaf belongs to the parameter whose path is a suffix of its own.

        Dimensions that the optimizer reduced to size 1 are not sharded. Leaves without a parameter are replicated.
        """
        by_path = {path: (shape, names) for path, shape, names in _parameters(abstract_params, axes)}

        def sharding(path, leaf):
            path = _path(path)
            owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
            if owner is None or len(owner[0]) != leaf.ndim:
                return self.replicated
            full_shape, names = owner
            spec = self.spec(names, full_shape)
            entries = [entry if size == full else None for entry, size, full in zip(spec, leaf.shape, full_shape, strict=True)]
            return NamedSharding(self.mesh, PartitionSpec(*entries))

        return jax.tree_util.tree_map_with_path(sharding, abstract_state)

    def bytes_per_device(self, size: int, spec: PartitionSpec) -> int:
        """Returns the bytes per device of an array of `size` bytes."""
        return size // math.prod(num_parts(self.mesh.shape, entry) for entry in spec)


# Whether the current trace is inside `sum_over_slices`.
_in_one_slice = contextvars.ContextVar("in_one_slice", default=False)


_SETTINGS = {
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "kv": "head_dim",
    "mlp": "mlp_dim",
    "embed": "emb_dim",
    "vocab": "vocab_size",
}


def _parameters(abstract_params: dict, axes: dict) -> list[tuple[tuple[str, ...], tuple[int, ...], tuple[str | None, ...]]]:
    """Returns (path, shape, logical axes) of every parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    all_names = jax.tree.leaves(axes, is_leaf=is_axes)
    return [(_path(path), leaf.shape, names) for (path, leaf), names in zip(leaves, all_names, strict=True)]


def _path(path) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
