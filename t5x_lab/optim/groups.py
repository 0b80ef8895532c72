"""Parameter groups by regular expressions, each with its own optimizer or frozen."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import traverse_util

from t5x_lab.config.checks import check_types, implements
from t5x_lab.config.errors import UserError
from t5x_lab.optim.counts import updates
from t5x_lab.optim.optimizers import Optimizer, gradient_point
from t5x_lab.optim.schedules import Schedule

_PAIRS = 'Use an ordered list of pairs: [("decoder/.*", @AdamW()), (".*", None)].'


@dataclasses.dataclass(frozen=True)
class Groups:
    """Optimizers by regular expressions of parameter names, as T5X's MultiOptimizer.

    The parameters of a frozen group have no gradient and no optimizer slots.

    Attributes:
      groups: pairs (pattern, optimizer), with None for a frozen group. A parameter such as "encoder/layers/mlp/wo/kernel"
        belongs to the first pattern that matches its full name. The layers of a stack are one parameter.
    """

    groups: tuple[tuple[str, Optimizer | None], ...]

    def __post_init__(self):
        if isinstance(self.groups, dict):  # gin does not keep the order of a dictionary
            raise UserError(f"Groups.groups is a dictionary, whose order is lost. {_PAIRS}")
        check_types(self)
        for pair in self.groups:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UserError(f"Groups.groups has {pair!r}. {_PAIRS}")
        object.__setattr__(self, "groups", tuple(tuple(pair) for pair in self.groups))
        for pattern, optimizer in self.groups:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise UserError(f"Groups.groups has {pattern!r}, which is not a valid regular expression: {error}.") from error
            if optimizer is not None and not implements(optimizer, Optimizer):
                raise UserError(
                    f'Groups.groups has {optimizer!r} for "{pattern}". It must be an optimizer, such as @AdamW(), or None for '
                    "frozen parameters."
                )
        if all(optimizer is None for _, optimizer in self.groups):
            raise UserError(
                'All groups in Groups.groups are frozen. Set an optimizer for one of them: ("decoder/.*", @AdamW()).'
            )

    @property
    def learning_rate(self) -> Schedule:
        """Schedule of the first trained group."""
        return next(iter(self.learning_rates.values()))

    @property
    def learning_rates(self) -> dict[str, Schedule]:
        """Schedules of the trained groups by pattern."""
        return {pattern: optimizer.learning_rate for pattern, optimizer in self.groups if optimizer is not None}

    def is_trained(self, name: str) -> bool:
        """Returns whether a parameter belongs to a trained group."""
        return self._find_group(name)[1] is not None

    def check_names(self, names: Sequence[str]) -> None:
        """Raises a `UserError` for a group without parameters, given the names of all parameters."""
        used = {self._find_group(name)[0] for name in names}
        for pattern, _ in self.groups:
            if pattern not in used:
                raise UserError(
                    f'No parameter belongs to the group "{pattern}". Examples of names: {", ".join(sorted(names)[:8])}.'
                )

    def identity(self) -> str:
        """Returns the settings that a run must be resumed with: groups and optimizer types."""
        kind = lambda optimizer: None if optimizer is None else f"@{type(optimizer).__name__}()"
        return f"@Groups() of { ({pattern: kind(optimizer) for pattern, optimizer in self.groups}) }"

    def make(self, axes: dict) -> optax.GradientTransformation:
        """Makes the transformation.

        See `Optimizer.make`. Its state is a tuple of the states of the trained groups, in order.
        """
        transformations = []
        for pattern, optimizer in self.groups:
            if optimizer is None:
                continue
            is_member = self._membership(pattern)
            transformations.append((is_member, optimizer.make(select(axes, is_member))))

        def init(params: Any) -> tuple:
            return tuple(transformation.init(select(params, is_member)) for is_member, transformation in transformations)

        def update(updates: Any, states: tuple, params: Any = None) -> tuple[Any, tuple]:
            new_updates: dict = {}
            new_states = []
            for (is_member, transformation), state in zip(transformations, states, strict=True):
                group_params = None if params is None else select(params, is_member)
                group_updates, state = transformation.update(select(updates, is_member), state, group_params)
                new_updates = merge(new_updates, group_updates)
                new_states.append(state)
            return new_updates, tuple(new_states)

        return optax.GradientTransformation(init, update)

    def gradient_point(self, states: tuple, params: Any) -> Any:
        """Returns the parameters at which the gradient is computed, by group."""
        trained = [(pattern, optimizer) for pattern, optimizer in self.groups if optimizer is not None]
        points: dict = {}
        for (pattern, optimizer), state in zip(trained, states, strict=True):
            group_params = select(params, self._membership(pattern))
            points = merge(points, gradient_point(optimizer, state, group_params))
        return points

    def _membership(self, pattern: str) -> Callable[[str], bool]:
        """Returns a function of names: whether a parameter belongs to the group of a pattern."""
        return lambda name: self._find_group(name)[0] == pattern

    def _find_group(self, name: str) -> tuple[str, Optimizer | None]:
        for pattern, optimizer in self.groups:
            if re.fullmatch(pattern, name):
                return pattern, optimizer
        raise UserError(
            f'No pattern of Groups.groups matches the parameter {name}. Add a last pair for all others, such as (".*", None) '
            "to freeze them."
        )


def learning_rates(optimizer: Optimizer) -> dict[str, Schedule]:
    """Returns the learning-rate schedules of an optimizer by metric name, of each trained group if there are several."""
    by_group: Mapping[str, Schedule] = getattr(optimizer, "learning_rates", {})
    group_rates = {f"learning_rate/{name}": rate for name, rate in by_group.items()} if len(by_group) > 1 else {}
    return {"learning_rate": optimizer.learning_rate, **group_rates}


def current_rates(optimizer: Optimizer, opt_state: Any, step: jax.Array) -> dict[str, jax.Array]:
    """Returns the learning rates of the next update by metric name.

    A schedule is evaluated at the optimizer's own count, or at `step` if its state has none.
    """
    rates = learning_rates(optimizer)
    states = [opt_state, *(opt_state if len(rates) > 1 else ())]
    return {name: rate(updates(state, step)) for (name, rate), state in zip(rates.items(), states, strict=True)}


def optimizer_identity(optimizer: Optimizer) -> str:
    """Returns the optimizer settings that a run must be resumed with."""
    identity = getattr(optimizer, "identity", lambda: f"@{type(optimizer).__name__}()")
    return identity()


def trained_predicate(optimizer: Optimizer, names: Sequence[str], trainable: str | None = None) -> Callable[[str], bool]:
    """Returns a function (name) -> bool: whether the optimizer does not freeze a parameter and TRAINABLE matches it.

    Args:
      optimizer: the optimizer.
      names: names of all parameters.
      trainable: TRAINABLE, a regular expression. None = all.

    Raises:
      UserError: for an invalid expression, or one that matches no parameter.
    """
    getattr(optimizer, "check_names", lambda names: None)(names)
    is_in_group = getattr(optimizer, "is_trained", lambda name: True)
    if trainable is None:
        return is_in_group
    try:
        pattern = re.compile(trainable)
    except re.error as error:
        raise UserError(f'TRAINABLE is "{trainable}", which is not a valid regular expression: {error}.') from error
    if not any(pattern.fullmatch(name) and is_in_group(name) for name in names):
        raise UserError(
            f'TRAINABLE is "{trainable}", which matches no parameter. Examples of names: {", ".join(sorted(names)[:8])}.'
        )
    return lambda name: bool(pattern.fullmatch(name)) and is_in_group(name)


def flat_names(tree: dict) -> dict[str, Any]:
    """Returns the leaves of nested dicts by name, joined with slashes."""
    return traverse_util.flatten_dict(tree, sep="/")


def select(tree: dict, is_selected: Callable[[str], bool]) -> dict:
    """Returns the part of nested dicts whose leaf names are selected."""
    flat = flat_names(tree)
    return traverse_util.unflatten_dict({name: leaf for name, leaf in flat.items() if is_selected(name)}, sep="/")


def merge(tree: dict, other: dict) -> dict:
    """Merges two nested dicts."""
    return traverse_util.unflatten_dict(flat_names(tree) | flat_names(other), sep="/")
