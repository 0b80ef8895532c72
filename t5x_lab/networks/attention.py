"""Multi-head attention with a key-value cache that computes each token once.

Axis letters: B batch, T new tokens, S cache slots or key length, D embed, N heads, H head size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.networks.layers import Projection, fan_in_normal
from t5x_lab.ops.attention import DiagonalBias, Mask, dot_product_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values [B, S, N, H] of one layer, or [layers, B, S, N, H] of a stack; a cache when written to."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValues", offset_B: jax.Array | None) -> "KeyValues":
        """Puts `new` [B, T, N, H] at slots offset … offset+T-1 of each row; at the first slots without an offset."""
        if offset_B is None:
            offset_B = jnp.zeros((self.key.shape[0],), jnp.int32)
        put = jax.vmap(lambda slots, x, start: jax.lax.dynamic_update_slice_in_dim(slots, x, start, axis=0))
        return jax.tree.map(lambda slots, x: put(slots, x.astype(slots.dtype), offset_B), self, new)


class MultiHeadAttention(nnx.Module):
    """Query, key, value and output projections around `dot_product_attention`."""

    def __init__(self, emb_dim: int, num_heads: int, head_dim: int, dropout_rate: float, *, rngs: nnx.Rngs):
        shape, axes = (emb_dim, num_heads, head_dim), ("embed", "heads", "kv")

        def project(scale):
            return Projection(fan_in_normal(rngs.params(), shape, emb_dim, scale), axes, "BTD,DNH->BTNH")

        # T5 folds the 1/sqrt(H) of scaled attention into the query's initialisation.
        self.query, self.key, self.value = project(head_dim**-0.5), project(1.0), project(1.0)
        out = fan_in_normal(rngs.params(), (num_heads, head_dim, emb_dim), num_heads * head_dim)
        self.out = Projection(out, ("heads", "kv", "embed"), "BTNH,NHD->BTD")
        self.dropout_rate = dropout_rate

    def keys_values(self, x_BSD: jax.Array) -> KeyValues:
        return KeyValues(self.key(x_BSD), self.value(x_BSD))

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_values: KeyValues,
        *,
        mask: Mask,
        bias: DiagonalBias | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        attended_BTNH = dot_product_attention(
            self.query(x_BTD),
            keys_values.key.astype(x_BTD.dtype),
            keys_values.value.astype(x_BTD.dtype),
            mask=mask,
            bias=bias,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )
        return self.out(attended_BTNH)


def empty_cache(num_layers: int, batch: int, slots: int, num_heads: int, head_dim: int, dtype) -> KeyValues:
    """A stack's cache of zeros, [layers, B, S, N, H]."""
    zeros = jnp.zeros((num_layers, batch, slots, num_heads, head_dim), dtype)
    return KeyValues(zeros, zeros)
