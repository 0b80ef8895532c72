"""Adapter layers (Houlsby et al. 2019; Raffel et al. 2020, section 3.5.1).

Axis letters: B batch, T length, D embed, A the adapter's inner size.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.ops.parameters import project


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapter layers: adds relu(y down) up to the output y of a module. `up` starts at zero, so the output is unchanged.

    Attributes:
      modules: regular expression of the modules to attach to. The default is T5's, the feed-forward network of each block.
      size: A, the inner size; 32 to 2,048 in Raffel et al., Table 10.
    """

    modules: str = r"(encoder|decoder)/layers/mlp"
    size: int = 64

    def __post_init__(self):
        check_types(self)
        check_positive(self, "size")

    def make(self, module: Any, rngs: nnx.Rngs) -> "Bottleneck":
        """Makes the bottleneck of a module. See `PeftMethod.make`.

        Raises:
          UserError: if no parameter of the module has the logical axis "embed", whose size is that of y.
        """
        for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            axes = param.get_metadata("axes", None) or ()
            if "embed" in axes:
                return Bottleneck(param.get_value().shape[axes.index("embed")], self.size, rngs)
        raise UserError('none of its parameters has the logical axis "embed", which gives the size of its output.')


class Bottleneck(nnx.Module):
    """Computes y + relu(y down) up."""

    def __init__(self, emb_dim: int, size: int, rngs: nnx.Rngs):
        down = jax.random.normal(rngs.params(), (emb_dim, size)) / math.sqrt(emb_dim)
        self.down = nnx.Param(down, axes=("embed", None))
        self.up = nnx.Param(jnp.zeros((size, emb_dim)), axes=(None, "embed"))

    def __call__(self, x: jax.Array, y_BTD: jax.Array) -> jax.Array:
        if not hasattr(y_BTD, "shape"):
            raise UserError(
                "Adapter.modules matches a module that returns several arrays. Choose modules that return one, such as the mlp."
            )
        if y_BTD.ndim != 3 or y_BTD.shape[-1] != self.down.shape[0]:
            raise UserError(
                f"Adapter.modules matches a module that returns an array of shape {tuple(y_BTD.shape)}. Choose modules that "
                f"return hidden states [batch, length, {self.down.shape[0]}], such as the mlp."
            )
        inner_BTA = jax.nn.relu(project(y_BTD, self.down[...], "BTD,DA->BTA"))
        return y_BTD + project(inner_BTA, self.up[...], "BTA,AD->BTD")
