"""Multi-head attention with a key-value cache that computes each token once.

Axis letters: B batch, T new tokens, S cache slots or key length, D embed, N heads, K heads of keys and values, H head size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.config import TransformerShape
from t5x_lab.networks.layers import Projection, RMSNorm, kernel, normal
from t5x_lab.networks.positions import angular_rates, rotate
from t5x_lab.ops.attention import DiagonalBias, Mask, dot_product_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer, [B, S, K, H], or of a stack, [layers, B, S, K, H]."""

    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Key-value cache of one layer, [B, K, S, H]. Heads come before slots, which is the layout that attention reads."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def filled(cls, keys_values: KeyValues, slots: int) -> "Cache":
        """Returns a cache of `slots` slots that starts with these keys and values."""
        padding = [(0, 0), (0, 0), (0, slots - keys_values.key.shape[1]), (0, 0)]
        padded = jax.tree.map(lambda x: jnp.pad(jnp.swapaxes(x, 1, 2), padding), keys_values)
        return cls(padded.key, padded.value)

    @property
    def keys_values(self) -> KeyValues:
        return KeyValues(jnp.swapaxes(self.key, 1, 2), jnp.swapaxes(self.value, 1, 2))

    def write(self, new: KeyValues, offset_B: jax.Array) -> "Cache":
        """Writes `new` [B, T, K, H] to slots offset to offset + T - 1 of each row."""
        update = jax.vmap(lambda slots, x, start: jax.lax.dynamic_update_slice_in_dim(slots, x, start, axis=1))
        write = lambda slots, x: update(slots, jnp.swapaxes(x, 1, 2).astype(slots.dtype), offset_B)
        return Cache(write(self.key, new.key), write(self.value, new.value))


class MultiHeadAttention(nnx.Module):
    """Multi-head attention. The mesh axis `tensor` shards the heads; the sequence is not sharded here."""

    def __init__(self, config: TransformerShape, *, constrain: Callable, rngs: nnx.Rngs):
        c = config

        def project(heads: int, name: str, fan_in: int) -> Projection:
            matrix = kernel(c, rngs, (c.emb_dim, heads, c.head_dim), c.emb_dim, normal, fan_in)
            return Projection(matrix, ("embed", name, "kv"), "BTD,DNH->BTNH", (name, "kv") if c.has_bias("qkv") else ())

        # T5 includes the factor 1/sqrt(H) of scaled attention in the initialization of the query.
        self.query = project(c.num_heads, "heads", c.emb_dim * c.head_dim)
        kv_heads = "heads" if c.num_kv_heads is None else "kv_heads"
        self.key, self.value = project(c.kv_heads, kv_heads, c.emb_dim), project(c.kv_heads, kv_heads, c.emb_dim)
        out = kernel(c, rngs, (c.num_heads, c.head_dim, c.emb_dim), c.num_heads * c.head_dim, normal)
        self.out = Projection(out, ("heads", "kv", "embed"), "BTNH,NHD->BTD", ("embed",) if c.has_bias("out") else ())
        if c.qk_norm:
            self.query_norm, self.key_norm = (RMSNorm(c.head_dim, c.norm_epsilon, "kv") for _ in range(2))
        self.qk_norm, self.dropout_rate = c.qk_norm, c.dropout_rate
        self.constrain, self.kv_heads = constrain, kv_heads
        self.logit_cap = c.attention_logit_cap
        self.rotary = (c.rotary_theta, c.rotary_scaling)
        self.query_scale = 1.0 if c.scaling == "t5" else (c.query_pre_attn_scalar or c.head_dim) ** -0.5

    def keys_values(self, x_BSD: jax.Array, positions: jax.Array | None = None) -> KeyValues:
        """Returns keys and values [B, S, K, H] of x, with keys rotated by `positions` [B, S] if given."""
        key = self.key_norm(self.key(x_BSD)) if self.qk_norm else self.key(x_BSD)
        key = key if positions is None else self._rotate(key, positions)
        return KeyValues(self._shard_and_name(key, self.kv_heads), self._shard_and_name(self.value(x_BSD), self.kv_heads))

    def _rotate(self, x_BTNH: jax.Array, positions: jax.Array) -> jax.Array:
        _, scaling = self.rotary
        factor = scaling.attention_factor if scaling else 1.0
        return rotate(x_BTNH, positions, angular_rates(x_BTNH.shape[-1], *self.rotary), factor)

    def _shard_and_name(self, x: jax.Array, heads: str) -> jax.Array:
        """Shards an activation and names it for remat policies."""
        return checkpoint_name(self.constrain(x, ("batch", None, heads, None)), "heads")

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_values: KeyValues,
        *,
        mask: Mask,
        bias: DiagonalBias | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        query_BTNH = self.query_norm(self.query(x_BTD)) if self.qk_norm else self.query(x_BTD)
        query_BTNH = query_BTNH * self.query_scale
        query_BTNH = query_BTNH if positions is None else self._rotate(query_BTNH, positions)
        attended_BTNH = dot_product_attention(
            self._shard_and_name(query_BTNH, "heads"),
            keys_values.key.astype(x_BTD.dtype),
            keys_values.value.astype(x_BTD.dtype),
            mask=mask,
            bias=bias,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            logit_cap=self.logit_cap,
        )
        # Shards the gradient by heads; sharded by length, as the output is, every device would compute all heads.
        return self.out(self.constrain(attended_BTNH, ("batch", None, "heads", None)))
