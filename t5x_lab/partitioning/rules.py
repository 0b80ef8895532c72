"""Every sharding decision, in one table: which mesh axes a logical axis is split over."""

import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_lab.config.errors import UserError

# Within one array a mesh axis is used once, by the first of its logical axes that asks for it. So a parameter
# [embed, mlp] is split over fsdp and tensor, while an activation [batch, length, embed] spends fsdp on the batch.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("replica", "data", "fsdp"),
    "rows": (),
    # Between sub-layers, where every token stands alone, `tensor` splits the sequence (Korthikanti et al. 2022); inside
    # them it splits heads, hidden units or the vocabulary, and the sequence is whole.
    "length": ("tensor",),
    "whole_length": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "kv": (),
    "layers": (),
    "relpos_buckets": (),
    "positions": (),
    "recurrent": (),  # an LSTM is small, and its steps would wait for each other's parts
    "gates": (),
    "units": (),
    "gathered": (),
}


def partition_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    used: set[str] = set()
    spec = []
    for name in axes:
        mesh_axes = tuple(axis for axis in RULES[name] if axis not in used)
        used.update(mesh_axes)
        spec.append(mesh_axes if len(mesh_axes) != 1 else mesh_axes[0])
    return PartitionSpec(*(entry or None for entry in spec))


def activation_constraint(mesh: Mesh) -> Callable:
    """f(array, logical axes) -> the array, sharded as the rules say; what networks call on their activations."""

    def constrain(x, axes):
        spec = [
            entry if entry is None or size >= num_parts(mesh, entry) else None  # one token cannot be split
            for size, entry in zip(x.shape, partition_spec(axes), strict=True)
        ]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return constrain


def num_parts(mesh: Mesh, entry: str | tuple[str, ...]) -> int:
    """How many parts an entry of a partition spec splits a dimension into."""
    return math.prod(mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry))


def batch_shards(mesh: Mesh) -> int:
    """How many parts a batch's rows are split into."""
    return num_parts(mesh, RULES["batch"])


def parts_of_processes(mesh: Mesh) -> np.ndarray:
    """[batch shards, devices of each]: the process that each device belongs to."""
    processes = [device.process_index for device in mesh.devices.flat]
    return np.array(processes).reshape(batch_shards(mesh), -1)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For every feature of a batch: rows split over `replica`, `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def param_shardings(axes: dict, mesh: Mesh) -> dict:
    """Shardings in the tree of the parameters."""
    return jax.tree.map(lambda a: NamedSharding(mesh, partition_spec(a)), axes, is_leaf=lambda a: isinstance(a, tuple))


def optimizer_shardings(abstract_state, abstract_params: dict, axes: dict, mesh: Mesh):
    """Shardings of an optimizer's state: a leaf belongs to the parameter whose path ends its own.

    Dimensions that the optimizer reduced to size 1 are not split; leaves of no parameter are replicated.
    """
    by_path = {
        _names(path): (param.shape, names)
        for (path, param), names in zip(
            jax.tree_util.tree_leaves_with_path(abstract_params),
            jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple)),
            strict=True,
        )
    }

    def sharding(path, leaf):
        names = _names(path)
        owner = next((by_path[names[i:]] for i in range(len(names)) if names[i:] in by_path), None)
        if owner is None or len(owner[0]) != leaf.ndim:
            return NamedSharding(mesh, PartitionSpec())
        spec = partition_spec(owner[1])
        kept = [entry if size == full else None for entry, size, full in zip(spec, leaf.shape, owner[0], strict=True)]
        return NamedSharding(mesh, PartitionSpec(*kept))

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)


def check_divides(abstract_params: dict, axes: dict, mesh_sizes: Mapping[str, int]) -> None:
    """Checks that every parameter can be split evenly.

    Raises:
      UserError: naming the logical axis, its size and the mesh axis, in the user's terms.
    """
    words = {"heads": "num_heads", "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "embed": "emb_dim", "vocab": "vocab_size"}
    for (path, param), names in zip(
        jax.tree_util.tree_leaves_with_path(abstract_params),
        jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple)),
        strict=True,
    ):
        for name, size, entry in zip(names, param.shape, partition_spec(names), strict=True):
            if entry is not None and size % mesh_sizes[entry]:
                raise UserError(
                    f"MESH splits {words[name]} = {size} over {entry}={mesh_sizes[entry]} devices, which does not divide "
                    f"it ({'/'.join(_names(path))} has {size} {name}). Choose a size of {entry} that divides {size}."
                )


def _names(path) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path)
