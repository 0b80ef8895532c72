"""Multi-head attention with a key-value cache that computes each token once.

Axis letters: B batch, T new tokens, S cache slots or key length, D embed, N heads, K heads of keys and values, H head size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.config import TransformerConfig
from t5x_lab.networks.layers import Projection, normal
from t5x_lab.networks.positions import rotate
from t5x_lab.ops.attention import DiagonalBias, Mask, dot_product_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values [B, S, K, H] of one layer, as projections give them; or [layers, B, S, K, H] of a stack."""

    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values [B, K, S, H] of one layer, kept while decoding: heads stand first, as attention's products read them."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def holding(cls, keys_values: KeyValues, slots: int) -> "Cache":
        """A cache with so many slots, the first of which hold these."""
        room = [(0, 0), (0, 0), (0, slots - keys_values.key.shape[1]), (0, 0)]
        laid = jax.tree.map(lambda x: jnp.pad(jnp.swapaxes(x, 1, 2), room), keys_values)
        return cls(laid.key, laid.value)

    @property
    def keys_values(self) -> KeyValues:
        return KeyValues(jnp.swapaxes(self.key, 1, 2), jnp.swapaxes(self.value, 1, 2))

    def write(self, new: KeyValues, offset_B: jax.Array) -> "Cache":
        """Puts `new` [B, T, K, H] at slots offset … offset+T-1 of each row."""
        put = jax.vmap(lambda slots, x, start: jax.lax.dynamic_update_slice_in_dim(slots, x, start, axis=1))
        into = lambda slots, x: put(slots, jnp.swapaxes(x, 1, 2).astype(slots.dtype), offset_B)
        return Cache(into(self.key, new.key), into(self.value, new.value))


class MultiHeadAttention(nnx.Module):
    """Query, key, value and output projections around `dot_product_attention`.

    Sequences are whole in here: where there is a `tensor` axis, it splits the heads.
    """

    def __init__(self, config: TransformerConfig, *, constrain: Callable, rngs: nnx.Rngs):
        c = config

        def project(heads: int, name: str, fan_in: int) -> Projection:
            kernel = normal(rngs.params(), (c.emb_dim, heads, c.head_dim), c.scaling, fan_in)
            return Projection(kernel, ("embed", name, "kv"), "BTD,DNH->BTNH", (name, "kv") if c.use_bias else ())

        # T5 folds the 1/sqrt(H) of scaled attention into the query's initialisation.
        self.query = project(c.num_heads, "heads", c.emb_dim * c.head_dim)
        kv_heads = "heads" if c.num_kv_heads is None else "kv_heads"
        self.key, self.value = project(c.kv_heads, kv_heads, c.emb_dim), project(c.kv_heads, kv_heads, c.emb_dim)
        out = normal(rngs.params(), (c.num_heads, c.head_dim, c.emb_dim), c.scaling, c.num_heads * c.head_dim)
        self.out = Projection(out, ("heads", "kv", "embed"), "BTNH,NHD->BTD", ("embed",) if c.use_bias else ())
        self.dropout_rate = c.dropout_rate
        self.constrain, self.kv_heads = constrain, kv_heads
        self.query_scale = 1.0 if c.scaling == "t5" else c.head_dim**-0.5

    def keys_values(self, x_BSD: jax.Array, positions: jax.Array | None = None) -> KeyValues:
        """Keys and values [B, S, K, H]; keys turned by `positions` [B, S] where they are given (rotary)."""
        key = self.key(x_BSD)
        key = key if positions is None else rotate(key, positions)
        return KeyValues(self._keep(key, self.kv_heads), self._keep(self.value(x_BSD), self.kv_heads))

    def _keep(self, x: jax.Array, heads: str) -> jax.Array:
        return checkpoint_name(self.constrain(x, ("batch", "whole_length", heads, "kv")), "heads")

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
        query_BTNH = self.query(x_BTD) * self.query_scale
        query_BTNH = query_BTNH if positions is None else rotate(query_BTNH, positions)
        attended_BTNH = dot_product_attention(
            self._keep(query_BTNH, "heads"),
            keys_values.key.astype(x_BTD.dtype),
            keys_values.value.astype(x_BTD.dtype),
            mask=mask,
            bias=bias,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )
        return self.out(attended_BTNH)
