"""Norms of gradients, parameters and updates, by layer, as metrics."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from t5x_lab.config.checks import check_types, positive


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
        positive(self, "period")

    def statistics(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """See `t5x_lab.training.hooks.Hook`."""
        trees = {"gradient_norm": gradients, "parameter_norm": params, "update_norm": updates}
        found = {f"{kind}/{layer}": square for kind, tree in trees.items() for layer, square in _squares(tree).items()}
        return {name: jnp.sqrt(square) for name, square in found.items()}


def _squares(tree: Any) -> dict[str, jax.Array]:
    """Sums of squares by layer, float32."""
    found: dict[str, jax.Array] = {}
    for name, leaf in traverse_util.flatten_dict(tree, sep="/").items():
        stack = re.match(r"(.*?/layers)/", name)
        square = jnp.square(leaf.astype(jnp.float32))
        if stack:
            sums = jnp.sum(square.reshape(square.shape[0], -1), axis=1)
            parts = {f"{stack[1]}_{i}": sums[i] for i in range(leaf.shape[0])}
        else:
            parts = {"/".join(name.split("/")[:2][: max(1, name.count("/"))]): jnp.sum(square)}
        for layer, part in parts.items():
            found[layer] = found.get(layer, jnp.float32(0)) + part
    return found
