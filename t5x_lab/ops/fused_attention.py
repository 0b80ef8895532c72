"""Attention by fused kernels, with memory that is linear in the length, sharded over rows and heads.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from t5x_lab.ops import attention_kernels as kernels
from t5x_lab.ops.blocks import Operands
from t5x_lab.ops.masks import Mask
from t5x_lab.ops.shards import Shards
from t5x_lab.ops.tiles import Tiling, bias_rows, from_tiles, rows_from_tiles, rows_to_tiles, to_tiles, token_codes


def fused_attention(
    operands: Operands,
    mask: Mask,
    logit_cap: float | None = None,
    shards: Shards | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention with softmax in float32 and without a scale, see `ops.attention.dot_product_attention`.

    Args:
      operands: queries, keys, values, and a bias or None.
      mask: a mask of one kind of layer, without a query offset and positions of keys.
      logit_cap: c replaces logits x by c * tanh(x / c) before the bias is added. None = no cap.
      shards: sharding of rows, "batch", and of heads, "heads" and "kv_heads". None = one device.

    Returns:
      The attended values [B, T, N, H] in the dtype of the values, and the logarithms of the sums of the exponentials of the
      logits, float [B, T, N].
    """
    tiling = Tiling.make(operands, mask, logit_cap)
    attend = functools.partial(kernels.attend, tiling)
    attended, log_sums = _on_shards(attend, _inputs(tiling, operands, mask, shards), ("query", "log_sums"), shards)
    return from_tiles(attended, tiling.T), rows_from_tiles(log_sums, tiling.T)


def fused_gradients(
    operands: Operands,
    mask: Mask,
    results: tuple[jax.Array, jax.Array],
    d_results: tuple[jax.Array, jax.Array],
    logit_cap: float | None = None,
    shards: Shards | None = None,
) -> Operands:
    """Returns the gradients of the operands of `fused_attention`.

    Args:
      operands, mask, logit_cap, shards: see `fused_attention`.
      results: its results.
      d_results: their gradients.
    """
    tiling = Tiling.make(operands, mask, logit_cap)
    (attended, log_sums), (d_attended, d_log_sums) = results, d_results
    means_BTN = jnp.sum(d_attended.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1) - d_log_sums
    inputs = _inputs(tiling, operands, mask, shards) | {
        "d_attended": to_tiles(d_attended, tiling.size),
        "log_sums": rows_to_tiles(log_sums, tiling.size),
        "means": rows_to_tiles(means_BTN, tiling.size),
    }
    outputs = ("query", "d_bias") if "bias" in inputs else ("query",)
    d_query, *d_bias_rows = _on_shards(functools.partial(kernels.query_gradients, tiling), inputs, outputs, shards)
    of_keys = functools.partial(kernels.key_gradients, tiling)
    parts = _on_shards(of_keys, inputs, ("query", "query"), shards)
    d_key, d_value = (_sum_of_heads(part, like) for part, like in zip(parts, (operands.key, operands.value)))
    d_bias = None
    if operands.bias is not None:
        rows, transpose = jax.vjp(lambda bias: bias_rows(tiling, bias), operands.bias)
        (d_bias,) = transpose(jnp.sum(d_bias_rows[0], axis=0).reshape(rows.shape))
    return Operands(from_tiles(d_query, tiling.T), from_tiles(d_key, tiling.S), from_tiles(d_value, tiling.S), d_bias)


def _sum_of_heads(x_BNHS: jax.Array, like_BSKH: jax.Array) -> jax.Array:
    """Returns the sums over the query heads of each head of keys and values, in the dtype of those."""
    B, N, H, S = x_BNHS.shape
    K = like_BSKH.shape[2]
    return x_BNHS if K == N else jnp.sum(x_BNHS.reshape(B, K, N // K, H, S), axis=2).astype(like_BSKH.dtype)


def _inputs(tiling: Tiling, operands: Operands, mask: Mask, shards: Shards | None) -> dict[str, jax.Array]:
    query, key, value, bias = operands
    N, K = query.shape[2], key.shape[2]
    if shards is not None and shards.entry("heads", N) != shards.entry("kv_heads", K):
        # A device with a part of the query heads needs their heads of keys and values.
        key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    inputs = {name: to_tiles(x, tiling.size) for name, x in (("query", query), ("key", key), ("value", value))}
    has_codes = mask.key_segments is not None or tiling.has_prefix
    optional = {
        "query_codes": token_codes(mask.query_segments, mask.query_prefix, tiling.size) if has_codes else None,
        "key_codes": token_codes(mask.key_segments, mask.key_prefix, tiling.size) if has_codes else None,
        "bias": None if bias is None else bias_rows(tiling, bias),
    }
    return inputs | {name: x for name, x in optional.items() if x is not None}


def _on_shards(
    function: Callable[[dict[str, jax.Array]], Sequence[jax.Array]],
    inputs: dict[str, jax.Array],
    outputs: Sequence[str],
    shards: Shards | None,
) -> Sequence[jax.Array]:
    """Calls a kernel on each shard of rows and heads.

    Args:
      function: function of arrays by name.
      inputs: the arrays.
      outputs: names of arrays with the axes of the results.
      shards: see `fused_attention`.
    """
    if shards is None:
        return function(inputs)
    group = inputs["query"].shape[1] // inputs["key"].shape[1]
    keys = ("batch", "heads" if group == 1 else "kv_heads", None, None)
    rows = ("batch", None, None, None)
    axes: dict[str, tuple] = {
        "key": keys,
        "value": keys,
        "query_codes": rows,
        "key_codes": rows,
        "bias": ("heads", None, None, None),
    }
    axes |= {name: ("batch", "heads", None, None) for name in ("query", "d_attended", "d_bias")}
    axes |= {name: ("batch", "heads", None, None, None) for name in ("log_sums", "means")}
    call = lambda *arrays: tuple(function(dict(zip(inputs, arrays))))
    mapped = shards.map(call, [axes[name] for name in inputs], [axes[name] for name in outputs])
    return mapped(*inputs.values())
