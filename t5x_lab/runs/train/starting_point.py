"""Finds the starting point of a run: its latest checkpoint, another checkpoint, or fresh parameters."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import Location, find
from t5x_lab.checkpoints.formats.t5x_lab import open_part
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.checkpoints.layout import (
    absolute_path,
    check_format,
    check_same_parameters,
    check_settings,
    finished_steps,
    named_leaves,
    read_info,
)
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.verification import explain_damage
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.networks.peft import peft_names
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.report.run_directory import parse_settings
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.config.trust import check_trusted
from t5x_lab.runs.train.assemble import Training
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """Starting point of a run.

    Attributes:
      reason: explanation for the log.
      step: step of the run's own checkpoint to continue from.
      checkpoint: another checkpoint to load parameters from.
      restore: rules for loading from it.
    """

    reason: str
    step: int | None = None
    checkpoint: Location | None = None
    restore: RestoreCheckpointConfig = RestoreCheckpointConfig()


def find_starting_point(run: RunConfig) -> StartingPoint:
    """Returns the starting point of a run.

    Order of precedence: the checkpoint in MODEL_DIR, INITIAL_CHECKPOINT_PATH, fresh parameters.

    Raises:
      UserError: if MODEL_DIR holds a run with other settings, or any run with RESUME = False.
    """
    steps = finished_steps(run.model_dir)
    if steps and not run.resume:
        raise UserError(
            f"MODEL_DIR {run.model_dir} holds a run at step {steps[-1]}, but RESUME is False. Choose another MODEL_DIR, or "
            "move that directory away."
        )
    if steps:
        path = absolute_path(run.model_dir) / "checkpoints" / str(steps[-1])
        ignored = " (INITIAL_CHECKPOINT_PATH is ignored: MODEL_DIR takes precedence)" if run.initial_checkpoint_path else ""
        if not (path / "rest").exists():
            reason = (
                f"Starting at step {steps[-1]} with the parameters of {path}{ignored}. It holds no optimizer state and no data "
                "position, so the optimizer is fresh and reading starts at the first batch."
            )
            restore = RestoreCheckpointConfig(carry=("step",))
            return StartingPoint(reason, checkpoint=find(str(path)), restore=restore)
        with explain_damage(path):
            check_format(path)
            check_settings(run.model_dir, steps[-1], run.identity())
        reason = f"Continuing after step {steps[-1]}, the latest checkpoint in {run.model_dir}{ignored}."
        return StartingPoint(reason, step=steps[-1])
    if run.initial_checkpoint_path:
        checkpoint = find(run.initial_checkpoint_path, weights=run.restore.weights)
        optimizer = " and the optimizer" if "optimizer" in run.restore.carry else ""
        by_rules = " by the rules in RestoreCheckpointConfig" if run.restore.has_rules else ""
        reason = (
            f"Starting at {'its step' if 'step' in run.restore.carry else 'step 0'} with the parameters{optimizer} of "
            f"{checkpoint.path} ({checkpoint.title}){by_rules}, because {run.model_dir} holds no checkpoint and "
            "INITIAL_CHECKPOINT_PATH is set."
        )
        return StartingPoint(f"{reason}{_explain_step_count(run, checkpoint.step)}", checkpoint=checkpoint, restore=run.restore)
    return StartingPoint(f"Starting at step 0 with fresh parameters: {run.model_dir} holds no checkpoint.")


def describe_changes(checkpoint: epath.Path, config_text: str) -> str:
    """Returns a sentence with the settings that differ from those of a run's checkpoint and are allowed to, "" if none do."""
    stored, current = parse_settings(read_info(checkpoint).get("config") or ""), parse_settings(config_text)
    changed = [name for name in sorted({**stored, **current}) if stored.get(name) != current.get(name)]
    values = lambda name: (_shorten(settings.get(name, "not set")) for settings in (stored, current))
    described = ["{} was {}, is {}".format(name, *values(name)) for name in changed if name not in _EXPECTED_TO_CHANGE]
    return f"Settings that changed since that checkpoint: {'; '.join(described)}." if stored and described else ""


_EXPECTED_TO_CHANGE = ("MODEL_DIR", "TRAIN_STEPS", "TRAIN_TOKENS")


def _shorten(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def _explain_step_count(run: RunConfig, step: int) -> str:
    """Explains where TRAIN_STEPS counts from, if both ways of counting are possible."""
    if not run.train_steps or not 0 < step < run.train_steps:
        return ""
    carried = "step" in run.restore.carry
    other = tuple(name for name in run.restore.carry if name != "step") if carried else (*run.restore.carry, "step")
    num_steps, other_num_steps = run.train_steps - step * carried, run.train_steps - step * (not carried)
    return (
        f" TRAIN_STEPS = {run.train_steps} counts from {'that step, as in T5X' if carried else 'step 0'}: {num_steps:,} steps. "
        f"To count from {'step 0' if carried else 'the step of the checkpoint, as in T5X'}, {other_num_steps:,} steps, set "
        f"{gin_flag('RestoreCheckpointConfig.carry', json.dumps(other))}."
    )


def _check_optimizer(run: RunConfig, start: StartingPoint, abstract: TrainState) -> None:
    """Raises a `UserError` with the changes if the run's checkpoint was written with another optimizer."""
    if start.step is None:
        return
    path = absolute_path(run.model_dir) / "checkpoints" / str(start.step)
    with explain_damage(path):
        tensors = {name: _describe(tensor) for name, tensor in open_part(path, "rest").items()}
    prefix = "opt_state/"
    stored = {name.removeprefix(prefix): shape for name, shape in tensors.items() if name.startswith(prefix)}
    expected = {name: _describe(leaf) for name, leaf in named_leaves(abstract.opt_state).items()}
    if stored == expected:
        return
    changes = _optimizer_changes(read_info(path).get("config"), run.optimizer)
    name = next(name for name in sorted(stored.keys() | expected.keys()) if stored.get(name) != expected.get(name))
    slot = f"its slot {name} is {stored.get(name, 'missing')} in the checkpoint, {expected.get(name, 'none')} is expected"
    raise UserError(
        f"The run in {run.model_dir} was trained with another optimizer: {'; '.join(changes) or slot}. Continue it with the "
        f"same optimizer, or start a new MODEL_DIR from its parameters with {gin_flag('INITIAL_CHECKPOINT_PATH', path)}."
    )


def _describe(tensor: Any) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _optimizer_changes(config_text: str | None, optimizer: Any) -> list[str]:
    """Describes how the optimizer differs from a checkpoint's configuration. Empty if that cannot be read."""
    try:
        check_trusted(config_text or "", "the run")
        stored = GinConfig((), (config_text or "",)).run().optimizer
    except UserError:
        return []
    return list(_compare(stored, optimizer, type(optimizer).__name__))


def _compare(stored: Any, current: Any, name: str) -> Iterator[str]:
    if type(stored) is type(current) and dataclasses.is_dataclass(stored):
        for field in dataclasses.fields(stored):
            yield from _compare(getattr(stored, field.name), getattr(current, field.name), f"{name}.{field.name}")
    elif stored != current:
        yield f"{name} was {stored} and is now {current}"


def check_fits(run: RunConfig, start: StartingPoint, abstract: TrainState) -> None:
    """Raises a `UserError` if the model or optimizer differs from those of the checkpoint to start from."""
    if start.step is not None:
        check_same_parameters(absolute_path(run.model_dir) / "checkpoints" / str(start.step), abstract.params)
    elif start.checkpoint is not None and start.checkpoint.format == "t5x_lab" and not start.restore.has_rules:
        check_same_parameters(start.checkpoint.path, abstract.params, peft_names(abstract.params, run.model.network))
    _check_optimizer(run, start, abstract)


def check_agreement(run: RunConfig, start: StartingPoint) -> None:
    """Raises a `UserError` if this process found another step than the first process."""
    step = -1 if start.step is None else start.step
    first = broadcast(step)
    if step != first:
        raise UserError(
            f"This process found step {step} in MODEL_DIR {run.model_dir}, the first process found step {first} (-1 = none). "
            "MODEL_DIR must be on storage that all processes share."
        )


def first_state(
    run: RunConfig, training: Training, checkpoints: Checkpoints, start: StartingPoint, batches: Batches
) -> TrainState:
    """Returns the initial state of a run and moves `batches` to its position."""
    if start.step is not None:
        return checkpoints.restore(start.step, training.abstract_state, batches)
    sharded = training.sharded
    fresh = functools.partial(sharded.init_params, run.seed)
    if start.checkpoint is None:
        return training.init_state(fresh())
    model = (sharded.abstract_params, sharded.model.axes, start.restore)
    peft = peft_names(sharded.abstract_params, run.model.network)
    params = load_params(start.checkpoint, *model, fresh, peft)
    return carry_over(start.checkpoint, training.init_state(params), *model, peft)
