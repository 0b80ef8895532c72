"""An optimizer's own count of its updates, on which its schedule runs.

It is not the run's step where the optimizer was carried over from another run, or is fresh where the step was.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_lab.optim.adafactor import AdafactorState


def updates(opt_state: Any, step: jax.Array) -> jax.Array:
    """The count in an optimizer's state; `step` where it has none."""
    counts = [_count(part) for part in jax.tree.leaves(opt_state, is_leaf=_is_counted) if _is_counted(part)]
    counts += [leaf for leaf in jax.tree.leaves(opt_state) if _is_count(leaf)]
    return counts[0] if counts else step


def counting_from(opt_state: Any, step: jax.Array) -> Any:
    """A fresh optimizer's state whose schedule goes on at `step`, as T5X's does, which knows one step alone.

    Adafactor's decay is one of T5X's functions of the step too. Adam's corrections of its fresh means begin anew.
    """

    fresh = lambda: jnp.copy(step).astype(jnp.int32)  # one for each: the training step donates them

    def one(part: Any) -> Any:
        if isinstance(part, AdafactorState):
            return part._replace(step=fresh())
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=fresh())
        if isinstance(part, optax.InjectStatefulHyperparamsState):
            counts = jax.tree.map(lambda x: fresh() if _is_count(x) else x, part.hyperparams_states)
            return part._replace(count=fresh(), hyperparams_states=counts, inner_state=counting_from(part.inner_state, step))
        return part

    return jax.tree.map(one, opt_state, is_leaf=_is_counted)


def _is_counted(part: Any) -> bool:
    return isinstance(part, AdafactorState | optax.ScaleByScheduleState | optax.InjectStatefulHyperparamsState)


def _is_count(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.ndim == 0


def _count(part: Any) -> jax.Array:
    return part.step if isinstance(part, AdafactorState) else part.count
