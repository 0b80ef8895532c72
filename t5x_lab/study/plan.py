"""Plan of a study: its runs, their gin files and their order."""

import dataclasses
from collections.abc import Mapping, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.study.config import Factor, Stage, Study, slug
from t5x_lab.study.step_cost import step_cost


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a stage.

    Attributes:
      name: name of its files in the study directory.
      stage: the stage.
      values: values by factor that the run depends on.
      seed: seed.
      after: name of the run that it continues or evaluates. None = no other.
      model_dir: run directory. An evaluation has that of the run that it evaluates.
      text: gin text of the run.
      last_step: number of its last step, if the stage has steps.
    """

    name: str
    stage: Stage
    values: Mapping[str, str]
    seed: int
    after: str | None
    model_dir: str
    text: str
    last_step: int | None = None

    def config(self) -> GinConfig:
        return GinConfig((), (self.text,), source=f'in the settings of "{self.name}"')


@dataclasses.dataclass(frozen=True)
class Cell:
    """A combination of factor values with a seed.

    Attributes:
      values: values by factor.
      seed: seed.
      runs: names of the cell's runs by stage.
    """

    values: Mapping[str, str]
    seed: int
    runs: Mapping[str, str]

    @property
    def title(self) -> str:
        return ", ".join(self.values.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a study, each after those that it continues, and the cells that they belong to."""

    study: Study
    study_dir: str
    runs: Mapping[str, PlannedRun]
    cells: Sequence[Cell]

    def cells_of(self, name: str) -> list[Cell]:
        """Returns the cells that share a run."""
        return [cell for cell in self.cells if name in cell.runs.values()]


def make_plan(study: Study, study_dir: str) -> Plan:
    """Returns the plan of a study in a directory. No file is written."""
    runs: dict[str, PlannedRun] = {}
    cells = []
    for values in study.cells():
        for seed in study.seeds:
            names: dict[str, str] = {}
            for stage in study.stages:
                if stage.applies_to(values):
                    run = _plan_run(study, stage, values, seed, names, runs, study_dir)
                    names[stage.name] = run.name
                    shared = runs.setdefault(run.name, run)
                    if (shared.text, shared.after) != (run.text, run.after):
                        raise UserError(
                            f'The stage "{stage.name}" of the cell {", ".join(values.values())} is not the same as that of '
                            f"another cell, and both have the name {run.name}. Add the factor in which they differ to "
                            f"{stage.name}/Stage.factors."
                        )
            if not names:
                raise UserError(f"The cell {', '.join(values.values())} has no stage. Add it to Study.exclude.")
            cells.append(Cell(values, seed, names))
    order = [stage.name for stage in study.stages]
    return Plan(study, study_dir, dict(sorted(runs.items(), key=lambda item: order.index(item[1].stage.name))), cells)


def _plan_run(
    study: Study,
    stage: Stage,
    values: Mapping[str, str],
    seed: int,
    names: Mapping[str, str],
    runs: Mapping[str, PlannedRun],
    study_dir: str,
) -> PlannedRun:
    previous = next((runs[names[name]] for name in stage.after if name in names), None)
    if stage.after and previous is None and stage.after[-1] is not None:
        raise UserError(
            f'The stage "{stage.name}" comes after {" or ".join(stage.after)}, but the cell {", ".join(values.values())} has '
            f"no such stage. Set {stage.name}/Stage.when, or add a stage to {stage.name}/Stage.after."
        )
    seed = seed if stage.seeds is None or seed in study.seeds[: stage.seeds] else study.seeds[0]
    seed = seed if previous is None or stage.command == "train" else previous.seed
    conditions = [factor for factor, possible in stage.when.items() if len(possible) == 1]
    depends_on = {*stage.factors, *conditions, *(previous.values if previous else ())}
    selected = {factor.name: values[factor.name] for factor in study.factors if factor.name in depends_on}
    name = "-".join([stage.name, *map(slug, selected.values()), f"seed{seed}"])
    model_dir = previous.model_dir if previous and stage.command == "eval" else f"{study_dir}/runs/{name}"
    factors = {factor.name: factor for factor in study.factors}
    text = _gin_text(study, stage, [factors[name] for name in stage.factors], values, seed, previous, model_dir)
    planned = PlannedRun(name, stage, selected, seed, previous.name if previous else None, model_dir, text)
    return _with_steps(planned, _number_of_steps(study, planned), previous)


def _number_of_steps(study: Study, planned: PlannedRun) -> int | None:
    """Returns the number of steps of the run itself, None if its settings have it."""
    if planned.stage.flops is None:
        return planned.stage.steps_at(study.scale)
    flops = float(planned.values[planned.stage.flops])
    per_step = step_cost(dataclasses.replace(planned, text=f"TRAIN_STEPS = 1\n{planned.text}").config().run()).flops
    if flops < per_step:
        raise UserError(f"The run {planned.name} has {flops:.3g} FLOPs. A step takes {per_step:.3g}. Use more.")
    return int(flops // per_step)


def _with_steps(planned: PlannedRun, steps: int | None, previous: PlannedRun | None) -> PlannedRun:
    """Returns the run with TRAIN_STEPS, which includes the steps of the run before if they are carried over."""
    if steps is None:
        return planned
    carried = 0
    if previous is not None and "step" in planned.config().build("RunConfig.restore").carry:
        if previous.last_step is None:
            raise UserError(
                f"{planned.stage.name}/Stage.steps is set, and the step of {previous.name} is carried over. Set "
                f"{previous.stage.name}/Stage.steps too."
            )
        carried = previous.last_step
    text = f"TRAIN_STEPS = {carried + steps}\n{planned.text}"
    return dataclasses.replace(planned, text=text, last_step=carried + steps)


def _gin_text(
    study: Study,
    stage: Stage,
    factors: Sequence[Factor],
    values: Mapping[str, str],
    seed: int,
    previous: PlannedRun | None,
    model_dir: str,
) -> str:
    """Returns the gin text of a run: settings of the stage and of each factor, overrides of the stage, seed and directories."""
    is_training = stage.command == "train"
    lines = [*([f"SEED = {seed}"] if is_training else []), *_lines(stage.settings, study.scale)]
    for factor in factors:
        value = values[factor.name]
        lines += ["", f"# {factor.name}: {value}", *_lines(factor.settings(value, stage.settings_name), study.scale)]
    overrides = (*stage.overrides, *study.settings_of(stage))
    lines += ["", "# All cells", *_lines(overrides, study.scale)] if overrides else []
    if is_training:
        lines += ["", f'MODEL_DIR = "{model_dir}"']
        lines += [f'INITIAL_CHECKPOINT_PATH = "{previous.model_dir}"'] if previous else []
    return "\n".join(lines).strip() + "\n"


def _lines(settings: Sequence[str], scale: str) -> list[str]:
    """Returns gin statements of files and bindings."""
    return [f'include "{setting.replace("{scale}", scale)}"' if setting.endswith(".gin") else setting for setting in settings]
