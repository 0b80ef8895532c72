"""Sharding rules: the mesh axes of each logical axis, in one table for parameters and one for activations.

A parameter axis without a rule is not sharded: `layers`, `kv`, `relpos_buckets`, `positions`, and an LSTM's `recurrent`,
`gates` and `units`, because its sequential steps would communicate. An activation axis named None is not sharded. Within one
array a mesh axis is used once, by the first dimension that has it. Comments show examples of shapes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.partitioning.mesh import AXES

Rules = Mapping[str, tuple[str, ...]]

PARAMETER_RULES: Rules = {
    # [embed, heads, kv]  [heads, kv, embed]  [embed, mlp]  [mlp, embed]  [vocab, embed]  [embed, vocab]
    "embed": ("fsdp", "sequence"),
    "heads": ("tensor",),  # [embed, heads, kv]  [heads, kv, embed]  [heads, relpos_buckets]
    "kv_heads": ("tensor",),  # [embed, kv_heads, kv], grouped-query attention
    "joined_kv": ("tensor",),  # [embed, joined_kv], heads and sizes of heads in one, as in T5X's networks
    "mlp": ("tensor",),  # [embed, mlp]  [mlp, embed]
    "vocab": ("tensor",),  # [vocab, embed]  [embed, vocab]
}

ACTIVATION_RULES: Rules = {
    "batch": ("replica", "data", "fsdp"),  # [batch, length]
    # Between sub-layers `tensor` shards the length (sequence parallelism, Korthikanti et al. 2022); inside of them it shards
    # heads, hidden units or the vocabulary.
    "length": ("sequence", "tensor"),  # [batch, length, None]
    # `sequence` shards the length in projections and the MLP. For attention it shards heads: each device has whole texts for
    # some heads, by an all-to-all exchange (Ulysses, Jacobs et al. 2023).
    "part": ("sequence",),  # [batch, part, heads, None]  [batch, part, mlp]
    "heads": ("tensor", "sequence"),  # [batch, None, heads, None]; caches [batch, heads, None, None]
    "kv_heads": ("tensor", "sequence"),  # [batch, None, kv_heads, None]
    "mlp": ("tensor",),  # [batch, part, mlp]
    # Logits [batch, None, vocab]; tables in the activations' dtype, [vocab, None] and [None, vocab].
    "vocab": ("tensor", "sequence"),
    "embed": ("fsdp",),  # [embed, vocab], gradient of the output matrix
}


# Axes that are sharded only over as many of their mesh axes as divide them. Devices then have the same key and value heads,
# which are few compared to the query heads.
REPLICATED_IF_UNEVEN = frozenset({"kv_heads"})


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Changes of the rules, such as {"experts": "tensor", "embed": None, "mlp": ("fsdp", "tensor")}.

    Attributes:
      parameters, activations: mesh axis or axes of a logical axis. None = not sharded.
    """

    parameters: dict[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    activations: dict[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        for field, rules in (("parameters", self.parameters), ("activations", self.activations)):
            for name, entry in rules.items():
                _check_entry(f"ShardingRules.{field}", name, entry)
        if "batch" in self.activations:
            raise UserError(
                "ShardingRules.activations has a rule for batch, whose rule is fixed: replica, data and fsdp. Remove it, and "
                "set the sizes of these axes with MESH."
            )

    def parameter_entries(self, axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """Returns the partition spec of a parameter with these logical axes. `sizes`: sizes of the mesh axes."""
        return _partition_spec(axes, shape, {**PARAMETER_RULES, **_as_tuples(self.parameters)}, sizes)

    def activation_entries(self, axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """Returns the partition spec of an activation. A dimension smaller than its number of shards is not sharded.

        Raises:
          UserError: for a logical axis without a rule.
        """
        rules = {**ACTIVATION_RULES, **_as_tuples(self.activations)}
        if len(axes) != len(shape):
            raise UserError(
                f"A network constrains an activation of shape {tuple(shape)} by the axes {axes}. Give one name per dimension."
            )
        for name in axes:
            if name is not None and name not in rules:
                raise UserError(
                    f'A network constrains an activation by the axis "{name}", which has no rule.{did_you_mean(name, rules)} '
                    "Add it to ShardingRules.activations; a dimension that stays whole is None."
                )
        spec = _partition_spec(axes, shape, rules, sizes)
        return PartitionSpec(*(e if n >= num_parts(sizes, e) else None for n, e in zip(shape, spec, strict=True)))


def _check_entry(setting: str, name: object, entry: object) -> None:
    axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple | list) else ()
    if not isinstance(name, str) or (entry is not None and not axes):
        raise UserError(f'{setting} has {name!r}: {entry!r}. Write {{"mlp": "tensor"}}, a tuple of mesh axes, or None.')
    if len(set(axes)) < len(axes):
        raise UserError(f"{setting} shards {name} over {axes}. Each mesh axis may occur once.")
    for axis in axes:
        if axis not in AXES:
            raise UserError(
                f'{setting} shards {name} over "{axis}".{did_you_mean(str(axis), AXES)} The mesh has the axes '
                f"{', '.join(AXES)}."
            )


def _as_tuples(rules: Mapping[str, str | tuple[str, ...] | None]) -> Rules:
    return {name: (entry,) if isinstance(entry, str) else tuple(entry or ()) for name, entry in rules.items()}


def _partition_spec(axes: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the partition spec: for each dimension a mesh axis, a tuple of several, or None."""
    used: set[str] = set()
    entries: list[str | tuple[str, ...] | None] = []
    for name, size in zip(axes, shape, strict=True):
        mesh_axes = tuple(axis for axis in rules.get(name or "", ()) if axis not in used and sizes[axis] > 1)
        while name in REPLICATED_IF_UNEVEN and size % num_parts(sizes, mesh_axes):
            mesh_axes = mesh_axes[:-1]
        used.update(mesh_axes)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def num_parts(sizes: Mapping[str, int], entry: str | tuple[str, ...] | None) -> int:
    """Returns the number of shards for an entry of a partition spec. `sizes`: sizes of the mesh axes."""
    return math.prod(sizes[axis] for axis in mesh_axes_of(entry))


def split_further(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns a partition spec that also splits over the mesh axes that `spec` leaves out, where dimensions are divisible.

    Args:
      spec: partition spec of an array.
      shape: its shape.
      sizes: sizes of the mesh axes.
    """
    entries = [mesh_axes_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    for axis in [axis for axis, size in sizes.items() if size > 1 and not any(axis in entry for entry in entries)]:
        parts = [size // num_parts(sizes, entry) for size, entry in zip(shape, entries, strict=True)]
        divisible = [i for i, part in enumerate(parts) if part % sizes[axis] == 0]
        if divisible:
            entries[max(divisible, key=lambda i: parts[i])] += (axis,)
    return PartitionSpec(*(entry or None for entry in entries))


def mesh_axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def is_axes(node) -> bool:
    """Returns whether a node of a tree of logical axes is a leaf."""
    return isinstance(node, tuple)
