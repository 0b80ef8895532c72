"""What a training step reads and writes, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lab.models.model import Model, Params

COUNTERS = ("tokens_processed", "tokens_with_loss", "raw_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes, but for the position in the data.

    Attributes:
      step: int32, finished steps.
      params, opt_state: trees of arrays.
      counters: `COUNTERS` so far, each uint32 [2], (high, low) halves of a 64-bit number.
      healthy: bool; once a step was not finite, no later step changes anything.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    counters: dict[str, jax.Array]
    healthy: jax.Array


def initial_state(model: Model, optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    """Step 0 with these parameters."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        counters={name: jnp.zeros((2,), jnp.uint32) for name in COUNTERS},
        healthy=jnp.ones((), bool),
    )


def add_to_counter(counter: jax.Array, amount: jax.Array) -> jax.Array:
    """64-bit addition on a (high, low) pair; `amount` is below 2**32."""
    low = counter[1] + amount.astype(jnp.uint32)
    return jnp.stack([counter[0] + (low < counter[1]).astype(jnp.uint32), low])


def read_counter(counter: jax.Array) -> int:
    high, low = np.asarray(counter)
    return (int(high) << 32) + int(low)
