"""Row operations on decoding states, which are trees of arrays whose first axis is the row."""

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(state: Any, rows: jax.Array) -> Any:
    """Returns the state of these rows."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)


def reorder_rows(state: Any, rows: jax.Array) -> Any:
    """Returns the state of these rows, each of which replaces a row of the same prompt. Uses `state.reorder` if it exists."""
    return state.reorder(rows) if hasattr(state, "reorder") else take_rows(state, rows)


def put_rows(state: Any, rows: jax.Array, other: Any) -> Any:
    """Replaces these rows by those of `other`, whose arrays may be shorter. Row numbers out of range are ignored."""

    def write(x, y):
        padding = [(0, 0), *((0, a - b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True))]
        return x.at[rows].set(jnp.pad(y, padding), mode="drop")

    return jax.tree.map(write, state, other)
