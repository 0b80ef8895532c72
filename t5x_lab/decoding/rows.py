"""The rows of a decoding state, which is any tree of arrays whose first axis they are."""

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(state: Any, rows: jax.Array) -> Any:
    """The state of these rows, any number of them."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)


def reorder_rows(state: Any, rows: jax.Array) -> Any:
    """The state of these rows, where each replaces a row of the same prompt; a state may know what then need not move."""
    return state.reorder(rows) if hasattr(state, "reorder") else take_rows(state, rows)


def put_rows(state: Any, rows: jax.Array, other: Any) -> Any:
    """Replaces these rows by those of `other`, whose prompts may be shorter; a row number beyond the last is skipped."""

    def write(x, y):
        padding = [(0, 0), *((0, a - b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True))]
        return x.at[rows].set(jnp.pad(y, padding), mode="drop")

    return jax.tree.map(write, state, other)
