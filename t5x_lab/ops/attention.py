"""Dot-product attention with masks and relative position biases in compact form, expanded block by block.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, G = N / K query heads for each
of them, H head size, D = span + S - 1 diagonals.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_lab.ops.capping import soft_cap
from t5x_lab.ops.dropout import dropout

BLOCK = 256  # number of queries whose attention weights exist at a time
_MASKED = -1e10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Attention mask: (causal or both in the prefix) and same segment and neither is padding.

    Attributes:
      causal: queries do not attend to keys on their right.
      query_segments, key_segments: segment ids from 1, 0 = padding, int [B, T] and [B, S]. None = one segment without padding.
      query_prefix, key_prefix: tokens that attend to each other in both directions (`decoder_causal_attention`), bool [B, T]
        and [B, S]. None = no prefix.
      query_offset: key position of each row's first query, int [B]. None = 0. Used with a key-value cache.

    Example: five tokens in the segments [1 1 1 2 2], causal, with the first two tokens as prefix:

        1 1 . . .      the second key is right of the first query, but both are in the prefix
        1 1 . . .
        1 1 1 . .
        . . . 1 .
        . . . 1 1
    """

    causal: bool = dataclasses.field(metadata={"static": True})
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    query_prefix: jax.Array | None = None
    key_prefix: jax.Array | None = None
    query_offset: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiagonalBias:
    """Attention bias that depends only on key position - query position, with one value per head and diagonal.

    Attributes:
      values: float [N, D]. Entry d is the bias of distance d - (span - 1).
      span: number of query positions: T without a cache, S with one.
    """

    values: jax.Array
    span: int = dataclasses.field(metadata={"static": True})


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
    query that attends to no key (padding) returns a mean of the values; its loss weight is zero.

    Queries are processed in blocks whose weights the backward pass recomputes, so that no array [B, N, T, S] is stored. With a
    causal mask without a prefix, a block reads keys up to its last query only.

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
    return _in_blocks(query_BTNH, key_BSKH, value_BSKH, bias, mask, dropout_key, (dropout_rate, logit_cap))


# Not `jax.checkpoint`: nested in a layer under remat, it would store keys and values once per block.
@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _in_blocks(query_BTNH, key_BSKH, value_BSKH, bias, mask: Mask, dropout_key, rate_and_cap) -> jax.Array:
    rest = (key_BSKH, value_BSKH, bias, mask, dropout_key, rate_and_cap)
    blocks = _blocks(mask, query_BTNH.shape[1], key_BSKH.shape[1])
    return jnp.concatenate([_attend_block(query_BTNH[:, block[0] : block[1]], *rest, *block) for block in blocks], axis=1)


def _forward(*args):
    return _in_blocks(*args), args[:-1]


def _backward(rate_and_cap, residuals, d_attended_BTNH):
    query, key, value, bias, mask, dropout_key = residuals
    d_query, total = [], jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (key, value, bias))
    for start, stop, keys in _blocks(mask, query.shape[1], key.shape[1]):
        attend = lambda query, *rest: _attend_block(query, *rest, mask, dropout_key, rate_and_cap, start, stop, keys)
        block = (query[:, start:stop], key, value, bias), d_attended_BTNH[:, start:stop], total
        # The barrier makes blocks run one after the other; the compiler would otherwise keep the weights of all blocks.
        operands, d_attended, total = jax.lax.optimization_barrier(block)
        _, transpose = jax.vjp(attend, *operands)
        d_block, *d_rest = transpose(d_attended)
        d_query.append(d_block)
        total = jax.tree.map(jnp.add, total, tuple(d_rest))
    d_rest = jax.tree.map(lambda x, like: x.astype(like.dtype), total, (key, value, bias))
    return jnp.concatenate(d_query, axis=1), *d_rest, None, None


_in_blocks.defvjp(_forward, _backward)


def _blocks(mask: Mask, T: int, S: int) -> list[tuple[int, int, int]]:
    """Returns (first query, last query + 1, number of visible keys) of blocks of equal size."""
    size = -(-T // -(-T // BLOCK))
    left_only = mask.causal and mask.query_prefix is None and mask.query_offset is None
    return [(i, min(i + size, T), min(i + size, S) if left_only else S) for i in range(0, T, size)]


def _attend_block(query, key, value, bias, mask: Mask, dropout_key, rate_and_cap, start: int, stop: int, keys: int):
    mask = dataclasses.replace(
        mask,
        query_segments=None if mask.query_segments is None else mask.query_segments[:, start:stop],
        key_segments=None if mask.key_segments is None else mask.key_segments[:, :keys],
        query_prefix=None if mask.query_prefix is None else mask.query_prefix[:, start:stop],
        key_prefix=None if mask.key_prefix is None else mask.key_prefix[:, :keys],
    )
    rate, cap = rate_and_cap
    drop = functools.partial(dropout, rate=rate, key=dropout_key, broadcast_axis=-2, size=key.shape[1])
    return _attend(query, key[:, :keys], value[:, :keys], bias, mask, drop, cap, start)


def _attend(query_BTNH, key_BSKH, value_BSKH, bias, mask: Mask, drop: Callable, cap, start: int) -> jax.Array:
    """Computes attention of queries that start at position `start`. `drop` is applied to the attention weights."""
    B, T, N, H = query_BTNH.shape
    S, K = key_BSKH.shape[1:3]
    query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key_BSKH, preferred_element_type=jnp.float32)
    logits_BNTS = soft_cap(logits_BKGTS.reshape(B, N, T, S), cap)
    if bias is not None:
        logits_BNTS += expand_bias(bias, T, S, mask.query_offset, start).astype(jnp.float32)
    allowed_BTS = expand_mask(mask, T, S, start)
    if allowed_BTS is not None:
        logits_BNTS = jnp.where(allowed_BTS[:, None], logits_BNTS, _MASKED)
    weights_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(value_BSKH.dtype)
    weights_BNTS = drop(weights_BNTS)
    attended_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BNTS.reshape(B, K, N // K, T, S), value_BSKH)
    return attended_BTKGH.reshape(B, T, N, H)


def expand_mask(mask: Mask, T: int, S: int, start: int = 0) -> jax.Array | None:
    """Returns bool [B or 1, T, S], True if the query attends to the key; None if all do.

    The first query has position `start`, plus the mask's offset.
    """
    allowed = None
    if mask.causal:
        query_position = start + jnp.arange(T)[None, :, None]
        if mask.query_offset is not None:
            query_position = query_position + mask.query_offset[:, None, None]
        allowed = jnp.arange(S)[None, None, :] <= query_position
        if mask.query_prefix is not None and mask.key_prefix is not None:
            allowed |= mask.query_prefix[:, :, None] & mask.key_prefix[:, None, :]
    if mask.key_segments is not None:
        real_key = mask.key_segments[:, None, :] > 0
        same = (
            real_key
            if mask.query_segments is None
            else ((mask.query_segments[:, :, None] == mask.key_segments[:, None, :]) & real_key)
        )
        allowed = same if allowed is None else allowed & same
    return allowed


def expand_bias(bias: DiagonalBias, T: int, S: int, query_offset: jax.Array | None = None, start: int = 0) -> jax.Array:
    """Returns the bias as [1 or B, N, T, S]. The first query has position `start`, plus the offset of its row."""
    values_ND = bias.values
    if query_offset is None:
        # Row t of the result is values[left + T-1-t : left + T-1-t+S]. Tiling this window and reshaping it to rows that are
        # one longer shifts each row by one, so that the transpose is a reshape and a sum instead of a scatter.
        offset = bias.span - T - start
        window = jnp.pad(values_ND[:, offset : offset + T + S - 1], ((0, 0), (0, 1)))
        N, width = window.shape
        tiled = jnp.broadcast_to(window[:, None], (N, T, width))
        flat = jnp.pad(tiled.reshape(N, T * width), ((0, 0), (0, T)))
        return flat.reshape(N, T, width + 1)[:, ::-1, :S][None]
    distance_BTS = jnp.arange(S)[None, None] - (start + jnp.arange(T)[None, :, None]) - query_offset[:, None, None]
    index_BTS = jnp.clip(distance_BTS + bias.span - 1, 0, values_ND.shape[1] - 1)
    return jnp.moveaxis(values_ND[:, index_BTS], 0, 1)
