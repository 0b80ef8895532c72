"""Gradual unfreezing: one more block of each stack at a time, from the last to the first (Howard & Ruder 2018)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.networks.stacked import LAYERS
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.optim.schedules import Schedule
from t5x_lab.partitioning.rules import is_axes


@dataclasses.dataclass(frozen=True)
class GradualUnfreezing:
    """An optimizer that trains the last block of each stack, then the last two, and so on until it trains all.

    After Raffel et al. (2020), section 3.5.1: encoder and decoder go in parallel, and what belongs to no block, such as the
    embeddings, is trained from the beginning. A frozen block's slots stay what they were, too.

    Attributes:
      optimizer: of what is trained.
      steps: of each stage; the paper's are those of the fine-tuning divided by the number of blocks.
    """

    optimizer: Optimizer
    steps: int

    def __post_init__(self):
        check_types(self)
        check_positive(self, "steps")
        if hasattr(self.optimizer, "is_trained"):
            raise UserError(
                "GradualUnfreezing.optimizer is @Groups(). Put it the other way round: one of Groups.groups may be "
                "@GradualUnfreezing(), of that group's blocks."
            )

    @property
    def learning_rate(self) -> Schedule:
        return self.optimizer.learning_rate

    def identity(self) -> str:
        """What a run is continued with unchanged."""
        return f"@GradualUnfreezing() of {self.steps} steps, @{type(self.optimizer).__name__}()"

    def make(self, axes: dict) -> optax.GradientTransformation:
        """See `Optimizer.make`."""
        inner = self.optimizer.make(axes)
        is_stacked = {path: LAYERS in names for path, names in flatten_dict(axes, is_leaf=lambda _, x: is_axes(x)).items()}

        def init(params: Any) -> UnfreezingState:
            return UnfreezingState(inner.init(params), jnp.zeros((), jnp.int32))

        def update(grads: Any, state: UnfreezingState, params: Any = None) -> tuple[Any, UnfreezingState]:
            stage = 1 + state.step // self.steps
            ndims = {path: grad.ndim for path, grad in flatten_dict(grads).items()}

            def where_trained(path: tuple, new: jax.Array, old: jax.Array | float) -> jax.Array:
                """`new` in the blocks that are trained, `old` in the others, of what belongs to a parameter."""
                names = tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
                owner = next((names[i:] for i in range(len(names)) if names[i:] in ndims), ())
                if not is_stacked.get(owner) or new.ndim != ndims[owner]:
                    return new
                layers = new.shape[0]
                trained = jnp.arange(layers) >= layers - stage
                return jnp.where(trained.reshape(layers, *[1] * (new.ndim - 1)), new, old)

            of_trained = lambda tree: jax.tree_util.tree_map_with_path(lambda path, x: where_trained(path, x, 0.0), tree)
            updates, inner_state = inner.update(of_trained(grads), state.inner, params)
            inner_state = jax.tree_util.tree_map_with_path(where_trained, inner_state, state.inner)
            return of_trained(updates), UnfreezingState(inner_state, state.step + 1)

        return optax.GradientTransformation(init, update)


class UnfreezingState(NamedTuple):
    """State of the optimizer within, and finished steps."""

    inner: Any
    step: jax.Array
