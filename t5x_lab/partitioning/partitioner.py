"""Where parameters, optimizer states, batches and activations of a model go on a mesh, by the sharding rules."""

import contextvars
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_lab.config.errors import UserError
from t5x_lab.partitioning.mesh import SLICES
from t5x_lab.partitioning.rules import ACTIVATION_RULES, ShardingRules, is_axes, mesh_axes_of, num_parts


class Partitioner:
    """A mesh with its rules.

    Args:
      mesh: the devices.
      rules: changes of the tables.

    Attributes:
      replicated: the sharding of what every device has whole.
      batch: the sharding of every feature of a batch [batch, ...].
      batch_shards: how many parts a batch's rows are split into.
      slices: how many of these parts are in slices of their own.
    """

    def __init__(self, mesh: Mesh, rules: ShardingRules = ShardingRules()):
        self.mesh, self.rules = mesh, rules
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.batch = NamedSharding(mesh, PartitionSpec(ACTIVATION_RULES["batch"]))
        self.batch_shards = num_parts(mesh.shape, ACTIVATION_RULES["batch"])
        self.slices = mesh.shape[SLICES]

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """The activation, split by its logical axes; what networks call."""
        if not _in_one_slice.get():
            spec = self.rules.activation_entries(axes, x.shape, self.mesh.shape)
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        spec = self.rules.activation_entries(axes, x.shape, {**self.mesh.shape, SLICES: 1})
        kept = (tuple(axis for axis in mesh_axes_of(entry) if axis != SLICES) or None for entry in spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*kept)))

    def row_shards(self) -> int:
        """How many parts `constrain` splits the rows into that are at hand: within `sum_over_slices`, those of a slice."""
        return self.batch_shards // (self.slices if _in_one_slice.get() else 1)

    def sum_over_slices(self, function: Callable) -> Callable:
        """(whole, rows) -> the sum of function(slice, whole, its rows) over slices, which meet once, at the end.

        Where the compiler divides the work by itself, it adds up what slices have as soon as it can: in every microbatch.
        `slice` is None where there is one.

        Args:
          function: (slice int [], whole, rows) -> a tree of sums.
        """
        if self.slices == 1:
            return lambda whole, rows: function(None, whole, rows)
        within = tuple(axis for axis in ACTIVATION_RULES["batch"] if axis != SLICES)
        rows_of_slice = NamedSharding(self.mesh, PartitionSpec(SLICES, within))

        def by_slice(x):
            return jax.lax.with_sharding_constraint(x.reshape(self.slices, -1, *x.shape[1:]), rows_of_slice)

        def summed(whole, rows):
            token = _in_one_slice.set(True)
            try:
                mapped = jax.vmap(function, in_axes=(0, None, 0), spmd_axis_name=SLICES)
                sums = mapped(jnp.arange(self.slices), whole, jax.tree.map(by_slice, rows))
            finally:
                _in_one_slice.reset(token)
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        return summed

    def processes_by_shard(self) -> np.ndarray:
        """Int [batch shards, devices of each]: the process that each device belongs to."""
        processes = [device.process_index for device in self.mesh.devices.flat]
        return np.array(processes).reshape(self.batch_shards, -1)

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Of a parameter."""
        return self.rules.parameter_entries(axes, shape, self.mesh.shape)

    def parameters(self, abstract_params: dict, axes: dict) -> dict:
        """Shardings in the tree of the parameters.

        Raises:
          UserError: where a dimension cannot be split evenly, naming its size and the mesh axes in the user's terms.
        """
        for path, shape, names in _parameters(abstract_params, axes):
            for name, size, entry in zip(names, shape, self.spec(names, shape), strict=True):
                if size % num_parts(self.mesh.shape, entry):
                    self._refuse("/".join(path), name, size, entry)
        return jax.tree.map(
            lambda names, leaf: NamedSharding(self.mesh, self.spec(names, leaf.shape)), axes, abstract_params, is_leaf=is_axes
        )

    def _refuse(self, path: str, name: str | None, size: int, entry: Any) -> None:
        mesh_axes = mesh_axes_of(entry)
        over = " * ".join(f"{axis}={self.mesh.shape[axis]}" for axis in mesh_axes)
        raise UserError(
            f"MESH splits {_SETTINGS.get(name or '', name)} = {size} over {over} devices, which does not divide it "
            f"({path} has {size} {name}). Choose a size of {' * '.join(mesh_axes)} that divides {size}, or keep that dimension "
            f'whole: ShardingRules.parameters = {{"{name}": None}}.'
        )

    def optimizer(self, abstract_state: Any, abstract_params: dict, axes: dict) -> Any:
        """Shardings of an optimizer's state: a leaf belongs to the parameter whose path ends its own.

        Dimensions that the optimizer reduced to size 1 are not split; leaves of no parameter are replicated.
        """
        by_path = {path: (shape, names) for path, shape, names in _parameters(abstract_params, axes)}

        def sharding(path, leaf):
            path = _path(path)
            owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
            if owner is None or len(owner[0]) != leaf.ndim:
                return self.replicated
            full_shape, names = owner
            spec = self.spec(names, full_shape)
            kept = [entry if size == full else None for entry, size, full in zip(spec, leaf.shape, full_shape, strict=True)]
            return NamedSharding(self.mesh, PartitionSpec(*kept))

        return jax.tree_util.tree_map_with_path(sharding, abstract_state)

    def bytes_per_device(self, size: int, spec: PartitionSpec) -> int:
        """Of an array of so many bytes."""
        return size // math.prod(num_parts(self.mesh.shape, entry) for entry in spec)


# Whether what is traced is within `sum_over_slices`.
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
    """(path, shape, logical axes) of every parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    all_names = jax.tree.leaves(axes, is_leaf=is_axes)
    return [(_path(path), leaf.shape, names) for (path, leaf), names in zip(leaves, all_names, strict=True)]


def _path(path) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
