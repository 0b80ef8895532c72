"""Dot-product attention over masks and relative position biases in compact form: by fused kernels on TPUs and
NVIDIA GPUs, else in blocks.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, G = N / K query heads for each
of them, H head size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.blocked_attention import Weighting, blocked_attention, blocked_gradients
from t5x_lab.ops.blocks import Operands
from t5x_lab.ops.dropout import drop
from t5x_lab.ops.masks import Mask
from t5x_lab.ops.platform import current_target
from t5x_lab.ops.shards import Shards

_WITHOUT_KERNELS = ("TPU v2", "TPU v3")  # whose kernels have no products of bfloat16
_GPU_HEAD_SIZES = (16, 32, 64, 128)  # which the matrix products of kernels for GPUs take


def dot_product_attention(
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
    *,
    mask: Mask,
    bias: DiagonalBias | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    logit_cap: float | None = None,
    shards: Shards | None = None,
) -> jax.Array:
    """Attention with softmax in float32 and without a scale, which the query includes.

    Query head n attends to key and value head n // G (grouped-query attention, Ainslie et al. 2023; G = 1 is multi-head). A
    query that attends to no key (padding) returns a mean of some values; its loss weight is zero.

    No array [B, N, T, S] is stored: the backward pass computes the weights again, in fused kernels on TPUs and NVIDIA GPUs,
    else in blocks of queries. Only keys that a block or tile of queries may attend to are read: up to its last query with a
    causal mask without a prefix, and in the windows of its queries with a mask that has one, so that time and memory are then
    linear in the length.

    Args:
      query_BTNH, key_BSKH, value_BSKH: queries, keys and values.
      mask: attention mask.
      bias: added to the logits.
      dropout_rate: dropout rate of the attention weights. All queries share a mask, as in T5's code.
      dropout_key: None = no dropout.
      logit_cap: c replaces logits x by c * tanh(x / c) before the bias is added. None = no cap.
      shards: sharding of the axes "batch", "heads" and "kv_heads", without which several devices attend in blocks.

    Returns:
      Float [B, T, N, H] in the dtype of `value_BSKH`.
    """
    operands = Operands(query_BTNH, key_BSKH, value_BSKH, bias)
    weighting = Weighting(dropout_rate, logit_cap, needs_log_sums=False)
    return _attention(operands, mask, None if dropout_rate == 0.0 else dropout_key, weighting, shards)[0]


def merged_attention(
    query_BTNH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array, Mask, DiagonalBias | None]],
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    logit_cap: float | None = None,
    shards: Shards | None = None,
) -> jax.Array:
    """Attention with one softmax over the keys of several sources, such as a decoder's positions and an encoder's output.

    Each source is attended to in blocks of its own, and the results are joined by the sums of their exponentials.

    Args:
      query_BTNH: queries.
      sources: keys, values, mask and bias of each source, see `dot_product_attention`.
      dropout_rate, dropout_key, logit_cap, shards: see `dot_product_attention`.

    Returns:
      Float [B, T, N, H] in the dtype of the values.
    """
    weighting = Weighting(dropout_rate, logit_cap, needs_log_sums=True)
    has_dropout = dropout_key is not None and dropout_rate > 0.0
    keys = list(jax.random.split(dropout_key, len(sources))) if has_dropout else [None] * len(sources)  # type: ignore[arg-type]
    results = [
        _attention(Operands(query_BTNH, key, value, bias), mask, dropout_key, weighting, shards)
        for (key, value, mask, bias), dropout_key in zip(sources, keys, strict=True)
    ]
    shares = jax.nn.softmax(jnp.stack([log_sums_BTN for _, log_sums_BTN in results]), axis=0)
    joined = sum(share[..., None] * attended.astype(jnp.float32) for share, (attended, _) in zip(shares, results))
    return joined.astype(results[0][0].dtype)


# Not `jax.checkpoint`: nested in a layer under remat, it would store keys and values once per block.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(operands: Operands, mask: Mask, dropout_key: jax.Array | None, weighting: Weighting, shards: Shards | None):
    """Returns the attended values [B, T, N, H], and the logarithms of sums [B, T, N], or None if blocks do not need them."""
    keep = _kept_weights(operands, dropout_key, weighting)

    def attend(mask: Mask):
        if not _is_fused(operands, mask, shards):
            return blocked_attention(operands, mask, keep, weighting)
        from t5x_lab.ops.kernels.fused_attention import fused_attention  # other platforms need not import its compiler

        return fused_attention(_drop_values(operands, keep, weighting), mask, weighting.logit_cap, shards)

    return _switch_kinds(mask, attend)


def _forward(operands, mask, dropout_key, weighting, shards):
    results = _attention(operands, mask, dropout_key, weighting, shards)
    # Blocks compute them again, so that only kernels keep them.
    return results, (operands, mask, dropout_key, results if _is_fused(operands, mask, shards) else None)


def _backward(weighting, shards, residuals, d_results):
    operands, mask, dropout_key, results = residuals
    keep = _kept_weights(operands, dropout_key, weighting)

    def transpose(mask: Mask) -> Operands:
        if results is None:
            return blocked_gradients(operands, mask, keep, weighting, d_results)
        from t5x_lab.ops.kernels.fused_attention import fused_gradients

        dropped, transpose_dropout = jax.vjp(lambda operands: _drop_values(operands, keep, weighting), operands)
        return transpose_dropout(fused_gradients(dropped, mask, results, d_results, weighting.logit_cap, shards))[0]

    return _switch_kinds(mask, transpose), None, None


_attention.defvjp(_forward, _backward)


def _is_fused(operands: Operands, mask: Mask, shards: Shards | None) -> bool:
    """Returns whether the fused kernels attend: not for tokens after a cache or for blocks of tokens."""
    is_possible = shards is not None or jax.device_count() == 1
    return has_kernels(operands.query.dtype, operands.query.shape[-1]) and is_possible and mask.has_consecutive_positions


def has_kernels(dtype: Any, head_dim: int) -> bool:
    """Returns whether the current target has fused kernels for queries of a dtype and size: TPUs from v4 on and NVIDIA GPUs."""
    target = current_target()
    is_supported = {
        "tpu": target.kind not in _WITHOUT_KERNELS,
        "gpu": target.kind.startswith("NVIDIA") and head_dim in _GPU_HEAD_SIZES,
    }
    return is_supported.get(target.platform, False) and dtype in (jnp.float32, jnp.bfloat16)


def _switch_kinds(mask: Mask, function: Callable[[Mask], Any]) -> Any:
    """Applies a function to the mask of the layer's kind. Only this one is computed."""
    if mask.kind is None:
        return function(mask)
    return jax.lax.switch(mask.kind, [functools.partial(function, each) for each in mask.split_kinds()])


def _kept_weights(operands: Operands, dropout_key: jax.Array | None, weighting: Weighting) -> jax.Array | None:
    """Returns which attention weights dropout keeps, bool [B, N, 1, S]; None if it keeps all."""
    if dropout_key is None:
        return None
    (B, _, N, _), S = operands.query.shape, operands.key.shape[1]
    return jax.random.bernoulli(dropout_key, 1.0 - weighting.dropout_rate, (B, N, 1, S))


def _drop_values(operands: Operands, keep_BN1S: jax.Array | None, weighting: Weighting) -> Operands:
    """Returns operands whose values have the dropout of the attention weights, which all queries share."""
    if keep_BN1S is None:
        return operands
    query, key, value, bias = operands
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    keep_BSN1 = jnp.moveaxis(keep_BN1S, 3, 1).reshape(*value.shape[:3], 1)
    return Operands(query, key, drop(value, keep_BSN1, weighting.dropout_rate), bias)
