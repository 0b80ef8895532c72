"""Attention masks in compact form: which keys a query attends to, expanded for one block of queries at a time.

Axis letters: B batch, T query length, S key length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys of local attention: those from `before` positions before the query to `after` positions after it."""

    before: int
    after: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Attention mask: (causal or both in the prefix), inside the window, and same segment, where neither is padding.

    Attributes:
      causal: queries do not attend to keys on their right.
      query_segments, key_segments: segment ids from 1, 0 = padding, int [B, T] and [B, S]. None = one segment without padding.
      query_prefix, key_prefix: tokens that attend to each other in both directions (`decoder_causal_attention`), bool [B, T]
        and [B, S]. None = no prefix.
      query_offset: key position of each row's first query, int [B]. None = 0. Used with a key-value cache.
      key_positions: positions of the keys, int [B, S], below 0 for none. None = 0 to S - 1. Used with a cache of a window.
      query_positions: positions of the queries among the keys, int [B, T]. None = 0 to T - 1, after the offset. Used where
        keys are blocks of tokens.
      windows: the window of each kind of layer. None = all keys (global attention).
      kind: the index of the layer's window, which a scan over layers of different kinds computes, int []. None = 0.

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
    key_positions: jax.Array | None = None
    query_positions: jax.Array | None = None
    windows: tuple[Window | None, ...] = dataclasses.field(default=(None,), metadata={"static": True})
    kind: jax.Array | None = None

    def split_kinds(self) -> list["Mask"]:
        """Returns the mask of each kind of layer."""
        return [dataclasses.replace(self, windows=(window,), kind=None) for window in self.windows]

    def part(self, first_query: int | jax.Array, T: int, first_key: int | jax.Array, S: int) -> "Mask":
        """Returns the mask of T queries and S keys. Their positions are not those in the part."""

        def cut(x: jax.Array | None, first: int | jax.Array, size: int) -> jax.Array | None:
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)

        return dataclasses.replace(
            self,
            query_segments=cut(self.query_segments, first_query, T),
            key_segments=cut(self.key_segments, first_key, S),
            query_prefix=cut(self.query_prefix, first_query, T),
            key_prefix=cut(self.key_prefix, first_key, S),
            key_positions=cut(self.key_positions, first_key, S),
            query_positions=cut(self.query_positions, first_query, T),
        )

    @property
    def has_consecutive_positions(self) -> bool:
        """Whether the first query and the first key are at the same position, and all others after them."""
        return self.query_offset is None and self.key_positions is None and self.query_positions is None


def expand_mask(
    mask: Mask, T: int, S: int, first_query: int | jax.Array = 0, first_key: int | jax.Array = 0
) -> jax.Array | None:
    """Returns bool [B or 1, T, S], True if the query attends to the key; None if all do.

    Args:
      mask: a mask of one kind of layer.
      T, S: number of queries and keys.
      first_query: position of the first query, to which the mask's offset is added.
      first_key: position of the first key, if the mask has no positions of keys.
    """
    (window,) = mask.windows
    rules: list[jax.Array] = []
    if mask.causal or window is not None:
        query_BT1 = (first_query + jnp.arange(T))[None, :, None]
        if mask.query_positions is not None:
            query_BT1 = mask.query_positions[:, :, None]
        if mask.query_offset is not None:
            query_BT1 = query_BT1 + mask.query_offset[:, None, None]
        key_B1S = (first_key + jnp.arange(S))[None, None] if mask.key_positions is None else mask.key_positions[:, None]
        if mask.causal:
            is_left = key_B1S <= query_BT1
            if mask.query_prefix is not None and mask.key_prefix is not None:
                is_left |= mask.query_prefix[:, :, None] & mask.key_prefix[:, None]
            rules.append(is_left)
        if window is not None:
            rules.append((key_B1S >= query_BT1 - window.before) & (key_B1S <= query_BT1 + window.after))
        if mask.key_positions is not None:
            rules.append(key_B1S >= 0)
    if mask.key_segments is not None:
        rules.append(mask.key_segments[:, None] > 0)
        if mask.query_segments is not None:
            rules.append(mask.query_segments[:, :, None] == mask.key_segments[:, None])
    return functools.reduce(jnp.logical_and, rules) if rules else None
