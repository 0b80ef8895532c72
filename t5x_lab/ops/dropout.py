"""Dropout with a mask that is shared along one axis, as in T5, which saves random bits and memory."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None, broadcast_axis: int = -2) -> jax.Array:
    """Sets entries to zero with probability `rate` and scales the rest by 1 / (1 - rate). Returns x if there is no key.

    All indices of `broadcast_axis` share a mask, as in T5's code (not mentioned in the paper).
    """
    if key is None or rate == 0.0:
        return x
    shape = list(x.shape)
    shape[broadcast_axis] = 1
    return drop(x, jax.random.bernoulli(key, 1.0 - rate, shape), rate)


def drop(x: jax.Array, keep: jax.Array, rate: float) -> jax.Array:
    """Sets entries of x to zero where `keep` is False and scales the rest by 1 / (1 - rate)."""
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
