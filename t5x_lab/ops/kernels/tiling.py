"""Tiles of fused attention: their size, and which of them are computed."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from t5x_lab.ops.blocks import Operands
from t5x_lab.ops.masks import Mask

UNLIMITED = 1 << 30


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles of a mask, each of as many keys as queries.

    Attributes:
      T, S: number of queries and keys.
      size: number of queries and of keys in a tile, a power of 2.
      before, after: keys to the left and to the right of a query that it may attend to.
      is_causal: queries attend to keys on their right only in the prefix.
      has_prefix: there are tokens in a prefix.
      has_query_segments: keys of other segments than the query's are masked. Otherwise only padding is, if there are segments.
      logit_cap: see `ops.attention.dot_product_attention`.
    """

    T: int
    S: int
    size: int
    before: int
    after: int
    is_causal: bool
    has_prefix: bool
    has_query_segments: bool
    logit_cap: float | None

    @classmethod
    def make(cls, operands: Operands, mask: Mask, logit_cap: float | None, sizes: Sequence[int]) -> "Tiling":
        """Returns the tiling of a mask of one kind of layer, with the first of the sizes that pads little, or the last one.

        Little padding is at most an eighth of the shorter length. Sizes are powers of 2.
        """
        T, S = operands.query.shape[1], operands.key.shape[1]
        (window,) = mask.windows
        before, after = (UNLIMITED, UNLIMITED) if window is None else (window.before, window.after)
        has_prefix = mask.query_prefix is not None and mask.key_prefix is not None
        after = 0 if mask.causal and not has_prefix else after
        size = next((size for size in sizes if -T % size + -S % size <= min(T, S) // 8), sizes[-1])
        return cls(T, S, size, before, after, mask.causal, has_prefix, mask.query_segments is not None, logit_cap)

    @property
    def query_tiles(self) -> int:
        return -(-self.T // self.size)

    @property
    def key_tiles(self) -> int:
        return -(-self.S // self.size)

    def keys_of(self, query_tile: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of keys that the queries of a tile attend to."""
        return _first_and_last(query_tile, self.before, self.after, self.size, self.key_tiles)

    def queries_of(self, key_tile: Any) -> tuple[Any, Any]:
        """Returns the first and the last tile of queries that attend to the keys of a tile."""
        return _first_and_last(key_tile, self.after, self.before, self.size, self.query_tiles)

    def most_keys(self) -> int:
        """Returns the largest number of tiles that the queries of a tile attend to."""
        return max(last - first + 1 for first, last in map(self.keys_of, range(self.query_tiles)))

    def most_queries(self) -> int:
        """Returns the largest number of tiles of queries that attend to the keys of a tile."""
        return max(last - first + 1 for first, last in map(self.queries_of, range(self.key_tiles)))

    def allowed(self, keys: Any, queries: Any, key_codes: Any, query_codes: Any) -> Any:
        """Returns which keys of a tile the queries attend to, bool of a shape that broadcasts to the tile's; None for all.

        Args:
          keys, queries: positions, int, of shapes that broadcast to the tile's.
          key_codes, query_codes: 2 * segment + is in the prefix, int, of such shapes too. None without both.
        """
        rules = []
        if self.is_causal:
            is_left = keys <= queries
            rules.append(is_left | ((query_codes & key_codes & 1) == 1) if self.has_prefix else is_left)
        if self.before < UNLIMITED:
            rules.append(keys >= queries - self.before)
        if self.after < UNLIMITED and (self.has_prefix or not self.is_causal):
            rules.append(keys <= queries + self.after)
        if key_codes is not None:
            rules.append(key_codes >= 2)
            if self.has_query_segments:
                rules.append((query_codes >> 1) == (key_codes >> 1))
        elif self.S % self.size:
            rules.append(keys < self.S)
        return functools.reduce(jnp.logical_and, rules) if rules else None


def _first_and_last(tile: Any, before: int, after: int, size: int, tiles: int) -> tuple[Any, Any]:
    smallest, largest = (min, max) if isinstance(tile, int) else (jnp.minimum, jnp.maximum)
    # A division would ask for the kind of the TPU, which compilation without a TPU does not know.
    shift = size.bit_length() - 1
    last = smallest((tile * size + size - 1 + after) >> shift, tiles - 1)
    return smallest(largest(tile * size - before, 0) >> shift, largest(last, 0)), last
