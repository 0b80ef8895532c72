"""Dot-product attention over masks and relative position biases in compact form, computed block by block.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, G = N / K query heads for each
of them, H head size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from t5x_lab.ops.biases import DiagonalBias, expand_bias
from t5x_lab.ops.blocks import Block, Masking, Operands, make_blocks, pad_axis
from t5x_lab.ops.capping import soft_cap
from t5x_lab.ops.dropout import drop
from t5x_lab.ops.masks import Mask, expand_mask

_MASKED = -1e10


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
) -> jax.Array:
    """Attention with softmax in float32 and without a scale, which the query includes.

    Query head n attends to key and value head n // G (grouped-query attention, Ainslie et al. 2023; G = 1 is multi-head). A
    query that attends to no key (padding) returns a mean of some values; its loss weight is zero.

    Queries are processed in blocks whose weights the backward pass recomputes, so that no array [B, N, T, S] is stored. A block
    reads only keys that it may attend to: up to its last query with a causal mask without a prefix, and in the windows of its
    queries with a mask that has one, so that time and memory are then linear in the length.

    Args:
      query_BTNH, key_BSKH, value_BSKH: queries, keys and values.
      mask: attention mask.
      bias: added to the logits.
      dropout_rate: dropout rate of the attention weights. All queries share a mask, as in T5's code.
      dropout_key: None = no dropout.
      logit_cap: c replaces logits x by c * tanh(x / c) before the bias is added. None = no cap.

    Returns:
      Float [B, T, N, H] in the dtype of `value_BSKH`.
    """
    operands = Operands(query_BTNH, key_BSKH, value_BSKH, bias)
    weighting = _Weighting(dropout_rate, logit_cap, has_log_sums=False)
    return _attention(operands, mask, None if dropout_rate == 0.0 else dropout_key, weighting)[0]


def merged_attention(
    query_BTNH: jax.Array,
    sources: Sequence[tuple[jax.Array, jax.Array, Mask, DiagonalBias | None]],
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """Attention with one softmax over the keys of several sources, such as a decoder's positions and an encoder's output.

    Each source is attended to in blocks of its own, and the results are joined by the sums of their exponentials.

    Args:
      query_BTNH: queries.
      sources: keys, values, mask and bias of each source, see `dot_product_attention`.
      dropout_rate, dropout_key, logit_cap: see `dot_product_attention`.

    Returns:
      Float [B, T, N, H] in the dtype of the values.
    """
    weighting = _Weighting(dropout_rate, logit_cap, has_log_sums=True)
    has_dropout = dropout_key is not None and dropout_rate > 0.0
    keys = list(jax.random.split(dropout_key, len(sources))) if has_dropout else [None] * len(sources)  # type: ignore[arg-type]
    results = [
        _attention(Operands(query_BTNH, key, value, bias), mask, dropout_key, weighting)
        for (key, value, mask, bias), dropout_key in zip(sources, keys, strict=True)
    ]
    shares = jax.nn.softmax(jnp.stack([log_sums_BTN for _, log_sums_BTN in results]), axis=0)
    joined = sum(share[..., None] * attended.astype(jnp.float32) for share, (attended, _) in zip(shares, results))
    return joined.astype(results[0][0].dtype)


class _Weighting(NamedTuple):
    """Settings of the weights, and whether the logarithms of their sums before the division are returned."""

    dropout_rate: float
    logit_cap: float | None
    has_log_sums: bool


# Not `jax.checkpoint`: nested in a layer under remat, it would store keys and values once per block.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(operands: Operands, mask: Mask, dropout_key: jax.Array | None, weighting: _Weighting):
    """Returns the attended values [B, T, N, H], and the logarithms of sums [B, T, N] or None."""
    keep = _kept_weights(operands, dropout_key, weighting)
    B, T, N, _ = operands.query.shape

    def attend(mask: Mask):
        blocks = make_blocks(mask, operands)
        padded, masking = blocks.pad(operands, Masking(mask, keep))
        attended = jnp.zeros(padded.query.shape, operands.value.dtype)
        log_sums = jnp.zeros((B, padded.query.shape[1], N), jnp.float32) if weighting.has_log_sums else None

        def attend_block(results, block: Block):
            parts = _attend(block.operands(padded), block.masking(masking), weighting, block)
            return jax.tree.map(block.write_queries, results, parts)

        return jax.tree.map(lambda x: x[:, :T], blocks.fold(attend_block, (attended, log_sums)))

    return _switch_kinds(mask, attend)


def _forward(operands, mask, dropout_key, weighting):
    return _attention(operands, mask, dropout_key, weighting), (operands, mask, dropout_key)


def _backward(weighting, residuals, d_results):
    operands, mask, dropout_key = residuals
    keep = _kept_weights(operands, dropout_key, weighting)

    def transpose(mask: Mask) -> Operands:
        blocks = make_blocks(mask, operands)
        padded, masking = blocks.pad(operands, Masking(mask, keep))
        d_padded = jax.tree.map(lambda x: pad_axis(x, 0, padded.query.shape[1] - x.shape[1], axis=1), d_results)

        def add_block(total: Operands, block: Block) -> Operands:
            inputs = block.operands(padded), jax.tree.map(block.queries, d_padded), total
            # The barrier makes blocks run one after the other; the compiler would otherwise keep the weights of all blocks.
            part, d_part, total = jax.lax.optimization_barrier(inputs)
            attend = functools.partial(_attend, masking=block.masking(masking), weighting=weighting, block=block)
            _, transpose_block = jax.vjp(attend, part)
            return block.add(total, *transpose_block(d_part))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), padded)
        return blocks.unpad(blocks.fold(add_block, zeros))

    gradients = _switch_kinds(mask, transpose)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, operands), None, None


_attention.defvjp(_forward, _backward)


def _switch_kinds(mask: Mask, function: Callable[[Mask], Any]) -> Any:
    """Applies a function to the mask of the layer's kind. Only this one is computed."""
    if mask.kind is None:
        return function(mask)
    return jax.lax.switch(mask.kind, [functools.partial(function, each) for each in mask.split_kinds()])


def _kept_weights(operands: Operands, dropout_key: jax.Array | None, weighting: _Weighting) -> jax.Array | None:
    """Returns which attention weights dropout keeps, bool [B, N, 1, S]; None if it keeps all."""
    if dropout_key is None:
        return None
    (B, _, N, _), S = operands.query.shape, operands.key.shape[1]
    return jax.random.bernoulli(dropout_key, 1.0 - weighting.dropout_rate, (B, N, 1, S))


def _attend(operands: Operands, masking: Masking, weighting: _Weighting, block: Block) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attended values of a block's queries [B, T, N, H], and the logarithms of sums [B, T, N] or None."""
    query_BTNH, key_BSKH, value_BSKH, bias = operands
    mask, keep_BN1S = masking
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
    logits_BNTS = soft_cap(logits_BKGTS.reshape(B, N, T, S), weighting.logit_cap)
    if bias is not None:
        logits_BNTS += expand_bias(bias, T, S, block.lead, mask.query_offset, mask.key_positions).astype(jnp.float32)
    allowed_BTS = expand_mask(mask, T, S, block.first_query, block.first_key)
    if allowed_BTS is not None:
        logits_BNTS = jnp.where(allowed_BTS[:, None], logits_BNTS, _MASKED)
    weights_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(value_BSKH.dtype)
    if keep_BN1S is not None:
        weights_BNTS = drop(weights_BNTS, keep_BN1S, weighting.dropout_rate)
    attended_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BNTS.reshape(B, K, N // K, T, S), value_BSKH)
    log_sums = jnp.swapaxes(jax.nn.logsumexp(logits_BNTS, axis=-1), 1, 2) if weighting.has_log_sums else None
    return attended_BTKGH.reshape(B, T, N, H), log_sums
