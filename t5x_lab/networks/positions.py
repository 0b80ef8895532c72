"""Positions and their encodings: T5's relative biases and sinusoidal embeddings.

Axis letters: B batch, T length, D embed.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from t5x_lab.networks.rotary import angular_rates
from t5x_lab.ops.biases import DiagonalBias


def relative_position_bucket(
    distance: np.ndarray, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> np.ndarray:
    """Returns the bucket of each distance, key position - query position. Half of the buckets are exact, half logarithmic.

    Unidirectional buckets map all keys to the right to bucket 0. Bidirectional ones use the upper half for keys to the right.
    Distances from `max_distance` on share the last bucket (Raffel et al. 2020, section 2.1).
    """
    lag = -distance
    bucket = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        bucket += (lag < 0) * num_buckets
        lag = np.abs(lag)
    else:
        lag = np.maximum(lag, 0)
    exact = num_buckets // 2
    # Float32 with T5's epsilon, so that boundary distances have the same bucket as in T5.
    ratio = lag.astype(np.float32) / exact + np.finfo(np.float32).eps
    logarithmic = exact + (np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    return bucket + np.where(lag < exact, lag, np.minimum(logarithmic, num_buckets - 1))


class RelativeBias(nnx.Module):
    """T5's relative position bias: one scalar per head and bucket of distances (Raffel et al. 2020, section 2.1)."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int, *, rngs: nnx.Rngs):
        limit = np.sqrt(6.0 / (num_heads + num_buckets))  # variance scaling, fan average, uniform
        table = jax.random.uniform(rngs.params(), (num_heads, num_buckets), minval=-limit, maxval=limit)
        self.rel_embedding = nnx.Param(table, axes=("heads", "relpos_buckets"))
        self.num_buckets, self.max_distance = num_buckets, max_distance

    def __call__(self, span: int, key_length: int, *, bidirectional: bool) -> DiagonalBias:
        """Returns the bias of query positions 0 to span - 1 and key positions 0 to key_length - 1.

        Positions are those of tokens, or of blocks of tokens.
        """
        distance = np.arange(span + key_length - 1) - (span - 1)
        buckets = relative_position_bucket(distance, bidirectional, self.num_buckets, self.max_distance)
        return DiagonalBias(self.rel_embedding[...][:, buckets], span)


def positions_from_end(segments_BT: jax.Array) -> jax.Array:
    """Returns the position of each token relative to the end of its segment, int [B, T]: -1 for the last token."""
    T = segments_BT.shape[1]
    is_last = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(is_last, jnp.arange(1, T + 1), T), axis=1, reverse=True)
    return jnp.arange(T)[None] - ends


def sinusoidal(positions_BT: jax.Array, emb_dim: int) -> jax.Array:
    """Returns sinusoidal embeddings, float32 [B, T, D]: sines in even columns, cosines in odd ones (Vaswani et al. 2017)."""
    angle = positions_BT[:, :, None].astype(jnp.float32) * angular_rates(emb_dim)[None, None]
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions_BT.shape, emb_dim)
