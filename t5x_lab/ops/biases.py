"""Relative position biases of attention in compact form, expanded for one block of queries at a time.

Axis letters: B batch, T query length, S key length, N heads, D = span + S - 1 diagonals.
"""

import dataclasses

import jax
import jax.numpy as jnp


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


def expand_bias(
    bias: DiagonalBias,
    T: int,
    S: int,
    lead: int = 0,
    query_offset: jax.Array | None = None,
    key_positions: jax.Array | None = None,
    query_positions: jax.Array | None = None,
) -> jax.Array:
    """Returns the bias as [1 or B, N, T, S].

    Args:
      bias: the bias.
      T, S: number of queries and keys.
      lead: position of the first query - position of the first key.
      query_offset: added to the lead of each row, int [B]. None = 0.
      key_positions: positions of the keys, of which the first then counts as 0, int [B, S]. None = consecutive positions.
      query_positions: positions of the queries, in place of the lead, int [B, T]. None = consecutive positions.
    """
    values_ND = bias.values
    if query_offset is None and query_positions is None:
        # Row t of the result is values[first + T-1-t : first + T-1-t+S]. Tiling this window and reshaping it to rows that are
        # one longer shifts each row by one, so that the transpose is a reshape and a sum instead of a scatter.
        first = bias.span - T - lead
        window = jnp.pad(values_ND[:, first : first + T + S - 1], ((0, 0), (0, 1)))
        N, width = window.shape
        tiled = jnp.broadcast_to(window[:, None], (N, T, width))
        flat = jnp.pad(tiled.reshape(N, T * width), ((0, 0), (0, T)))
        return flat.reshape(N, T, width + 1)[:, ::-1, :S][None]
    keys_BS = jnp.arange(S)[None] if key_positions is None else key_positions
    queries_BT = lead + jnp.arange(T)[None] if query_positions is None else query_positions
    queries_BT = queries_BT if query_offset is None else queries_BT + query_offset[:, None]
    index_BTS = jnp.clip(keys_BS[:, None] - queries_BT[:, :, None] + bias.span - 1, 0, values_ND.shape[1] - 1)
    return jnp.moveaxis(values_ND[:, index_BTS], 0, 1)
