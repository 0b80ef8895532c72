"""Transient-global attention of LongT5: an encoder's local layers also attend to sums of blocks of tokens (Guo et al. 2022,
section 3.1.2).

Axis letters: B batch, T length, G blocks, D embed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from t5x_lab.ops.masks import Mask


class TokenBlocks(NamedTuple):
    """Consecutive blocks of tokens, none of which reaches over the end of a text.

    The tokens after a text's last whole block belong to that block. A text that is shorter than a block has none.

    Attributes:
      block_BT: index of each token's block, int [B, T]. -1 = none, and padding.
      segments_BG: segment id of each block's text, int [B, G]. 0 = no block.
    """

    block_BT: jax.Array
    segments_BG: jax.Array

    def mask(self, segments_BT: jax.Array) -> Mask:
        """Returns the mask of tokens that attend to the blocks of their own text, whose distances are those between blocks."""
        return Mask(False, query_segments=segments_BT, key_segments=self.segments_BG, query_positions=self.block_BT)

    def sum_tokens(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the sum of each block's tokens [B, G, D]."""
        G = self.segments_BG.shape[1]
        slots_BT = jnp.where(self.block_BT < 0, G, self.block_BT)  # the last slot is left out
        sum_row = lambda x_TD, slots_T: jax.ops.segment_sum(x_TD, slots_T, num_segments=G + 1)[:G]
        return jax.vmap(sum_row)(x_BTD.astype(jnp.float32), slots_BT).astype(x_BTD.dtype)


def make_token_blocks(segments_BT: jax.Array, size: int) -> TokenBlocks:
    """Divides each text into blocks of `size` tokens.

    Args:
      segments_BT: segment ids of consecutive texts, from 1; 0 = padding.
      size: number of tokens in a block.

    Returns:
      T // size blocks, those of the first text first.
    """
    B, T = segments_BT.shape
    index_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    is_token = segments_BT > 0
    differs = segments_BT[:, 1:] != segments_BT[:, :-1]
    is_first, is_last = (jnp.pad(differs, ((0, 0), side), constant_values=True) for side in ((1, 0), (0, 1)))
    start_BT = jax.lax.cummax(jnp.where(is_first, index_BT, 0), axis=1)
    end_BT = jax.lax.cummin(jnp.where(is_last, index_BT, T), axis=1, reverse=True)
    is_block_end = is_token & ((index_BT - start_BT) % size == size - 1)
    count_BT = jnp.cumsum(is_block_end, axis=1)  # blocks that end at a token or before it
    before_BT = jnp.take_along_axis(jnp.pad(count_BT, ((0, 0), (1, 0))), start_BT, axis=1)  # of the texts before
    until_BT = jnp.take_along_axis(count_BT, end_BT, axis=1)  # of the texts up to this one
    block_BT = jnp.minimum(before_BT + (index_BT - start_BT) // size, until_BT - 1)
    block_BT = jnp.where(is_token & (until_BT > before_BT), block_BT, -1)
    slots_BT = jnp.where(is_block_end, count_BT - 1, T)  # out of bounds, where no block ends
    set_row = lambda slots_T, segments_T: jnp.zeros(T // size, segments_T.dtype).at[slots_T].set(segments_T, mode="drop")
    return TokenBlocks(block_BT, jax.vmap(set_row)(slots_BT, segments_BT))
