"""Gradual unfreezing of layers from the last to the first (Howard & Ruder 2018)."""

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
    """Trains the last layer of each stack first, then the last two, and so on (Raffel et al. 2020, section 3.5.1).

    Encoder and decoder are unfrozen in parallel. Parameters outside of layers, such as embeddings, are trained from the start.
    The optimizer slots of frozen layers do not change.

    Attributes:
      optimizer: the optimizer of trained parameters.
      steps: number of steps per stage. The paper uses the number of fine-tuning steps divided by the number of layers.
    """

    optimizer: Optimizer
    steps: int

    def __post_init__(self):
        check_types(self)
        check_positive(self, "steps")
        if hasattr(self.optimizer, "is_trained"):
            raise UserError(
                "GradualUnfreezing.optimizer is @Groups(), which is not supported. Use @GradualUnfreezing() as the optimizer "
                "of a group in Groups.groups."
            )

    @property
    def learning_rate(self) -> Schedule:
        return self.optimizer.learning_rate

    def identity(self) -> str:
        """Returns the settings that a run must be resumed with."""
        return f"@GradualUnfreezing() of {self.steps} steps, @{type(self.optimizer).__name__}()"

    def make(self, axes: dict) -> optax.GradientTransformation:
        """Makes the transformation. See `Optimizer.make`."""
        inner = self.optimizer.make(axes)
        is_stacked = {path: LAYERS in names for path, names in flatten_dict(axes, is_leaf=lambda _, x: is_axes(x)).items()}

        def init(params: Any) -> UnfreezingState:
            return UnfreezingState(inner.init(params), jnp.zeros((), jnp.int32))

        def update(grads: Any, state: UnfreezingState, params: Any = None) -> tuple[Any, UnfreezingState]:
            stage = 1 + state.step // self.steps
            ndims = {path: grad.ndim for path, grad in flatten_dict(grads).items()}

            def select_trained(path: tuple, new: jax.Array, old: jax.Array | float) -> jax.Array:
                """Returns `new` in trained layers and `old` in frozen ones, for the leaf of a parameter."""
                names = tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))
                owner = next((names[i:] for i in range(len(names)) if names[i:] in ndims), ())
                if not is_stacked.get(owner) or new.ndim != ndims[owner]:
                    return new
                layers = new.shape[0]
                is_trained = jnp.arange(layers) >= layers - stage
                return jnp.where(is_trained.reshape(layers, *[1] * (new.ndim - 1)), new, old)

            mask = lambda tree: jax.tree_util.tree_map_with_path(lambda path, x: select_trained(path, x, 0.0), tree)
            updates, inner_state = inner.update(mask(grads), state.inner, params)
            inner_state = jax.tree_util.tree_map_with_path(select_trained, inner_state, state.inner)
            return mask(updates), UnfreezingState(inner_state, state.step + 1)

        return optax.GradientTransformation(init, update)


class UnfreezingState(NamedTuple):
    """State of the inner optimizer, and number of finished steps."""

    inner: Any
    step: jax.Array
