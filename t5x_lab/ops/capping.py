"""Soft capping of logits."""

import jax
import jax.numpy as jnp


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Returns cap * tanh(logits / cap) (Bello et al. 2017); the logits if cap is None."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
