"""Logits that are bounded softly."""

import jax
import jax.numpy as jnp


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap) (Bello et al. 2017), or the logits where there is no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
