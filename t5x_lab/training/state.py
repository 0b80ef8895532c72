"""The training state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from t5x_lab.networks.functional import Params
from t5x_lab.optim.groups import select

COUNTERS = ("tokens_processed", "tokens_with_loss", "raw_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes, except the position in the data.

    Attributes:
      step: number of finished steps, int32.
      params, opt_state: trees of arrays.
      counters: totals of `COUNTERS`, each uint32 [2], the (high, low) halves of a 64-bit number; and `task_tokens`, uint32
        [tasks, 2], the processed tokens of each task.
      healthy: False after a non-finite step; then no later step changes the state.
      average: exponential moving average of the parameters, or None.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    counters: dict[str, jax.Array]
    healthy: jax.Array
    average: Params | None = None


def initial_state(
    optimizer: optax.GradientTransformation,
    params: Params,
    num_tasks: int = 1,
    is_trained: Callable[[str], bool] = lambda name: True,
    with_average: bool = False,
) -> TrainState:
    """Returns the state of step 0 with these parameters. The optimizer state covers the trained parameters only."""
    counters = {name: jnp.zeros((2,), jnp.uint32) for name in COUNTERS}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(select(params, is_trained)),
        counters={**counters, "task_tokens": jnp.zeros((num_tasks, 2), jnp.uint32)},
        healthy=jnp.ones((), bool),
        average=jax.tree.map(jnp.copy, params) if with_average else None,  # the step donates both trees
    )


def add_to_counter(counter: jax.Array, amount: jax.Array) -> jax.Array:
    """Adds amounts [...] below 2**32 to 64-bit counters, (high, low) pairs [..., 2]."""
    low = counter[..., 1] + amount.astype(jnp.uint32)
    return jnp.stack([counter[..., 0] + (low < counter[..., 1]).astype(jnp.uint32), low], axis=-1)


def read_counter(counter: jax.Array) -> int:
    """Returns the number of a (high, low) pair."""
    high, low = np.asarray(counter)
    return (int(high) << 32) + int(low)
