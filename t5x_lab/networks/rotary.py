"""Rotary positions: queries and keys are rotated by angles that grow with the position (Su et al. 2021).

Axis letters: B batch, T length, N heads, H head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary positions for longer contexts.

    Attributes:
      factor: factor of the wavelengths.
      kind: "linear" scales all wavelengths (Chen et al. 2023); "llama3" those longer than original_length / low_freq_factor
        (Grattafiori et al. 2024); "yarn" too, interpolated over dimensions (Peng et al. 2023). These are the names in
        transformers.
      low_freq_factor, high_freq_factor: wavelengths shorter than original_length / high_freq_factor are not scaled; between the
        two limits the factor is interpolated. YaRN calls them beta_slow and beta_fast.
      original_length: context length of the original training, in tokens.
      attention_factor: factor of rotated queries and keys, for "yarn".
    """

    factor: float
    kind: str = "llama3"
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    attention_factor: float = 1.0

    def __post_init__(self):
        check_types(self)
        check_choice("RotaryScaling.kind", self.kind, ("linear", "llama3", "yarn"))
        check_positive(self, "factor", "low_freq_factor", "original_length", "attention_factor")
        if not self.high_freq_factor > self.low_freq_factor:
            raise UserError(
                f"RotaryScaling.high_freq_factor is {self.high_freq_factor}. It must exceed low_freq_factor, which is "
                f"{self.low_freq_factor}."
            )


def angular_rates(size: int, theta: float = 10_000.0, scaling: RotaryScaling | None = None) -> np.ndarray:
    """Returns the radians per position of each pair of dimensions, theta**(-2 * pair / size), scaled; float64 [size / 2]."""
    half = size // 2
    rate = theta ** (-np.arange(half) / half)
    if scaling is None:
        return rate
    if scaling.kind == "linear":
        return rate / scaling.factor
    if scaling.kind == "yarn":
        # The pair of dimensions that makes so many rotations within the original length.
        pair = lambda rotations: half * np.log(scaling.original_length / (rotations * 2 * np.pi)) / np.log(theta)
        low = max(np.floor(pair(scaling.high_freq_factor)), 0)
        high = min(np.ceil(pair(scaling.low_freq_factor)), size - 1)
        weight = 1 - np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return weight * rate + (1 - weight) * rate / scaling.factor
    rotations = scaling.original_length * rate / (2 * np.pi)  # full rotations within the original length
    weight = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    weight = np.clip(weight, 0.0, 1.0)
    return weight * rate + (1 - weight) * rate / scaling.factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Rotation of queries and keys by their positions.

    Attributes:
      positions: int [B or 1, T].
      rates: radians per position of each pair of dimensions, float [H / 2].
      factor: factor of the result, see `RotaryScaling.attention_factor`.
    """

    positions: jax.Array
    rates: np.ndarray | jax.Array
    factor: float | jax.Array = 1.0

    def __call__(self, x_BTNH: jax.Array) -> jax.Array:
        """Rotates the pair (h, h + H/2) of each head by position * rate[h], in float32 (pairs as in Llama)."""
        angle = self.positions[:, :, None, None].astype(jnp.float32) * self.rates[None, None, None]
        first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.factor * jnp.cos(angle), self.factor * jnp.sin(angle)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
