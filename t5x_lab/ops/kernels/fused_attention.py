"""Attention by fused kernels, with memory that is linear in the length, sharded over rows and heads.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, H head size.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from t5x_lab.ops.blocks import Operands
from t5x_lab.ops.kernels import gpu, tpu
from t5x_lab.ops.kernels.tiling import Tiling
from t5x_lab.ops.masks import Mask
from t5x_lab.ops.platform import current_target
from t5x_lab.ops.shards import Shards


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
    kernels = _kernels()
    tiling = Tiling.make(operands, mask, logit_cap, kernels.SIZES)
    attend = functools.partial(kernels.attend, tiling)
    inputs = _inputs(kernels, tiling, operands, mask, shards)
    attended, log_sums = _on_shards(kernels, attend, inputs, ("query", "log_sums"), shards)
    return kernels.restore(attended, tiling.T), kernels.restore_rows(log_sums, tiling.T)


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
    kernels = _kernels()
    tiling = Tiling.make(operands, mask, logit_cap, kernels.SIZES)
    (attended, log_sums), (d_attended, d_log_sums) = results, d_results
    means_BTN = jnp.sum(d_attended.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1) - d_log_sums
    inputs = _inputs(kernels, tiling, operands, mask, shards) | {
        "d_attended": kernels.lay_out(d_attended, tiling.size),
        "log_sums": kernels.lay_out_rows(log_sums, tiling.size),
        "means": kernels.lay_out_rows(means_BTN, tiling.size),
    }
    outputs = ("query", *kernels.KEY_GRADIENTS, *(("d_bias",) if "bias" in inputs else ()))
    gradients = functools.partial(kernels.gradients, tiling)
    d_query, d_key, d_value, *d_bias_parts = _on_shards(kernels, gradients, inputs, outputs, shards)
    d_bias = None
    if operands.bias is not None:
        _, transpose = jax.vjp(functools.partial(kernels.lay_out_bias, tiling), operands.bias)
        (d_bias,) = transpose(jnp.sum(d_bias_parts[0], axis=0))
    return Operands(
        kernels.restore(d_query, tiling.T),
        _sum_of_heads(kernels.restore(d_key, tiling.S), operands.key),
        _sum_of_heads(kernels.restore(d_value, tiling.S), operands.value),
        d_bias,
    )


def _kernels() -> ModuleType:
    return tpu if current_target().platform == "tpu" else gpu


def _sum_of_heads(x_BSNH: jax.Array, like_BSKH: jax.Array) -> jax.Array:
    """Returns the sums over the heads that share each head of keys and values, in the dtype of those."""
    B, S, N, H = x_BSNH.shape
    K = like_BSKH.shape[2]
    return x_BSNH if K == N else jnp.sum(x_BSNH.reshape(B, S, K, N // K, H), axis=3, dtype=jnp.float32).astype(like_BSKH.dtype)


def _inputs(kernels: ModuleType, tiling: Tiling, operands: Operands, mask: Mask, shards: Shards | None) -> dict[str, jax.Array]:
    query, key, value, bias = operands
    N, K = query.shape[2], key.shape[2]
    if shards is not None and shards.entry("heads", N) != shards.entry("kv_heads", K):
        # A device with a part of the query heads needs their heads of keys and values.
        key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    inputs = {name: kernels.lay_out(x, tiling.size) for name, x in (("query", query), ("key", key), ("value", value))}
    codes = {
        "query_codes": _token_codes(mask.query_segments, mask.query_prefix),
        "key_codes": _token_codes(mask.key_segments, mask.key_prefix),
    }
    if mask.key_segments is not None or tiling.has_prefix:
        inputs |= {name: kernels.lay_out_codes(x, tiling.size) for name, x in codes.items() if x is not None}
    return inputs if bias is None else inputs | {"bias": kernels.lay_out_bias(tiling, bias)}


def _token_codes(segments: jax.Array | None, prefix: jax.Array | None) -> jax.Array | None:
    """Returns 2 * segment + is in the prefix, int [B, length]; None without both. Without segments, all are in segment 1."""
    if segments is None and prefix is None:
        return None
    segments = jnp.ones_like(prefix, jnp.int32) if segments is None else segments  # type: ignore[arg-type]
    return 2 * segments if prefix is None else 2 * segments + prefix


def _on_shards(
    kernels: ModuleType,
    function: Callable[[dict[str, jax.Array]], Sequence[jax.Array]],
    inputs: dict[str, jax.Array],
    outputs: Sequence[str],
    shards: Shards | None,
) -> Sequence[jax.Array]:
    """Calls kernels on each shard of rows and heads.

    Args:
      kernels: the platform's kernels.
      function: function of arrays by name.
      inputs: the arrays.
      outputs: names of arrays with the axes of the results.
      shards: see `fused_attention`.
    """
    if shards is None:
        return function(inputs)
    axes = dict(kernels.AXES)
    if inputs["query"].shape[kernels.HEADS] == inputs["key"].shape[kernels.HEADS]:
        axes |= {name: axes["query"] for name in ("key", "value")}
    call = lambda *arrays: tuple(function(dict(zip(inputs, arrays))))
    mapped = shards.map(call, [axes[name] for name in inputs], [axes[name] for name in outputs])
    return mapped(*inputs.values())
