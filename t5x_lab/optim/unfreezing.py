"""Parameters that are trained from a later step on: gradual unfreezing (Howard & Ruder 2018), and fresh parameters first."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_lab.config.checks import check_pattern, check_positive, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.networks.stacked import LAYERS
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.optim.schedules import Schedule
from t5x_lab.partitioning.rules import is_axes


@dataclasses.dataclass(frozen=True)
class GradualUnfreezing:
    """Trains the last layer of each stack first, then the last two, and so on (Raffel et al. 2020, section 3.5.1).

    Encoder and decoder are unfrozen in parallel. Parameters outside of layers, such as embeddings, are trained from the start.
    The optimizer slots of frozen layers follow their gradients: with slots of zero and the step count of all others, Adam's
    first step of a layer would be several times the learning rate.

    Attributes:
      optimizer: the optimizer of trained parameters.
      steps: number of steps per stage. The paper uses the number of fine-tuning steps divided by the number of layers.
    """

    optimizer: Optimizer
    steps: int

    def __post_init__(self):
        check_types(self)
        check_positive(self, "steps")
        _check_inner(self)

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
        if not any(is_stacked.values()):
            raise UserError(
                f'@GradualUnfreezing() unfreezes layers that are stacked on an axis "{LAYERS}". No parameter of this network '
                "has one, so all would be trained from the start. Stack the layers, or use TRAINABLE or @Groups()."
            )

        def freeze(path: tuple[str, ...], update: jax.Array, step: jax.Array) -> jax.Array:
            if not is_stacked[path]:
                return update
            layers = len(update)
            is_trained = jnp.arange(layers) >= layers - 1 - step // self.steps
            return jnp.where(is_trained.reshape(layers, *[1] * (update.ndim - 1)), update, 0.0)

        return _with_freezing(inner, freeze)


@dataclasses.dataclass(frozen=True)
class TrainFirst:
    """Trains some parameters alone for the first steps, and then all of them.

    It is for fresh parameters among pre-trained ones, such as the cross-attention of an encoder-decoder that is made of two
    decoders (Zhang et al. 2025, arXiv 2504.06225). Slots of frozen ones follow their gradients, as in `GradualUnfreezing`.

    Attributes:
      optimizer: the optimizer of all parameters.
      parameters: regular expression that matches the full names of the parameters that are trained from the start.
      steps: number of steps in which only these are trained.
    """

    optimizer: Optimizer
    parameters: str
    steps: int = 1000

    def __post_init__(self):
        check_types(self)
        check_positive(self, "steps")
        check_pattern("TrainFirst.parameters", self.parameters)
        _check_inner(self)

    @property
    def learning_rate(self) -> Schedule:
        return self.optimizer.learning_rate

    def identity(self) -> str:
        """Returns the settings that a run must be resumed with."""
        return f"@TrainFirst() of {self.parameters} for {self.steps} steps, @{type(self.optimizer).__name__}()"

    def make(self, axes: dict) -> optax.GradientTransformation:
        """Makes the transformation. See `Optimizer.make`."""
        names = ["/".join(path) for path in flatten_dict(axes, is_leaf=lambda _, x: is_axes(x))]
        is_first = {name: re.fullmatch(self.parameters, name) is not None for name in names}
        if len(set(is_first.values())) < 2:
            matched = "all" if any(is_first.values()) else "none"
            raise UserError(
                f'TrainFirst.parameters is "{self.parameters}", which matches {matched} of the parameters. Names are such as '
                f"{names[0]}."
            )

        def freeze(path: tuple[str, ...], update: jax.Array, step: jax.Array) -> jax.Array:
            return update if is_first["/".join(path)] else jnp.where(step >= self.steps, update, 0.0)

        return _with_freezing(self.optimizer.make(axes), freeze)


def _check_inner(config: GradualUnfreezing | TrainFirst) -> None:
    """Raises a `UserError` if the optimizer within is one of groups, or has parameters of its own."""
    name = type(config).__name__
    if hasattr(config.optimizer, "gradient_point") and not hasattr(config.optimizer, "is_trained"):
        raise UserError(
            f"{name}.optimizer is @{type(config.optimizer).__name__}(), whose steps are averaged also where parameters are "
            "frozen. Use @AdamW()."
        )
    if hasattr(config.optimizer, "is_trained"):
        raise UserError(
            f"{name}.optimizer is @Groups(), which is not supported. Use @{name}() as the optimizer of a group in "
            "Groups.groups."
        )


def _with_freezing(
    inner: optax.GradientTransformation, freeze: Callable[[tuple[str, ...], jax.Array, jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Returns the transformation with updates changed by `freeze(path, update, finished steps)`."""

    def init(params: Any) -> UnfreezingState:
        return UnfreezingState(inner.init(params), jnp.zeros((), jnp.int32))

    def update(grads: Any, state: UnfreezingState, params: Any = None) -> tuple[Any, UnfreezingState]:
        updates, inner_state = inner.update(grads, state.inner, params)
        frozen = {path: freeze(path, update, state.step) for path, update in flatten_dict(updates).items()}
        return unflatten_dict(frozen), UnfreezingState(inner_state, state.step + 1)

    return optax.GradientTransformation(init, update)


class UnfreezingState(NamedTuple):
    """State of the inner optimizer, and number of finished steps."""

    inner: Any
    step: jax.Array
