"""Blocks of queries whose attention weights exist at a time, and the keys that each of them reads.

Axis letters: B batch, T query length, S key length, N heads, K heads of keys and values, H head size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from t5x_lab.ops.biases import DiagonalBias
from t5x_lab.ops.masks import Mask

BLOCK = 256  # largest number of queries in a block


class Operands(NamedTuple):
    """Arrays that attention is differentiated by: queries [B, T, N, H], keys and values [B, S, K, H], and a bias or None."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: DiagonalBias | None


class Masking(NamedTuple):
    """The mask, and which weights dropout keeps for all queries alike, bool [B, N, 1, S] or None = all."""

    mask: Mask
    keep: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Block:
    """T queries from `first_query` on and S keys from `first_key` on. Their positions differ by `lead`."""

    first_query: int | jax.Array
    first_key: int | jax.Array
    T: int
    S: int
    lead: int

    def operands(self, operands: Operands) -> Operands:
        query, key, value, bias = operands
        return Operands(self.queries(query), self._keys(key), self._keys(value), bias)

    def masking(self, masking: Masking) -> Masking:
        mask, keep = masking
        part = mask.part(self.first_query, self.T, self.first_key, self.S)
        return Masking(part, None if keep is None else self._keys(keep, axis=3))

    def queries(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.first_query, self.T, axis=1)

    def _keys(self, x: jax.Array, axis: int = 1) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.first_key, self.S, axis=axis)

    def write_queries(self, x: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), self.first_query, axis=1)

    def add(self, total: Operands, part: Operands) -> Operands:
        """Adds the gradients of a block. Each query is in one block only."""
        add_keys = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, self._keys(x) + part, self.first_key, axis=1)
        return Operands(
            self.write_queries(total.query, part.query),
            add_keys(total.key, part.key),
            add_keys(total.value, part.value),
            jax.tree.map(jnp.add, total.bias, part.bias),
        )


@dataclasses.dataclass(frozen=True)
class FullBlocks:
    """Blocks that read all keys; with a causal mask without a prefix, those up to their last query. They are unrolled."""

    T: int
    S: int
    is_causal: bool

    def pad(self, operands: Operands, masking: Masking) -> tuple[Operands, Masking]:
        return operands, masking

    def fold(self, step: Callable[[Any, Block], Any], carry: Any) -> Any:
        size = -(-self.T // -(-self.T // BLOCK))
        for first in range(0, self.T, size):
            stop = min(first + size, self.T)
            carry = step(carry, Block(first, 0, stop - first, min(stop, self.S) if self.is_causal else self.S, first))
        return carry

    def unpad(self, gradients: Operands) -> Operands:
        return gradients


@dataclasses.dataclass(frozen=True)
class LocalBlocks:
    """Blocks that read the windows of their queries, which are as many keys in each, so that a loop runs them.

    Attributes:
      length: T = S.
      before, after: keys to the left and to the right of a block that its queries may attend to.
    """

    length: int
    before: int
    after: int

    @property
    def size(self) -> int:
        """Number of queries in a block."""
        return -(-self.length // self._number)

    @property
    def _number(self) -> int:
        return -(-self.length // BLOCK)

    @property
    def width(self) -> int:
        """Number of keys that a block reads."""
        return self.before + self.size + self.after

    def pad(self, operands: Operands, masking: Masking) -> tuple[Operands, Masking]:
        """Adds queries on the right, for blocks of equal size, and keys on both sides, to which no query attends."""
        query, key, value, bias = operands
        mask, keep = masking
        positions = jnp.arange(self._number * self.size + self.before + self.after)[None] - self.before
        padded_mask = dataclasses.replace(
            mask,
            query_segments=self._pad_queries(mask.query_segments),
            key_segments=self._pad_keys(mask.key_segments),
            query_prefix=self._pad_queries(mask.query_prefix),
            key_prefix=self._pad_keys(mask.key_prefix),
            key_positions=jnp.where(positions < self.length, positions, -1),
        )
        padded = Operands(self._pad_queries(query), self._pad_keys(key), self._pad_keys(value), bias)
        return padded, Masking(padded_mask, self._pad_keys(keep, axis=3))

    def _pad_queries(self, x: jax.Array | None) -> Any:
        return pad_axis(x, 0, self._number * self.size - self.length, axis=1)

    def _pad_keys(self, x: jax.Array | None, axis: int = 1) -> Any:
        return pad_axis(x, self.before, self._number * self.size - self.length + self.after, axis)

    def fold(self, step: Callable[[Any, Block], Any], carry: Any) -> Any:
        block = lambda i: Block(i * self.size, i * self.size, self.size, self.width, self.before)
        return jax.lax.fori_loop(0, self._number, lambda i, carry: step(carry, block(i)), carry)

    def unpad(self, gradients: Operands) -> Operands:
        keys = slice(self.before, self.before + self.length)
        query, key, value, bias = gradients
        return Operands(query[:, : self.length], key[:, keys], value[:, keys], bias)


def pad_axis(x: jax.Array | None, before: int, after: int, axis: int) -> Any:
    """Pads an axis with zeros on both sides. None stays None."""
    return None if x is None else jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)])


def make_blocks(mask: Mask, operands: Operands) -> FullBlocks | LocalBlocks:
    """Returns the blocks of a mask of one kind of layer."""
    T, S = operands.query.shape[1], operands.key.shape[1]
    (window,) = mask.windows
    is_aligned = mask.has_consecutive_positions
    is_causal = is_aligned and mask.causal and mask.query_prefix is None
    if window is not None and is_aligned and T == S:
        local = LocalBlocks(T, window.before, 0 if is_causal else window.after)
        if local.width < S:
            return local
    return FullBlocks(T, S, is_causal)
