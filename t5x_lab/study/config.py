"""`Study`: a grid of training runs as gin configures it, from factors and stages.

A factor has named values, such as the architectures that are compared. A stage is a command that every cell of the grid runs,
such as pre-training, with the settings of some factors. Cells that do not differ in the factors of a stage and of the stages
before it share that stage's run.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gin

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice, did_you_mean
from t5x_lab.config.log import log_once
from t5x_lab.study.measures import Measure

COMMANDS = ("train", "eval")
QUANTITIES = (
    "tokens", "batch_tokens", "steps", "flops", "parameters", "seed", "vocabulary", "dropout", "precision", "text", "optimizer",
)  # fmt: skip
OTHER_STAGES = "*"
_NAME = re.compile(r"[A-Za-z0-9_]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """A setting that varies in a study.

    Attributes:
      name: name in file names and tables, such as "objective".
      values: gin files and bindings by the name of the value, such as {"causal decoder": ("models/decoder/tiny.gin",)}. Entries
        that end with .gin are files, the others are bindings or imports. If stages need different settings, the entry is a
        dictionary by stage name, in which "*" is for all other stages.
    """

    name: str
    values: dict

    def __post_init__(self):
        check_types(self)
        _check_name("Factor.name", self.name)
        if not self.values:
            raise UserError(f'The factor "{self.name}" has no values. Set {self.name}/Factor.values.')
        by_slug: dict[str, str] = {}
        for value in self.values:
            if by_slug.setdefault(slug(value), value) != value:
                raise UserError(
                    f'The values "{by_slug[slug(value)]}" and "{value}" of the factor "{self.name}" have the same file name, '
                    f'"{slug(value)}". Rename one.'
                )
        for value, settings in self.values.items():
            for by_stage in settings.values() if isinstance(settings, dict) else [settings]:
                _check_settings(f'The value "{value}" of the factor "{self.name}"', by_stage)

    def settings(self, value: str, stage: str) -> tuple[str, ...]:
        """Returns the gin files and bindings of a value for a stage."""
        settings = self.values[value]
        if isinstance(settings, dict):
            settings = settings.get(stage, settings.get(OTHER_STAGES, ()))
        return tuple(settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of every cell of a study.

    Attributes:
      name: name in file names and tables, such as "pretrain".
      settings: gin files and bindings of all cells. The settings of the factors follow and override them.
      factors: names of the factors whose settings the stage has, in this order.
      overrides: gin files and bindings of all cells that override those of the factors, such as the sizes of a scale.
      after: names of the stages that this one continues. The first of them that a cell has is meant. A training starts from the
        checkpoint of that stage, an evaluation evaluates it. None as the last of them = a training from scratch in cells that
        have none of them. () = the first stage.
      tasks: gin files and bindings by task, such as {"sst2": ('MIXTURE_OR_TASK_NAME = "glue_sst2"',)}, after `overrides`. The
        study has a stage of each task, named "<stage>_<task>", which continues the same task of a stage with tasks.
      when: values by factor of the cells that have this stage, such as {"adaptation": ("LM-A",)}. {} = all cells.
      steps: number of steps of this stage, or a dictionary of it by scale. TRAIN_STEPS is set to it, plus the steps of the
        stages before if `RestoreCheckpointConfig.carry` has "step". None = the settings have TRAIN_STEPS or TRAIN_TOKENS.
      flops: name of a factor whose values are training FLOPs, such as "1e15". The stage takes as many steps as they allow.
      command: "train", or "eval" for evaluations of the checkpoint of the stage before.
      seeds: number of seeds that the stage runs with. Cells with later seeds share the run of the first. None = all.
    """

    name: str
    settings: tuple = ()
    factors: tuple = ()
    overrides: tuple = ()
    after: tuple = ()
    tasks: dict = dataclasses.field(default_factory=dict)
    when: dict = dataclasses.field(default_factory=dict)
    steps: int | dict | None = None
    flops: str | None = None
    command: str = "train"
    seeds: int | None = None

    def __post_init__(self):
        check_types(self)
        _check_name("Stage.name", self.name)
        _check_settings(f'The stage "{self.name}"', (*self.settings, *self.overrides))
        for task, settings in self.tasks.items():
            _check_name(f"a task of {self.name}/Stage.tasks", task)
            _check_settings(f'The task "{task}" of the stage "{self.name}"', settings)
        check_choice("Stage.command", self.command, COMMANDS)
        check_positive(self, "seeds")
        if self.steps is not None and self.flops is not None:
            raise UserError(f"{self.name}/Stage.steps and {self.name}/Stage.flops are both set. Remove one of them.")
        if None in self.after[:-1]:
            raise UserError(f"{self.name}/Stage.after is {self.after}. None must be the last of its entries.")
        if self.command == "eval" and (not self.after or None in self.after):
            raise UserError(f'The stage "{self.name}" evaluates, but may come after no stage. Set {self.name}/Stage.after.')

    @property
    def settings_name(self) -> str:
        """The name by which settings by stage are chosen."""
        return self.name

    def steps_at(self, scale: str) -> int | None:
        """Returns the number of steps at a scale.

        Raises:
          UserError: if the stage has steps for other scales only.
        """
        if not isinstance(self.steps, dict):
            return self.steps
        if scale not in self.steps:
            raise UserError(
                f'{self.name}/Stage.steps has no steps for the scale "{scale}".{did_you_mean(scale, self.steps)} Scales: '
                f"{', '.join(self.steps)}."
            )
        return self.steps[scale]

    def applies_to(self, cell: Mapping[str, Any]) -> bool:
        return all(cell[factor] in values for factor, values in self.when.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskStage(Stage):
    """A task of a stage with tasks.

    Attributes:
      group: name of that stage.
    """

    group: str

    @property
    def settings_name(self) -> str:
        return self.group


def _stages_of_tasks(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Returns the stages, with those of the tasks in place of a stage with tasks."""
    tasks = {stage.name: stage.tasks for stage in stages}
    expanded: list[Stage] = []
    for stage in stages:
        fields = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}
        for task, settings in stage.tasks.items():
            after = tuple(f"{name}_{task}" if task in tasks.get(name, ()) else name for name in stage.after)
            own = {"name": f"{stage.name}_{task}", "after": after, "overrides": (*stage.overrides, *settings), "tasks": {}}
            expanded.append(TaskStage(**{**fields, **own}, group=stage.name))
        if not stage.tasks:
            expanded.append(stage)
    return tuple(expanded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsoFlop:
    """A fit of compute-optimal sizes, see `t5x_lab.study.isoflop`. Cells that differ in other factors are fitted apart.

    Attributes:
      measure: name of the measure that is the loss.
      budget: name of the factor whose values are FLOP budgets.
      size: name of the factor whose values are model sizes.
    """

    measure: str
    budget: str
    size: str

    def __post_init__(self):
        check_types(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving:
    """A comparison of an adaptation with training from scratch. Both must have evaluated the same loss during training.

    Attributes:
      name: title, such as "LM-A".
      adapted: values by factor of the cells that are adapted. Other cells do not count.
      scratch: values by factor of the cells that are trained from scratch.
      stage: stage of the adaptation.
      scratch_stage: stage of the training from scratch.
      evaluation: name of the evaluation with the held-out losses, whose mean over tasks counts.
      published: a published ratio.
    """

    name: str
    adapted: dict
    scratch: dict
    stage: str
    scratch_stage: str
    evaluation: str = "eval"
    published: float | None = None

    def __post_init__(self):
        check_types(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs: each combination of factor values is a cell, and each cell has a run of every stage.

    Attributes:
      factors: the factors, in the order of tables.
      stages: the stages, each after those that it continues. Those with tasks are replaced by a stage for each task.
      settings: gin files and bindings of all trainings that override all others, such as those of another corpus, or a
        dictionary of them by stage.
      scale: replaces "{scale}" in the names of gin files, such as "tiny" or "paper".
      seeds: seeds of the cells.
      exclude: combinations without a cell, as dictionaries of values by factor.
      equal: quantities that must be equal in all cells of a stage. See `t5x_lab.study.equality`.
      tolerance: relative difference of FLOPs and parameters that counts as equal.
      measures: numbers of the report, see `t5x_lab.study.measures.Measure`.
      isoflop: fit of compute-optimal sizes. None = no fit.
      savings: adaptations whose tokens are compared with those of training from scratch, see `t5x_lab.study.savings.Saving`.
    """

    factors: tuple
    stages: tuple
    settings: tuple | dict = ()
    scale: str = "tiny"
    seeds: tuple = (0,)
    exclude: tuple = ()
    equal: tuple = ("tokens", "seed", "vocabulary", "dropout", "precision", "text", "optimizer")
    tolerance: float = 0.02
    measures: tuple = ()
    isoflop: IsoFlop | None = None
    savings: tuple = ()

    def __post_init__(self):
        check_types(self)
        for kind, parts in (("factors", self.factors), ("stages", self.stages)):
            names = [part.name for part in parts]
            if not names or len(set(names)) < len(names):
                raise UserError(f"Study.{kind} has {', '.join(names) or 'no entries'}. It needs entries with different names.")
        groups = list(dict.fromkeys(stage.settings_name for stage in self.stages))
        object.__setattr__(self, "stages", _stages_of_tasks(self.stages))
        for quantity in self.equal:
            check_choice("Study.equal", quantity, QUANTITIES)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"SEEDS is {self.seeds}. It must be a tuple of different numbers, such as (0, 1, 2).")
        earlier: list[str] = []
        for stage in self.stages:
            self._check_values(f"{stage.name}/Stage.when", stage.when)
            for factor in stage.factors:
                self._factor(f"{stage.name}/Stage.factors", factor)
            if stage.flops is not None:
                self._check_flops(stage.flops, stage)
            for name in stage.after:
                if name not in (*earlier, None):
                    raise UserError(
                        f'{stage.name}/Stage.after has "{name}", which is not an earlier stage.{did_you_mean(name, earlier)} '
                        f"Earlier stages: {', '.join(earlier) or 'none'}."
                    )
            earlier.append(stage.name)
        for factor in self.factors:
            _log_unused_stages(factor, groups)
        for setting, settings in self.settings.items() if isinstance(self.settings, dict) else [("", self.settings)]:
            if isinstance(self.settings, dict) and setting not in groups:
                raise UserError(
                    f'Study.settings has "{setting}", which is not a stage.{did_you_mean(setting, groups)} Stages: '
                    f"{', '.join(groups)}."
                )
            _check_settings("Study.settings", settings)
        for measure in self.measures:
            for setting in ("within", "best_of"):
                for factor in getattr(measure, setting):
                    self._factor(f'Measure.{setting} of "{measure.name}"', factor)
        if self.isoflop:
            self._check_isoflop(self.isoflop)
        for saving in self.savings:
            for setting, stage in (("stage", saving.stage), ("scratch_stage", saving.scratch_stage)):
                if stage not in earlier:
                    raise UserError(
                        f'{saving.name}/Saving.{setting} is "{stage}", which is not a stage.{did_you_mean(stage, earlier)} '
                        f"Stages: {', '.join(earlier)}."
                    )
            for setting, values in (("adapted", saving.adapted), ("scratch", saving.scratch)):
                self._check_values(f"{saving.name}/Saving.{setting}", {name: (value,) for name, value in values.items()})
        for combination in self.exclude:
            self._check_values("Study.exclude", {factor: (value,) for factor, value in combination.items()})

    def settings_of(self, stage: Stage) -> tuple[str, ...]:
        """Returns the overriding settings of a stage. Those that are not by stage are for trainings."""
        if isinstance(self.settings, dict):
            return tuple(self.settings.get(stage.settings_name, ()))
        return tuple(self.settings) if stage.command == "train" else ()

    def cells(self) -> list[dict[str, str]]:
        """Returns the values of each cell by factor, in the order of the factors."""
        names = [factor.name for factor in self.factors]
        cells = [dict(zip(names, values)) for values in itertools.product(*(factor.values for factor in self.factors))]
        return [cell for cell in cells if not any(combination.items() <= cell.items() for combination in self.exclude)]

    def _check_flops(self, name: str, stage: Stage) -> None:
        for value in self._factor(f"{stage.name}/Stage.flops", name).values:
            if _parse_flops(value) is None:
                raise UserError(
                    f'{stage.name}/Stage.flops is the factor "{name}", whose value "{value}" is not a number of FLOPs. Use '
                    'values such as "1e15".'
                )
        if name not in stage.factors:
            raise UserError(f'{stage.name}/Stage.flops is the factor "{name}". Add it to {stage.name}/Stage.factors.')

    def _check_isoflop(self, isoflop: IsoFlop) -> None:
        for field in ("budget", "size"):
            self._factor(f"IsoFlop.{field}", getattr(isoflop, field))
        names = [measure.name for measure in self.measures]
        if isoflop.measure not in names:
            raise UserError(
                f'IsoFlop.measure is "{isoflop.measure}", which is not a measure.{did_you_mean(isoflop.measure, names)} '
                f"Measures: {', '.join(names) or 'none'}."
            )

    def _factor(self, setting: str, name: str) -> Factor:
        for factor in self.factors:
            if factor.name == name:
                return factor
        names = [factor.name for factor in self.factors]
        raise UserError(
            f'{setting} has "{name}", which is not a factor.{did_you_mean(name, names)} Factors: {", ".join(names)}.'
        )

    def _check_values(self, setting: str, by_factor: Mapping[str, tuple]) -> None:
        for name, values in by_factor.items():
            factor = self._factor(setting, name)
            for value in values:
                if value not in factor.values:
                    raise UserError(
                        f'{setting} has the value "{value}", which the factor "{name}" does not have.'
                        f"{did_you_mean(value, factor.values)} Its values: {', '.join(factor.values)}."
                    )


def _log_unused_stages(factor: Factor, stages: Collection[str]) -> None:
    for value, settings in factor.values.items():
        for name in settings if isinstance(settings, dict) else ():
            if name not in stages and name != OTHER_STAGES:
                log_once(
                    f'The value "{value}" of the factor "{factor.name}" has settings for "{name}", which is not a stage.'
                    f"{did_you_mean(name, stages)}"
                )


def _parse_flops(value: str) -> float | None:
    """Returns the number of FLOPs that a factor's value names, None if it is not a number above 0."""
    try:
        flops = float(value)
    except ValueError:
        return None
    return flops if 0 < flops < math.inf else None


def slug(value: str) -> str:
    """Returns a value's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "_", value.lower()).strip("_")


def _check_name(setting: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f'{setting} is "{name}". Use letters, digits and underscores.')


def _check_settings(owner: str, settings: Any) -> None:
    if not isinstance(settings, tuple | list) or not all(isinstance(setting, str) for setting in settings):
        raise UserError(
            f"{owner} has the settings {settings!r}. They must be a tuple of gin files and bindings, such as "
            '("models/decoder/tiny.gin", "DROPOUT_RATE = 0.0").'
        )


for _configurable in (Factor, Stage, Measure, IsoFlop, Saving, Study):
    gin.external_configurable(_configurable, module="t5x_lab")
