"""`Norms`: norms of gradients, parameters and updates by layer, as metrics."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.optim.groups import flat_names


@dataclasses.dataclass(frozen=True)
class Norms:
    """Hook with the metrics `gradient_norm/<layer>`, `parameter_norm/<layer>` and `update_norm/<layer>`.

    A layer has a name such as "decoder/layers_3"; other modules that of their parameters' prefix, such as "token_embedder".

    Attributes:
      period: number of steps between values.
    """

    period: int = 100

    def __post_init__(self):
        check_types(self)
        check_positive(self, "period")

    def statistics(self, params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
        """Returns the norms. See `t5x_lab.training.hooks.Hook`."""
        trees = {"gradient_norm": gradients, "parameter_norm": params, "update_norm": updates}
        squares = {f"{kind}/{layer}": square for kind, tree in trees.items() for layer, square in _squares(tree).items()}
        return {name: jnp.sqrt(square) for name, square in squares.items()}


def _squares(tree: Any) -> dict[str, jax.Array]:
    """Returns sums of squares by layer, float32."""
    flat = flat_names(tree)
    stacks = _stacks(flat)
    squares: dict[str, jax.Array] = {}
    for name, leaf in flat.items():
        square = jnp.square(leaf.astype(jnp.float32))
        stack = next((prefix for prefix in stacks if name.startswith(f"{prefix}/")), None)
        if stack:
            sums = jnp.sum(square.reshape(square.shape[0], -1), axis=1)
            parts = {f"{stack}_{i}": sums[i] for i in range(leaf.shape[0])}
        else:
            parts = {"/".join(name.split("/")[:-1][:2]) or name: jnp.sum(square)}
        for layer, part in parts.items():
            squares[layer] = squares.get(layer, jnp.float32(0)) + part
    return squares


def _stacks(flat: dict[str, jax.Array]) -> list[str]:
    """Returns prefixes such as "decoder/layers" whose arrays all have a layer axis of the same size."""
    sizes: dict[str, set[int | None]] = {}
    for name, leaf in flat.items():
        match = re.match(r"(.*?layers)/(?!\d+/)", name)
        if match:
            sizes.setdefault(match[1], set()).add(leaf.shape[0] if leaf.ndim else None)
    return [name for name, stack_sizes in sizes.items() if len(stack_sizes) == 1 and None not in stack_sizes]
