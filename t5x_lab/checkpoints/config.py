"""`SaveCheckpointConfig` and `RestoreCheckpointConfig`, with T5X's names."""

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
    """When checkpoints are saved, which ones are kept, and how storage failures are handled.

    A checkpoint is kept if any rule keeps it, or if it contains a file `PINNED`.

    Attributes:
      period: number of steps between checkpoints.
      minutes: save also if the last checkpoint is older than this. None = never.
      keep: number of latest checkpoints to keep. None = all.
      keep_period: keep checkpoints whose step is a multiple of this, and save at these steps.
      best_metric: keep the checkpoint with the best value of this metric of EVALS, such as "eval/<task>/loss". Several metrics:
        {"eval/<task>/loss": "lowest", ...}.
      best_is: "lowest" or "highest", for a single metric.
      retry_minutes: time for which a failed save is retried while training continues.
      grace_seconds: time for which the last save is retried after SIGTERM or Ctrl-C. A cluster kills a process some time later:
        Slurm after KillWait, Kubernetes after terminationGracePeriodSeconds, of 30 seconds by default.
      on_failure: after that time, or after a permanent error, "stop", or "go_on" training and retrying.
    """

    period: int = dataclasses.field(default=1000, metadata=macro("CHECKPOINT_PERIOD"))
    minutes: float | None = 30.0
    keep: int | None = 3
    keep_period: int | None = None
    best_metric: str | dict[str, str] | None = None
    best_is: str = "lowest"
    retry_minutes: float = 30.0
    grace_seconds: float = 90.0
    on_failure: str = "stop"

    def __post_init__(self):
        check_types(self)
        check_positive(self, "period", "minutes", "keep", "keep_period")
        check_range(self, "retry_minutes", 0, math.inf)
        check_range(self, "grace_seconds", 0, math.inf)
        for best_is in (self.best_is, *self.best.values()):
            check_choice("SaveCheckpointConfig.best_is", best_is, ("lowest", "highest"))
        check_choice("SaveCheckpointConfig.on_failure", self.on_failure, ("stop", "go_on"))

    @property
    def best(self) -> dict[str, str]:
        """Whether the lowest or highest value is best, by metric."""
        if isinstance(self.best_metric, str):
            return {self.best_metric: self.best_is}
        return self.best_metric or {}


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
    """Settings for loading INITIAL_CHECKPOINT_PATH, which happens once, at the start of a new run.

    Without rules, names and shapes of the parameters must be equal. In rules the layers of a stack have separate names, such as
    `decoder/layers_0/mlp/wo/kernel`.

    Attributes:
      assignment_map: rules (pattern, source). The first pattern that matches the full name of a new parameter determines the
        parameter of the checkpoint to load, where \\1 is the first group of the pattern. With the source None the parameter is
        freshly initialized. A third entry "transposed" transposes the matrix.
      others: further checkpoints by name, {"encoder": "/path/to/run"}. The source of a rule is one of their parameters if it
        begins with the name: "encoder:decoder/final_norm/scale".
      layers: for each stack the checkpoint's layer of each new layer, None = fresh: {"decoder": [0, 2, 4, None]}; or the number
        of first layers to load: {"decoder": 6}. Rules in `assignment_map` take precedence.
      extend: logical axes, such as ["vocab"], along which sizes may differ. Missing entries are fresh, additional ones ignored.
      strict: raise an error for a rule that is never the first match and for a parameter that the checkpoint lacks. If False,
        such rules are ignored and such parameters are fresh.
      weights: "last" or, for a run with AVERAGE_DECAY, "average".
      carry: further state to restore. "optimizer": slots and the update count of the schedule. "step": the run's step and token
        counters; a fresh optimizer's schedule continues there, and TRAIN_STEPS counts from that step, as in T5X, instead of 0.
        To restart the schedule, set LearningRate.step_offset to the checkpoint's step.
    """

    assignment_map: tuple = ()
    others: dict = dataclasses.field(default_factory=dict)
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
        for name, path in self.others.items():
            if not isinstance(path, str) or not any(str(rule[1]).startswith(f"{name}:") for rule in self.assignment_map):
                raise UserError(
                    f'RestoreCheckpointConfig.others has {path!r} for "{name}", which no rule uses. Values are paths, and '
                    f'rules in assignment_map use their parameters as "{name}:PARAMETER".'
                )
        for stack, sources in self.layers.items():
            is_list = isinstance(sources, list | tuple) and all(i is None or isinstance(i, int) for i in sources)
            if not is_list and not (type(sources) is int and sources >= 0):
                raise UserError(
                    f"RestoreCheckpointConfig.layers has {sources!r} for {stack}. Use a list with the checkpoint's layer or "
                    "None for each new layer, such as [0, 2, 4, None], or the number of first layers to load."
                )

    @property
    def has_rules(self) -> bool:
        """Whether there are rules, so that names and shapes may differ."""
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
            f"RestoreCheckpointConfig.assignment_map has the rule {rule!r}. A rule is (pattern, source) or (pattern, source, "
            '"transposed"), where source is a parameter of the checkpoint or None.'
        )
    try:
        re.compile(rule[0])
    except re.error as error:
        raise UserError(f'RestoreCheckpointConfig.assignment_map has the pattern "{rule[0]}": {error}.') from error
