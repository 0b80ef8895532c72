"""Multi-head attention.

Axis letters: B batch, T query length, S key length, D embed, N heads, K heads of keys and values, H head size.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from t5x_lab.networks.cache import KeyValues
from t5x_lab.networks.config import TransformerShape
from t5x_lab.networks.layers import Projection, RMSNorm, kernel, normal
from t5x_lab.networks.rotary import Rotation
from t5x_lab.ops.attention import dot_product_attention, merged_attention
from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.masks import Mask
from t5x_lab.ops.shards import shards_of


class MultiHeadAttention(nnx.Module):
    """Multi-head attention. The mesh axes `tensor` and `sequence` shard the heads; in projections `sequence` shards texts.

    Args:
      config: sizes and variants.
      source_dim: width of what keys and values are made of, which is the encoder's in cross-attention. None = config.emb_dim.
      constrain: see `Transformer`.
      rngs: random number generators with a `params` stream.
    """

    def __init__(self, config: TransformerShape, source_dim: int | None = None, *, constrain: Callable, rngs: nnx.Rngs):
        c = config

        def project(width: int, heads: int, name: str, fan_in: int) -> Projection:
            matrix = kernel(c, rngs, (width, heads, c.head_dim), width, normal, fan_in)
            return Projection(matrix, ("embed", name, "kv"), "BTD,DNH->BTNH", (name, "kv") if c.has_bias("qkv") else ())

        # T5 includes the factor 1/sqrt(H) of scaled attention in the initialization of the query.
        self.query = project(c.emb_dim, c.num_heads, "heads", c.emb_dim * c.head_dim)
        kv_heads = "heads" if c.num_kv_heads is None else "kv_heads"
        source = source_dim or c.emb_dim
        self.key, self.value = (project(source, c.kv_heads, kv_heads, source) for _ in range(2))
        out = kernel(c, rngs, (c.num_heads, c.head_dim, c.emb_dim), c.num_heads * c.head_dim, normal)
        self.out = Projection(out, ("heads", "kv", "embed"), "BTNH,NHD->BTD", ("embed",) if c.has_bias("out") else ())
        if c.qk_norm:
            self.query_norm, self.key_norm = (
                _head_norm(c, *heads) for heads in ((c.num_heads, "heads"), (c.kv_heads, kv_heads))
            )
        self.qk_norm, self.dropout_rate = c.qk_norm, c.dropout_rate
        self.constrain, self.kv_heads = constrain, kv_heads
        self.logit_cap = c.attention_logit_cap
        is_scaled = c.scaling == "standard" or c.scale_attn_logits
        self.query_scale = (c.query_pre_attn_scalar or c.head_dim) ** -0.5 if is_scaled else 1.0

    def keys_values(self, x_BSD: jax.Array, rotation: Rotation | None = None) -> KeyValues:
        """Returns keys and values [B, S, K, H] of x, with rotated keys if there is a rotation."""
        key = self._project(self.key, x_BSD, self.kv_heads)
        key = self.key_norm(key) if self.qk_norm else key
        key = key if rotation is None else rotation(key)
        value = self._project(self.value, x_BSD, self.kv_heads)
        return KeyValues(self._shard_and_name(key, self.kv_heads), self._shard_and_name(value, self.kv_heads))

    def _project(self, projection: Projection, x: jax.Array, heads: str) -> jax.Array:
        return self.constrain(projection(x), ("batch", "part", heads, None))

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
        rotation: Rotation | None = None,
        memory: tuple[KeyValues, Mask, DiagonalBias | None] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the output [B, T, D]. Queries attend to `keys_values`, and to those of `memory` in the same softmax."""
        query_BTNH = self._project(self.query, x_BTD, "heads")
        query_BTNH = self.query_norm(query_BTNH) if self.qk_norm else query_BTNH
        query_BTNH = query_BTNH * self.query_scale
        query_BTNH = query_BTNH if rotation is None else rotation(query_BTNH)
        query_BTNH = self._shard_and_name(query_BTNH, "heads")
        options: dict[str, Any] = dict(
            dropout_rate=self.dropout_rate, dropout_key=dropout_key, logit_cap=self.logit_cap, shards=shards_of(self.constrain)
        )
        as_input = lambda x: x.astype(x_BTD.dtype)
        key, value = as_input(keys_values.key), as_input(keys_values.value)
        if memory is None:
            attended_BTNH = dot_product_attention(query_BTNH, key, value, mask=mask, bias=bias, **options)
        else:
            others, *other_mask_and_bias = memory
            sources = [(key, value, mask, bias), (as_input(others.key), as_input(others.value), *other_mask_and_bias)]
            attended_BTNH = merged_attention(query_BTNH, sources, **options)
        # Shards the gradient by heads; sharded by length, as the output is, every device would compute all heads.
        attended_BTNH = self.constrain(attended_BTNH, ("batch", None, "heads", None))
        return self.out(self.constrain(attended_BTNH, ("batch", "part", "heads", None)))


def _head_norm(c: TransformerShape, heads: int, name: str) -> RMSNorm:
    if c.qk_norm == "all_heads":
        return RMSNorm((heads, c.head_dim), c.norm_epsilon, (name, "kv"))
    return RMSNorm((c.head_dim,), c.norm_epsilon, ("kv",))
