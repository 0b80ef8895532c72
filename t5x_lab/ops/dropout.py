"""Dropout with a mask that is shared along one axis, as in T5, which saves random bits and memory."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None, broadcast_axis: int = -2, size: int | None = None) -> jax.Array:
    """Sets entries to zero with probability `rate` and scales the rest by 1 / (1 - rate). Returns x if there is no key.

    All indices of `broadcast_axis` share a mask, as in T5's code (not mentioned in the paper). If x is the start of a larger
    array, `size` is the length of its last axis, so that all parts have the same mask.
    """
    if key is None or rate == 0.0:
        return x
    shape = [*x.shape[:-1], size or x.shape[-1]]
    shape[broadcast_axis] = 1
    keep = jax.random.bernoulli(key, 1.0 - rate, shape)[..., : x.shape[-1]]
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
