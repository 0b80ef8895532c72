"""Dropout with a mask shared along one axis, as T5 does along the length to save random bits and memory."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None, broadcast_axis: int = -2) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate); does nothing without a key.

    The same mask is used for every index of `broadcast_axis` (T5 code base; not in the paper's text).
    """
    if key is None or rate == 0.0:
        return x
    shape = list(x.shape)
    shape[broadcast_axis] = 1
    keep = jax.random.bernoulli(key, 1.0 - rate, shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
