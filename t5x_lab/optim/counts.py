"""Update counts in optimizer states, which schedules use.

The count differs from the run's step if the optimizer or the step was carried over from another run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lab.optim.adafactor import AdafactorState


def updates(opt_state: Any, step: jax.Array) -> jax.Array:
    """Returns the update count in an optimizer state; `step` if it has none."""
    counts = [_count(part) for part in jax.tree.leaves(opt_state, is_leaf=_is_counted) if _is_counted(part)]
    counts += [leaf for leaf in jax.tree.leaves(opt_state) if _is_count(leaf)]
    return counts[0] if counts else step


def start_count_at(opt_state: Any, step: jax.Array) -> Any:
    """Returns a fresh optimizer state whose schedule continues at `step`, as in T5X, which has a single step.

    Adafactor's decay depends on this count, too. Adam's bias correction starts at 0.
    """

    copy_step = lambda: jnp.copy(step).astype(jnp.int32)  # separate buffers, because the training step donates them

    def set_count(part: Any) -> Any:
        if isinstance(part, AdafactorState):
            return part._replace(step=copy_step())
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=copy_step())
        if isinstance(part, optax.contrib.ScheduleFreeState):  # whose own count begins at 1
            base = start_count_at(part.base_optimizer_state, step)
            return part._replace(step_count=copy_step() + 1, base_optimizer_state=base)
        if isinstance(part, optax.InjectStatefulHyperparamsState):
            counts = jax.tree.map(lambda x: copy_step() if _is_count(x) else x, part.hyperparams_states)
            return part._replace(
                count=copy_step(), hyperparams_states=counts, inner_state=start_count_at(part.inner_state, step)
            )
        return part

    is_part = lambda part: _is_counted(part) or isinstance(part, optax.contrib.ScheduleFreeState)
    return jax.tree.map(set_count, opt_state, is_leaf=is_part)


def skip_update(old: Any, new: Any) -> Any:
    """Returns the optimizer state after a skipped update: schedules advance, moments and the counts of their averages do not.

    Args:
      old, new: states before and after the update.
    """
    advance = lambda old, new: new if not isinstance(old, _MOMENTS) and _is_count(new) else old
    return jax.tree.map(advance, old, new, is_leaf=lambda part: isinstance(part, _MOMENTS))


_MOMENTS = (optax.ScaleByAdamState, optax.contrib.MuonState)


def _is_counted(part: Any) -> bool:
    return isinstance(part, AdafactorState | optax.ScaleByScheduleState | optax.InjectStatefulHyperparamsState)


def _is_count(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.ndim == 0


def _count(part: Any) -> jax.Array:
    return part.step if isinstance(part, AdafactorState) else part.count
