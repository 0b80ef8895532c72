"""Low-rank adaptation of kernels (Hu et al. 2021, LoRA).

Axis letters: R rank; others as in the kernel's equation.
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
class Lora:
    """LoRA: adds alpha / rank * (x down) up to the output of a projection. `up` starts at zero, so the output is unchanged.

    Attributes:
      modules: regular expression of the projections to attach to. The default is the paper's, queries and values.
      rank: R.
      alpha: numerator of the scale.
    """

    modules: str = r".*attention/(query|value)"
    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self):
        check_types(self)
        check_positive(self, "rank")

    def make(self, module: Any, rngs: nnx.Rngs) -> "LowRank":
        """Makes the low-rank module of a projection. See `PeftMethod.make`.

        Raises:
          UserError: if the module has no `kernel`, or has a kernel of more than two dimensions and no `equation`.
        """
        kernel = getattr(module, "kernel", None)
        if kernel is None:
            raise UserError("the module has no kernel. Set Lora.modules to modules that have one.")
        shape, axes = kernel.get_value().shape, kernel.get_metadata("axes", None) or (None,) * kernel.get_value().ndim
        equation = getattr(module, "equation", "BD,DF->BF" if len(shape) == 2 else None)
        if equation is None:
            raise UserError(f"its kernel has shape {shape}, and the module has no `equation` that tells which axes are inputs.")
        x, letters, y = equation.replace("->", ",").split(",")
        num_inputs = sum(letter not in y for letter in letters)
        if any(letter in y for letter in letters[:num_inputs]):
            raise UserError(f"in its equation {equation} the inputs are not the first axes of the kernel.")
        down = jax.random.uniform(rngs.params(), (*shape[:num_inputs], self.rank), minval=-1.0) / math.sqrt(
            math.prod(shape[:num_inputs])
        )
        batch = x.replace(letters[:num_inputs], "") if hasattr(module, "equation") else None
        equations = batch and (f"{x},{letters[:num_inputs]}R->{batch}R", f"{batch}R,R{letters[num_inputs:]}->{y}")
        up = jnp.zeros((self.rank, *shape[num_inputs:]))
        return LowRank(down, up, axes[:num_inputs], axes[num_inputs:], equations, self.alpha / self.rank)

    def merge(self, base: dict, peft: dict) -> dict:
        """Returns the projection's parameters with the low-rank product added to the kernel, in a stack for every layer."""
        kernel, down, up = base["kernel"], peft["down"], peft["up"]
        layers = kernel.shape[: down.ndim + up.ndim - 2 - kernel.ndim]
        product = down.reshape(*layers, -1, self.rank) @ up.reshape(*layers, self.rank, -1)
        return {**base, "kernel": kernel + self.alpha / self.rank * product.reshape(kernel.shape)}


class LowRank(nnx.Module):
    """Computes y + scale * (x down) up."""

    def __init__(self, down: jax.Array, up: jax.Array, in_axes: tuple, out_axes: tuple, equations: Any, scale: float):
        self.down, self.up = nnx.Param(down, axes=(*in_axes, None)), nnx.Param(up, axes=(None, *out_axes))
        self.equations, self.scale = equations, scale

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        down, up = self.down[...], self.up[...]
        if self.equations is None:
            return y + self.scale * (x @ down.astype(x.dtype) @ up.astype(x.dtype))
        down_equation, up_equation = self.equations
        return y + self.scale * project(project(x, down, down_equation), up, up_equation)
