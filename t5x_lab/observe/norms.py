"""Norms of gradients, parameters and updates, by layer, as metrics."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.optim.groups import flat_names


@dataclasses.dataclass(frozen=True)
class Norms:
    """A hook: `gradient_norm/<layer>`, `parameter_norm/<layer>` and `update_norm/<layer>`.

    A layer is "decoder/layers_3"; beside the layers, a module is what its parameters' names begin with: "token_embedder".

    Attributes:
      period: steps between two times that they are written down.
    """

    period: int = 100

    def __post_init__(self):
        check_types(self)
        check_positive(self, "period")

    def statistics(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """See `t5x_lab.training.hooks.Hook`."""
        trees = {"gradient_norm": gradients, "parameter_norm": params, "update_norm": updates}
        found = {f"{kind}/{layer}": square for kind, tree in trees.items() for layer, square in _squares(tree).items()}
        return {name: jnp.sqrt(square) for name, square in found.items()}


def _squares(tree: Any) -> dict[str, jax.Array]:
    """Sums of squares by layer, float32."""
    flat = flat_names(tree)
    stacks = _stacks(flat)
    found: dict[str, jax.Array] = {}
    for name, leaf in flat.items():
        square = jnp.square(leaf.astype(jnp.float32))
        stack = next((prefix for prefix in stacks if name.startswith(f"{prefix}/")), None)
        if stack:
            sums = jnp.sum(square.reshape(square.shape[0], -1), axis=1)
            parts = {f"{stack}_{i}": sums[i] for i in range(leaf.shape[0])}
        else:
            parts = {"/".join(name.split("/")[:-1][:2]) or name: jnp.sum(square)}
        for layer, part in parts.items():
            found[layer] = found.get(layer, jnp.float32(0)) + part
    return found


def _stacks(flat: dict[str, jax.Array]) -> list[str]:
    """Names such as "decoder/layers" under which all arrays have a first axis of the same size, one entry a layer."""
    sizes: dict[str, set[int | None]] = {}
    for name, leaf in flat.items():
        match = re.match(r"(.*?layers)/(?!\d+/)", name)
        if match:
            sizes.setdefault(match[1], set()).add(leaf.shape[0] if leaf.ndim else None)
    return [name for name, found in sizes.items() if len(found) == 1 and None not in found]
