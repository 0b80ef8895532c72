"""When a run is saved and what is kept of it; what a new run takes from another model. Both names are T5X's."""

import dataclasses
import math
import re
from typing import Any

from t5x_lab.checkpoints.layout import WEIGHTS
from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.macros import macro


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
    """When a run is saved, which of its checkpoints stay, and what happens when storage fails.

    Each rule keeps its own checkpoints, and pinned ones (a file `PINNED` in the checkpoint) stay always.

    Attributes:
      period: steps between checkpoints.
      minutes: one is also made when the last is this old; None for never.
      keep: the newest ones that stay; None for all.
      keep_period: those whose step is a multiple of it stay, for the record; they are made where `period` makes none.
      best_metric: the one with the best value of it stays, such as "eval/<task>/loss": what an evaluation of EVALS measured at
        the checkpoint's step, in its files. Of several, with what is best: {"eval/<task>/loss": "lowest", …}.
      best_is: "lowest" or "highest", of a single one.
      retry_minutes: how long a run goes on without a checkpoint when saving fails; it is tried again all the while.
      on_failure: what happens then: "stop", or "go_on" and keep trying.
    """

    period: int = dataclasses.field(default=1000, metadata=macro("CHECKPOINT_PERIOD"))
    minutes: float | None = 30.0
    keep: int | None = 3
    keep_period: int | None = None
    best_metric: str | dict[str, str] | None = None
    best_is: str = "lowest"
    retry_minutes: float = 30.0
    on_failure: str = "stop"

    def __post_init__(self):
        check_types(self)
        check_positive(self, "period", "minutes", "keep", "keep_period")
        check_range(self, "retry_minutes", 0, math.inf)
        for best_is in (self.best_is, *self.best.values()):
            check_choice("SaveCheckpointConfig.best_is", best_is, ("lowest", "highest"))
        check_choice("SaveCheckpointConfig.on_failure", self.on_failure, ("stop", "go_on"))

    @property
    def best(self) -> dict[str, str]:
        """What is best of each metric by which a checkpoint stays."""
        if isinstance(self.best_metric, str):
            return {self.best_metric: self.best_is}
        return self.best_metric or {}


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
    """What a new run takes from INITIAL_CHECKPOINT_PATH: once, never again when it is continued.

    Without rules, every parameter takes the one of its own name, and neither side may have more than the other. In rules the
    layers of a stack are counted singly: `decoder/layers_0/mlp/wo/kernel`.

    Attributes:
      assignment_map: rules (pattern, source). The first whose pattern matches all of a new parameter's name says which of the
        checkpoint's it takes (\\1 stands for the pattern's first group), or, where `source` is None, that it stays fresh. A
        third entry "transposed" turns the checkpoint's matrix round.
      layers: by stack, the checkpoint's layer that each new layer takes, or None for a fresh one:
        {"decoder": [0, 2, 4, None]}; or a number, of its first layers, behind which all are fresh: {"decoder": 6}. Rules come
        before it.
      extend: logical axes, such as ["vocab"], along which the checkpoint may have fewer entries, the rest of which stay fresh,
        or more, which are left.
      strict: refuse rules that match nothing and parameters that the checkpoint lacks; otherwise these stay fresh.
      weights: of a run that keeps an average of them (AVERAGE_DECAY): "last" or "average".
      carry: what else is restored: "optimizer", its slots and its own count of updates, on which the schedule runs; "step", the
        run's step and its counters of tokens, where a fresh optimizer's schedule goes on. TRAIN_STEPS is counted on from that
        step, as T5X counts it; without, from 0. To begin the schedule anew all the same, set LearningRate.step_offset to the
        checkpoint's step.
    """

    assignment_map: tuple = ()
    layers: dict = dataclasses.field(default_factory=dict)
    extend: tuple = ()
    strict: bool = True
    weights: str = "last"
    carry: tuple = ()

    def __post_init__(self):
        for field in ("assignment_map", "extend", "carry"):
            value = getattr(self, field)
            object.__setattr__(self, field, tuple(value) if isinstance(value, list) else value)
        check_types(self)
        check_choice("RestoreCheckpointConfig.weights", self.weights, WEIGHTS)
        for name in self.carry:
            check_choice("An entry of RestoreCheckpointConfig.carry", name, ("optimizer", "step"))
        for rule in self.assignment_map:
            _check_rule(rule)
        for stack, sources in self.layers.items():
            is_list = isinstance(sources, list | tuple) and all(i is None or isinstance(i, int) for i in sources)
            if not is_list and not (type(sources) is int and sources >= 0):
                raise UserError(
                    f"RestoreCheckpointConfig.layers gives {stack} {sources!r}; give a list with the checkpoint's layer, or "
                    "None, for each new layer, such as [0, 2, 4, None], or the number of its first layers to take."
                )

    @property
    def has_rules(self) -> bool:
        """Whether more is asked for than every parameter under its own name."""
        return bool(self.assignment_map or self.layers or self.extend or not self.strict)


def _check_rule(rule: Any) -> None:
    fits = (
        isinstance(rule, list | tuple)
        and len(rule) in (2, 3)
        and isinstance(rule[0], str)
        and isinstance(rule[1], str | None)
        and tuple(rule[2:]) in ((), ("transposed",))
    )
    if not fits:
        raise UserError(
            f"RestoreCheckpointConfig.assignment_map has the rule {rule!r}; a rule is (pattern, source) or (pattern, source, "
            '"transposed"), where source is a parameter of the checkpoint, or None.'
        )
    try:
        re.compile(rule[0])
    except re.error as error:
        raise UserError(f'RestoreCheckpointConfig.assignment_map has the pattern "{rule[0]}": {error}.') from error
