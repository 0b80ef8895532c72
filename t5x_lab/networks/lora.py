"""Low-rank adaptation of kernels (Hu et al. 2021, LoRA).

Axis letters: R rank; others as in the kernel's equation.
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
class Lora:
    """Adds alpha / rank * (x down) up to what a kernel makes of x; as up begins with zeros, nothing changes at first.

    Attributes:
      modules: names of projections, see `Addition`; the paper's are the queries and values of attention.
      rank: R.
      alpha: see above.
    """

    modules: str = r".*attention/(query|value)"
    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self):
        check_types(self)
        positive(self, "rank")

    def make(self, module: Any, rngs: nnx.Rngs) -> "LowRank":
        """As `Addition.make`, for a module with a `kernel` of two dimensions, or an `equation` that says which are inputs."""
        kernel = getattr(module, "kernel", None)
        if kernel is None:
            raise UserError("it has no kernel, which Lora changes; name modules that have one with Lora.modules.")
        shape, axes = kernel.get_value().shape, kernel.get_metadata("axes", None) or (None,) * kernel.get_value().ndim
        equation = getattr(module, "equation", "BD,DF->BF" if len(shape) == 2 else None)
        if equation is None:
            raise UserError(f"its kernel has the shape {shape}, and no equation says which of its dimensions are inputs.")
        x, letters, y = equation.replace("->", ",").split(",")
        inputs = sum(letter not in y for letter in letters)
        if any(letter in y for letter in letters[:inputs]):
            raise UserError(f"the inputs of its equation {equation} are not the first dimensions of its kernel.")
        down = jax.random.uniform(rngs.params(), (*shape[:inputs], self.rank), minval=-1.0) / math.sqrt(
            math.prod(shape[:inputs])
        )
        batch = x.replace(letters[:inputs], "") if hasattr(module, "equation") else None
        equations = batch and (f"{x},{letters[:inputs]}R->{batch}R", f"{batch}R,R{letters[inputs:]}->{y}")
        up = jnp.zeros((self.rank, *shape[inputs:]))
        return LowRank(down, up, axes[:inputs], axes[inputs:], equations, self.alpha / self.rank)

    def merge(self, own: dict, added: dict) -> dict:
        """A projection's own parameters with the product in its kernel; of a stack of layers, in each."""
        kernel, down, up = own["kernel"], added["down"], added["up"]
        layers = kernel.shape[: down.ndim + up.ndim - 2 - kernel.ndim]
        product = down.reshape(*layers, -1, self.rank) @ up.reshape(*layers, self.rank, -1)
        return {**own, "kernel": kernel + self.alpha / self.rank * product.reshape(kernel.shape)}


class LowRank(nnx.Module):
    """y + scale * (x down) up."""

    def __init__(self, down: jax.Array, up: jax.Array, ins: tuple, outs: tuple, equations: Any, scale: float):
        self.down, self.up = nnx.Param(down, axes=(*ins, None)), nnx.Param(up, axes=(None, *outs))
        self.equations, self.scale = equations, scale

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        down, up = self.down[...], self.up[...]
        if self.equations is None:
            return y + self.scale * (x @ down.astype(x.dtype) @ up.astype(x.dtype))
        of_down, of_up = self.equations
        return y + self.scale * project(project(x, down, of_down), up, of_up)
