"""Adapter layers (Houlsby et al. 2019; Raffel et al. 2020, section 3.5.1).

Axis letters: B batch, T length, D embed, A the adapter's inner size.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import UserError
from t5x_lab.ops.parameters import project


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adds relu(y down) up to what a module gives, y; as up begins with zeros, nothing changes at first.

    Attributes:
      modules: names of modules, see `Addition`; T5's stand behind the feed-forward network of each block.
      size: A, 32 to 2,048 in T5's Table 10.
    """

    modules: str = r"(encoder|decoder)/layers/mlp"
    size: int = 64

    def __post_init__(self):
        check_types(self)
        positive(self, "size")

    def make(self, module: Any, rngs: nnx.Rngs) -> "Bottleneck":
        """As `Addition.make`, for a module one of whose parameters has an axis "embed", which is that of y."""
        for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            axes = param.get_metadata("axes", None) or ()
            if "embed" in axes:
                return Bottleneck(param.get_value().shape[axes.index("embed")], self.size, rngs)
        raise UserError('none of its parameters has an axis "embed", by which an adapter knows the size of what it reads.')


class Bottleneck(nnx.Module):
    """y + relu(y down) up."""

    def __init__(self, emb_dim: int, size: int, rngs: nnx.Rngs):
        down = jax.random.normal(rngs.params(), (emb_dim, size)) / math.sqrt(emb_dim)
        self.down = nnx.Param(down, axes=("embed", None))
        self.up = nnx.Param(jnp.zeros((size, emb_dim)), axes=(None, "embed"))

    def __call__(self, x: jax.Array, y_BTD: jax.Array) -> jax.Array:
        if not hasattr(y_BTD, "shape"):
            raise UserError(
                "Adapter.modules names a module that gives several arrays; name one that gives one, such as its mlp."
            )
        if y_BTD.ndim != 3 or y_BTD.shape[-1] != self.down.shape[0]:
            raise UserError(
                f"Adapter.modules names a module that gives an array of the shape {tuple(y_BTD.shape)}; name one that gives "
                f"states [rows, tokens, {self.down.shape[0]}], such as its mlp."
            )
        inner_BTA = jax.nn.relu(project(y_BTD, self.down[...], "BTD,DA->BTA"))
        return y_BTD + project(inner_BTA, self.up[...], "BTA,AD->BTD")
