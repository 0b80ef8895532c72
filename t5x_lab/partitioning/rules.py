"""Every sharding decision, in two tables: which mesh axes the dimensions of parameters and of activations are split over.

Dimensions have logical names. A parameter's dimension whose name is not in the table stays whole: `layers`, `kv`,
`relpos_buckets`, `positions`. So do an LSTM's `recurrent`, `gates` and `units`; it is small, and its steps would wait for each
other's parts. An activation's dimension stays whole where its name is None. Within one array a mesh axis is used once, by the
first dimension that asks for it. Comments show some of the shapes.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_lab.config.errors import UserError

Rules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Rules = {
    "embed": ("fsdp",),  # [embed, heads, kv]  [heads, kv, embed]  [embed, mlp]  [mlp, embed]  [vocab, embed]  [embed, vocab]
    "heads": ("tensor",),  # [embed, heads, kv]  [heads, kv, embed]  [heads, relpos_buckets]
    "kv_heads": ("tensor",),  # [embed, kv_heads, kv], of grouped queries
    "mlp": ("tensor",),  # [embed, mlp]  [mlp, embed]
    "vocab": ("tensor",),  # [vocab, embed]  [embed, vocab]
}

ACTIVATION_RULES: Rules = {
    "batch": ("replica", "data", "fsdp"),  # [batch, length]
    # Between sub-layers, where every token stands alone, `tensor` splits the sequence (Korthikanti et al. 2022); inside
    # them it splits heads, hidden units or the vocabulary, and the sequence is whole.
    "length": ("tensor",),  # [batch, length, None]
    "heads": ("tensor",),  # [batch, None, heads, None]; caches [batch, heads, None, None]
    "kv_heads": ("tensor",),  # [batch, None, kv_heads, None]
    "mlp": ("tensor",),  # [batch, None, mlp]
    "vocab": ("tensor",),  # logits [batch, None, vocab]; tables in the activations' dtype, [vocab, None] and [None, vocab]
    "embed": ("fsdp",),  # [embed, vocab], the gradient of the output matrix
}


def partition_spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The mesh axes of an array with these logical axes; an entry is a mesh axis, a tuple of several, or None."""
    used: set[str] = set()
    entries: list[str | tuple[str, ...] | None] = []
    for name in axes:
        mesh_axes = tuple(axis for axis in rules.get(name or "", ()) if axis not in used)
        used.update(mesh_axes)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def num_parts(sizes: Mapping[str, int], entry: str | tuple[str, ...] | None) -> int:
    """How many parts an entry of a partition spec splits a dimension into; `sizes` are those of the mesh axes."""
    return math.prod(sizes[axis] for axis in _mesh_axes(entry))


def activation_constraint(mesh: Mesh) -> Callable:
    """f(array, logical axes) -> the array, sharded by `ACTIVATION_RULES`; what networks call on their activations."""

    def constrain(x, axes):
        unknown = set(axes) - {None, *ACTIVATION_RULES}
        if unknown:
            raise ValueError(f"ACTIVATION_RULES have no {sorted(unknown)[0]!r}; a dimension that stays whole is None.")
        spec = [
            entry if size >= num_parts(mesh.shape, entry) else None  # one token cannot be split
            for size, entry in zip(x.shape, partition_spec(axes, ACTIVATION_RULES), strict=True)
        ]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return constrain


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For every feature of a batch [batch, ...]."""
    return NamedSharding(mesh, partition_spec(["batch"], ACTIVATION_RULES))


def batch_shards(mesh: Mesh) -> int:
    """How many parts a batch's rows are split into."""
    return num_parts(mesh.shape, ACTIVATION_RULES["batch"])


def processes_by_shard(mesh: Mesh) -> np.ndarray:
    """Int [batch shards, devices of each]: the process that each device belongs to."""
    processes = [device.process_index for device in mesh.devices.flat]
    return np.array(processes).reshape(batch_shards(mesh), -1)


def param_shardings(axes: dict, mesh: Mesh) -> dict:
    """Shardings by `PARAMETER_RULES`, in the tree of the parameters."""
    return jax.tree.map(lambda names: NamedSharding(mesh, partition_spec(names, PARAMETER_RULES)), axes, is_leaf=is_axes)


def optimizer_shardings(abstract_state, abstract_params: dict, axes: dict, mesh: Mesh):
    """Shardings of an optimizer's state: a leaf belongs to the parameter whose path ends its own.

    Dimensions that the optimizer reduced to size 1 are not split; leaves of no parameter are replicated.
    """
    by_path = {path: (shape, names) for path, shape, names in _parameters(abstract_params, axes)}

    def sharding(path, leaf):
        path = _path(path)
        owner = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), None)
        if owner is None or len(owner[0]) != leaf.ndim:
            return NamedSharding(mesh, PartitionSpec())
        full_shape, names = owner
        spec = partition_spec(names, PARAMETER_RULES)
        kept = [entry if size == full else None for entry, size, full in zip(spec, leaf.shape, full_shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*kept))

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)


_SETTINGS = {"heads": "num_heads", "kv_heads": "num_kv_heads", "mlp": "mlp_dim", "embed": "emb_dim", "vocab": "vocab_size"}


def check_divides(abstract_params: dict, axes: dict, mesh_sizes: Mapping[str, int]) -> None:
    """Checks that every parameter can be split evenly.

    Raises:
      UserError: naming the logical axis, its size and the mesh axes, in the user's terms.
    """
    for path, shape, names in _parameters(abstract_params, axes):
        for name, size, entry in zip(names, shape, partition_spec(names, PARAMETER_RULES), strict=True):
            if size % num_parts(mesh_sizes, entry):
                mesh_axes = _mesh_axes(entry)
                over = " * ".join(f"{axis}={mesh_sizes[axis]}" for axis in mesh_axes)
                raise UserError(
                    f"MESH splits {_SETTINGS.get(name, name)} = {size} over {over} devices, which does not divide it "
                    f"({'/'.join(path)} has {size} {name}). Choose a size of {' * '.join(mesh_axes)} that divides {size}."
                )


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _parameters(abstract_params: dict, axes: dict) -> list[tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]]:
    """(path, shape, logical axes) of every parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    all_names = jax.tree.leaves(axes, is_leaf=is_axes)
    return [(_path(path), leaf.shape, names) for (path, leaf), names in zip(leaves, all_names, strict=True)]


def is_axes(node) -> bool:
    """Whether a node of a tree of logical axes is a leaf: one array's axes."""
    return isinstance(node, tuple)


def _path(path) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
