"""Every sharding decision, in two tables: which mesh axes the dimensions of parameters and of activations are split over.

Dimensions have logical names. A parameter's dimension whose name is not in the table stays whole: `layers`, `kv`,
`relpos_buckets`, `positions`. So do an LSTM's `recurrent`, `gates` and `units`; it is small, and its steps would wait for each
other's parts. An activation's dimension stays whole where its name is None. Within one array a mesh axis is used once, by the
first dimension that asks for it. Comments show some of the shapes.
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


# Dimensions that stay whole where the mesh does not divide them. Every device then has all heads of keys and values, of which
# its queries read some: as many numbers as are few beside the queries', in exchange for meshes that fit.
WHOLE_IF_UNEVEN = frozenset({"kv_heads"})


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Changes of the two tables, and names of a user's own: {"experts": "tensor", "embed": None, "mlp": ("fsdp", "tensor")}.

    Attributes:
      parameters, activations: a logical name's mesh axis, several, or None to keep the dimension whole.
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
                "ShardingRules.activations has a rule for batch, whose rows lie where replica, data and fsdp put them. Leave "
                "it out, and choose the axes' sizes with MESH."
            )

    def parameter_entries(self, axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """The mesh axes of a parameter with these logical axes; `sizes` are those of the mesh axes."""
        return _partition_spec(axes, shape, {**PARAMETER_RULES, **_as_tuples(self.parameters)}, sizes)

    def activation_entries(self, axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """The mesh axes of an activation; a dimension shorter than its number of parts stays whole.

        Raises:
          UserError: for a name that the table does not have.
        """
        rules = {**ACTIVATION_RULES, **_as_tuples(self.activations)}
        if len(axes) != len(shape):
            raise UserError(f"In a network, an activation of the shape {tuple(shape)} has the axes {axes}; one name each.")
        for name in axes:
            if name is not None and name not in rules:
                raise UserError(
                    f'A network constrains an activation by the axis "{name}", which has no rule.{did_you_mean(name, rules)} Add it '
                    "to ShardingRules.activations; a dimension that stays whole is None."
                )
        spec = _partition_spec(axes, shape, rules, sizes)
        return PartitionSpec(*(e if n >= num_parts(sizes, e) else None for n, e in zip(shape, spec, strict=True)))


def _check_entry(where: str, name: object, entry: object) -> None:
    axes = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple | list) else ()
    if not isinstance(name, str) or (entry is not None and not axes):
        raise UserError(f'{where} has {name!r}: {entry!r}; it is written {{"mlp": "tensor"}}, with a tuple of axes, or None.')
    if len(set(axes)) < len(axes):
        raise UserError(f"{where} splits {name} over {axes}; each mesh axis is named once.")
    for axis in axes:
        if axis not in AXES:
            raise UserError(
                f'{where} splits {name} over "{axis}".{did_you_mean(str(axis), AXES)} The mesh has the axes {", ".join(AXES)}.'
            )


def _as_tuples(rules: Mapping[str, str | tuple[str, ...] | None]) -> Rules:
    return {name: (entry,) if isinstance(entry, str) else tuple(entry or ()) for name, entry in rules.items()}


def _partition_spec(axes: Sequence[str | None], shape: Sequence[int], rules: Rules, sizes: Mapping[str, int]) -> PartitionSpec:
    """An entry for each dimension: a mesh axis, a tuple of several, or None."""
    used: set[str] = set()
    entries: list[str | tuple[str, ...] | None] = []
    for name, size in zip(axes, shape, strict=True):
        mesh_axes = tuple(axis for axis in rules.get(name or "", ()) if axis not in used)
        if name in WHOLE_IF_UNEVEN and size % num_parts(sizes, mesh_axes):
            mesh_axes = ()
        used.update(mesh_axes)
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def num_parts(sizes: Mapping[str, int], entry: str | tuple[str, ...] | None) -> int:
    """How many parts an entry of a partition spec splits a dimension into; `sizes` are those of the mesh axes."""
    return math.prod(sizes[axis] for axis in mesh_axes_of(entry))


def mesh_axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def is_axes(node) -> bool:
    """Whether a node of a tree of logical axes is a leaf: one array's axes."""
    return isinstance(node, tuple)
