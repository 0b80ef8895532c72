"""Tiles of fused attention: their sizes, which of them are computed, and what the kernels read in them.

Axis letters: B batch, T query length, S key length, N heads, H head size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.blocks import Operands
from t5x_lab.ops.masks import Mask

SIZES = (512, 256, 128)  # powers of 2
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
    def make(cls, operands: Operands, mask: Mask, logit_cap: float | None) -> "Tiling":
        """Returns the tiling of a mask of one kind of layer. The padding is at most an eighth of the shorter length."""
        T, S = operands.query.shape[1], operands.key.shape[1]
        (window,) = mask.windows
        before, after = (UNLIMITED, UNLIMITED) if window is None else (window.before, window.after)
        has_prefix = mask.query_prefix is not None and mask.key_prefix is not None
        after = 0 if mask.causal and not has_prefix else after
        size = next((size for size in SIZES if -T % size + -S % size <= min(T, S) // 8), SIZES[-1])
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

    def bias_row(self, query_tile: Any, key_tile: Any) -> Any:
        """Returns the first of the two rows of `bias_rows` that have the bias of a tile."""
        return self.key_tiles - 1 - key_tile + query_tile


def _first_and_last(tile: Any, before: int, after: int, size: int, tiles: int) -> tuple[Any, Any]:
    smallest, largest = (min, max) if isinstance(tile, int) else (jnp.minimum, jnp.maximum)
    # A division would ask for the kind of the TPU, which compilation without a TPU does not know.
    shift = size.bit_length() - 1
    last = smallest((tile * size + size - 1 + after) >> shift, tiles - 1)
    return smallest(largest(tile * size - before, 0) >> shift, largest(last, 0)), last


def to_tiles(x: jax.Array, size: int) -> jax.Array:
    """Returns [B, T, N, H] as [B, N, H, T], with zeros to fill the last tile.

    The compiler for TPUs has the length last too if heads are small. A head of 64, as in T5, would take the space of 128.
    """
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0))), 1, 3)


def from_tiles(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, N, H, T] as [B, T, N, H], up to a length."""
    return jnp.moveaxis(x, 3, 1)[:, :length]


def rows_to_tiles(x_BTN: jax.Array, size: int) -> jax.Array:
    """Returns a number for each query and head as [B, N, tiles, 1, size]."""
    B, T, N = x_BTN.shape
    return jnp.swapaxes(jnp.pad(x_BTN, ((0, 0), (0, -T % size), (0, 0))), 1, 2).reshape(B, N, -1, 1, size)


def rows_from_tiles(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, N, tiles, 1, size] as [B, T, N], up to a length."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2)[:, :length]


def token_codes(segments: jax.Array | None, prefix: jax.Array | None, size: int) -> jax.Array | None:
    """Returns 2 * segment + is in the prefix, float [B, tiles, 1, size]; None without both.

    Without segments all tokens are in segment 1.
    """
    if segments is None:
        if prefix is None:
            return None
        segments = jnp.ones_like(prefix, jnp.int32)
    codes = 2 * segments if prefix is None else 2 * segments + prefix
    padded = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % size)))
    return padded.astype(jnp.float32).reshape(padded.shape[0], -1, 1, size)


def bias_rows(tiling: Tiling, bias: DiagonalBias) -> jax.Array:
    """Returns the bias by descending distance of key - query, float [N, query tiles + key tiles, 1, size].

    The first value is that of distance size * key tiles.
    """
    N, D = bias.values.shape
    tiles, size = tiling.query_tiles + tiling.key_tiles, tiling.size
    before = tiling.query_tiles * size - bias.span  # the bias starts with distance -(span - 1)
    values = jax.lax.pad(bias.values.astype(jnp.float32), jnp.float32(0), ((0, 0, 0), (before, tiles * size - before - D, 0)))
    return values[:, ::-1].reshape(N, tiles, 1, size)
