"""Attention in blocks of queries, for all platforms. The backward pass computes the weights of each block again.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, G = N / K query heads for each
of them, H head size.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from t5x_lab.ops.biases import expand_bias
from t5x_lab.ops.blocks import Block, Masking, Operands, make_blocks, pad_axis
from t5x_lab.ops.capping import soft_cap
from t5x_lab.ops.dropout import drop
from t5x_lab.ops.masks import Mask, expand_mask

_MASKED = -1e10


class Weighting(NamedTuple):
    """Settings of the weights, and whether the logarithms of their sums before the division are used."""

    dropout_rate: float
    logit_cap: float | None
    needs_log_sums: bool


def blocked_attention(
    operands: Operands, mask: Mask, keep: jax.Array | None, weighting: Weighting
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attended values [B, T, N, H], and the logarithms of sums [B, T, N], or None if they are not needed.

    Args:
      operands: queries, keys, values, and a bias or None.
      mask: a mask of one kind of layer.
      keep: which weights dropout keeps for all queries alike, bool [B, N, 1, S]. None = all.
      weighting: settings of the weights.
    """
    B, T, N, _ = operands.query.shape
    blocks = make_blocks(mask, operands)
    padded, masking = blocks.pad(operands, Masking(mask, keep))
    attended = jnp.zeros(padded.query.shape, operands.value.dtype)
    log_sums = jnp.zeros((B, padded.query.shape[1], N), jnp.float32) if weighting.needs_log_sums else None

    def attend_block(results, block: Block):
        parts = _attend(block.operands(padded), block.masking(masking), weighting, block)
        return jax.tree.map(block.write_queries, results, parts)

    return jax.tree.map(lambda x: x[:, :T], blocks.fold(attend_block, (attended, log_sums)))


def blocked_gradients(
    operands: Operands, mask: Mask, keep: jax.Array | None, weighting: Weighting, d_results: tuple[jax.Array, jax.Array | None]
) -> Operands:
    """Returns the gradients of the operands of `blocked_attention`, from those of its results."""
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
    gradients = blocks.unpad(blocks.fold(add_block, zeros))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, operands)


def _attend(operands: Operands, masking: Masking, weighting: Weighting, block: Block) -> tuple[jax.Array, jax.Array | None]:
    """Returns the attended values of a block's queries [B, T, N, H], and the logarithms of sums [B, T, N] or None."""
    query_BTNH, key_BSKH, value_BSKH, bias = operands
    mask, keep_BN1S = masking
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
    logits_BNTS = soft_cap(logits_BKGTS.reshape(B, N, T, S), weighting.logit_cap)
    if bias is not None:
        positions = mask.query_offset, mask.key_positions, mask.query_positions
        logits_BNTS += expand_bias(bias, T, S, block.lead, *positions).astype(jnp.float32)
    allowed_BTS = expand_mask(mask, T, S, block.first_query, block.first_key)
    if allowed_BTS is not None:
        logits_BNTS = jnp.where(allowed_BTS[:, None], logits_BNTS, _MASKED)
    weights_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(value_BSKH.dtype)
    if keep_BN1S is not None:
        weights_BNTS = drop(weights_BNTS, keep_BN1S, weighting.dropout_rate)
    attended_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BNTS.reshape(B, K, N // K, T, S), value_BSKH)
    log_sums = jnp.swapaxes(jax.nn.logsumexp(logits_BNTS, axis=-1), 1, 2) if weighting.needs_log_sums else None
    return attended_BTKGH.reshape(B, T, N, H), log_sums
