"""Groups of parameters by their names, each with an optimizer of its own, or with none."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import traverse_util

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import UserError
from t5x_lab.optim.counts import updates
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.optim.schedules import Schedule

_PAIRS = 'give pairs, in their order: [("decoder/.*", @AdamW()), (".*", None)].'


@dataclasses.dataclass(frozen=True)
class Groups:
    """Optimizers by regular expressions over parameters' names, as T5X's MultiOptimizer.

    A frozen group's parameters stay what they were: there is no gradient of them, and no slot.

    Attributes:
      groups: pairs (pattern, optimizer, or None for a frozen group). A parameter, "encoder/layers/mlp/wo/kernel", belongs to
        the first pattern that matches its whole name. The layers of a stack are one parameter.
    """

    groups: tuple[tuple[str, Optimizer | None], ...]

    def __post_init__(self):
        if isinstance(self.groups, dict):  # whose order gin does not keep
            raise UserError(f"Groups.groups is a dictionary; {_PAIRS}")
        check_types(self)
        for pair in self.groups:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UserError(f"Groups.groups has {pair!r}; {_PAIRS}")
        object.__setattr__(self, "groups", tuple(tuple(pair) for pair in self.groups))
        for pattern, optimizer in self.groups:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise UserError(f"Groups.groups has {pattern!r}, which is no regular expression: {error}.") from error
            if optimizer is not None and (isinstance(optimizer, type) or not isinstance(optimizer, Optimizer)):
                raise UserError(
                    f'Groups.groups has {optimizer!r} for "{pattern}"; it must be an optimizer, such as @AdamW(), or None for '
                    "parameters that stay as they are."
                )
        if all(optimizer is None for _, optimizer in self.groups):
            raise UserError('Groups.groups trains nothing. Give one of the patterns an optimizer: ("decoder/.*", @AdamW()).')

    @property
    def learning_rate(self) -> Schedule:
        """That of the first group that is trained."""
        return next(iter(self.learning_rates.values()))

    @property
    def learning_rates(self) -> dict[str, Schedule]:
        """By pattern, of the groups that are trained."""
        return {pattern: optimizer.learning_rate for pattern, optimizer in self.groups if optimizer is not None}

    def is_trained(self, name: str) -> bool:
        """Whether a parameter is of a group that is not frozen."""
        return self._group_of(name)[1] is not None

    def check_names(self, names: Sequence[str]) -> None:
        """Raises a `UserError` for a pattern that is the first to match none of all parameters' names."""
        used = {self._group_of(name)[0] for name in names}
        for pattern, _ in self.groups:
            if pattern not in used:
                raise UserError(
                    f'No parameter belongs to the group "{pattern}". Names are such as {", ".join(sorted(names)[:8])}.'
                )

    def identity(self) -> str:
        """What a run is continued with unchanged: the groups, and the kinds of their optimizers."""
        kind = lambda optimizer: None if optimizer is None else f"@{type(optimizer).__name__}()"
        return f"@Groups() of { ({pattern: kind(optimizer) for pattern, optimizer in self.groups}) }"

    def make(self, axes: dict) -> optax.GradientTransformation:
        """See `Optimizer.make`. Its state is a tuple of those of the groups that are trained, in their order."""
        of_group = lambda pattern: lambda name: self._group_of(name)[0] == pattern
        made = []
        for pattern, optimizer in self.groups:
            if optimizer is None:
                continue
            mine = select(axes, of_group(pattern))
            made.append((of_group(pattern), optimizer.make(mine)))

        def init(params: Any) -> tuple:
            return tuple(transformation.init(select(params, mine)) for mine, transformation in made)

        def update(updates: Any, states: tuple, params: Any = None) -> tuple[Any, tuple]:
            found: dict = {}
            new_states = []
            for (mine, transformation), state in zip(made, states, strict=True):
                of_params = None if params is None else select(params, mine)
                changed, state = transformation.update(select(updates, mine), state, of_params)
                found = merge(found, changed)
                new_states.append(state)
            return found, tuple(new_states)

        return optax.GradientTransformation(init, update)

    def _group_of(self, name: str) -> tuple[str, Optimizer | None]:
        for pattern, optimizer in self.groups:
            if re.fullmatch(pattern, name):
                return pattern, optimizer
        raise UserError(
            f'No pattern of Groups.groups matches the parameter {name}. A last one, ".*", takes all others: with None they '
            "stay as they are."
        )


def learning_rates(optimizer: Optimizer) -> dict[str, Schedule]:
    """What is logged of an optimizer's rates, by the names of the metrics; of each group that is trained, in their order."""
    by_group: Mapping[str, Schedule] = getattr(optimizer, "learning_rates", {})
    more = {f"learning_rate/{name}": rate for name, rate in by_group.items()} if len(by_group) > 1 else {}
    return {"learning_rate": optimizer.learning_rate, **more}


def current_rates(optimizer: Optimizer, opt_state: Any, step: jax.Array) -> dict[str, jax.Array]:
    """The rates of the update that comes next, by the names of the metrics.

    Each is its schedule's at the optimizer's own count, or at `step` where its state counts none.
    """
    rates = learning_rates(optimizer)
    of_groups = list(opt_state) if len(rates) > 1 else []
    return {
        name: rate(updates(state, step)) for (name, rate), state in zip(rates.items(), [opt_state, *of_groups], strict=True)
    }


def optimizer_identity(optimizer: Optimizer) -> str:
    """What a run is continued with unchanged."""
    identity = getattr(optimizer, "identity", lambda: f"@{type(optimizer).__name__}()")
    return identity()


def trained(optimizer: Optimizer, names: Sequence[str], trainable: str | None = None) -> Callable[[str], bool]:
    """Whether a parameter, one of these names, is trained: where the optimizer does not freeze it, and TRAINABLE matches it."""
    getattr(optimizer, "check_names", lambda names: None)(names)
    in_groups = getattr(optimizer, "is_trained", lambda name: True)
    if trainable is None:
        return in_groups
    try:
        pattern = re.compile(trainable)
    except re.error as error:
        raise UserError(f'TRAINABLE is "{trainable}", which is no regular expression: {error}.') from error
    if not any(pattern.fullmatch(name) and in_groups(name) for name in names):
        raise UserError(f'TRAINABLE is "{trainable}", which trains nothing. Names are such as {", ".join(sorted(names)[:8])}.')
    return lambda name: bool(pattern.fullmatch(name)) and in_groups(name)


def flat_names(tree: dict) -> dict[str, Any]:
    """The leaves of nested dicts by their names, joined by slashes."""
    return traverse_util.flatten_dict(tree, sep="/")


def select(tree: dict, wanted: Callable[[str], bool]) -> dict:
    """The part of nested dicts whose leaves have names that are wanted."""
    flat = flat_names(tree)
    return traverse_util.unflatten_dict({name: leaf for name, leaf in flat.items() if wanted(name)}, sep="/")


def merge(one: dict, other: dict) -> dict:
    """Two parts of nested dicts as one."""
    return traverse_util.unflatten_dict(flat_names(one) | flat_names(other), sep="/")
