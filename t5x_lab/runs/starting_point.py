"""What a run starts from: its own latest checkpoint, another checkpoint, or fresh parameters."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import Location, find
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
from t5x_lab.checkpoints.verification import explaining_damage
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import flag
from t5x_lab.networks.additions import added_names
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.runs.assemble import Training
from t5x_lab.runs.config import GinConfig, RunConfig
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """A step of the run itself, or another checkpoint and what is taken of it, or neither; and why, in sentences."""

    reason: str
    step: int | None = None
    checkpoint: Location | None = None
    restore: RestoreCheckpointConfig = RestoreCheckpointConfig()


def find_starting_point(run: RunConfig) -> StartingPoint:
    """Decides by precedence: what is in MODEL_DIR, then INITIAL_CHECKPOINT_PATH, then fresh parameters."""
    steps = finished_steps(run.model_dir)
    if steps and not run.resume:
        raise UserError(
            f"MODEL_DIR {run.model_dir} holds a run at step {steps[-1]}, and RESUME=False asks for a fresh start. Nothing is "
            "ever deleted: choose another MODEL_DIR, or move that one away."
        )
    if steps:
        path = absolute_path(run.model_dir) / "checkpoints" / str(steps[-1])
        beats = " (INITIAL_CHECKPOINT_PATH is not used: MODEL_DIR comes first)" if run.initial_checkpoint_path else ""
        if not (path / "rest").exists():
            reason = (
                f"Starting at step {steps[-1]} with the parameters of {path}, which holds nothing else{beats}: the optimizer "
                "is fresh, and the data begin at their beginning."
            )
            restore = RestoreCheckpointConfig(carry=("step",))
            return StartingPoint(reason, checkpoint=find(str(path)), restore=restore)
        with explaining_damage(path):
            check_format(path)
            check_settings(run.model_dir, steps[-1], run.identity())
        reason = f"Continuing after step {steps[-1]}, the latest checkpoint in {run.model_dir}{beats}."
        return StartingPoint(reason, step=steps[-1])
    if run.initial_checkpoint_path:
        checkpoint = find(run.initial_checkpoint_path, weights=run.restore.weights)
        more = " and the optimizer" if "optimizer" in run.restore.carry else ""
        by_rules = " by the rules of RestoreCheckpointConfig" if run.restore.has_rules else ""
        reason = (
            f"Starting at {'its step' if 'step' in run.restore.carry else 'step 0'} with the parameters{more} of "
            f"{checkpoint.path} ({checkpoint.title}){by_rules}, because {run.model_dir} holds no checkpoint and "
            "INITIAL_CHECKPOINT_PATH is set."
        )
        return StartingPoint(f"{reason}{_counting(run, checkpoint.step)}", checkpoint=checkpoint, restore=run.restore)
    return StartingPoint(f"Starting at step 0 with fresh parameters: {run.model_dir} holds no checkpoint.")


def _counting(run: RunConfig, step: int) -> str:
    """From where TRAIN_STEPS is counted, and the other way, where the two differ and the number fits both."""
    if not run.train_steps or not 0 < step < run.train_steps:
        return ""
    carried = "step" in run.restore.carry
    other = tuple(name for name in run.restore.carry if name != "step") if carried else (*run.restore.carry, "step")
    here, there = run.train_steps - step * carried, run.train_steps - step * (not carried)
    return (
        f" TRAIN_STEPS = {run.train_steps} is counted from {'that step, as T5X counts' if carried else 'step 0'}: {here:,} "
        f"steps. To count from {'step 0' if carried else 'its step, as T5X does'}, {there:,} steps, set "
        f"{flag('RestoreCheckpointConfig.carry', json.dumps(other))}."
    )


def _check_optimizer(run: RunConfig, start: StartingPoint, abstract: TrainState) -> None:
    """Raises a `UserError` that says what changed, where the run's own checkpoint is of another optimizer."""
    if start.step is None:
        return
    path = absolute_path(run.model_dir) / "checkpoints" / str(start.step)
    with explaining_damage(path):
        there = {name: tuple(tensor.shape) for name, tensor in open_part(path, "rest").items()}
    found = {name.removeprefix("opt_state/"): shape for name, shape in there.items() if name.startswith("opt_state/")}
    wanted = {name: tuple(leaf.shape) for name, leaf in named_leaves(abstract.opt_state).items()}
    if found == wanted:
        return
    changes = _changes(read_info(path).get("config"), run.optimizer)
    name = next(name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name))
    what = f"the slot {name} is {found.get(name, 'missing')} there and {wanted.get(name, 'missing')} here"
    raise UserError(
        f"The run in {run.model_dir} was trained with another optimizer: {'; '.join(changes) or what}. Continue it with the "
        f"same one, or start a new MODEL_DIR with {flag('INITIAL_CHECKPOINT_PATH', path)}, whose parameters it takes."
    )


def _changes(config_text: str | None, optimizer: Any) -> list[str]:
    """What is different in the optimizer of a checkpoint's configuration; nothing, where that cannot be read any more."""
    try:
        before = GinConfig((), (config_text or "",)).run().optimizer
    except UserError:
        return []
    return list(_differences(before, optimizer, type(optimizer).__name__))


def _differences(before: Any, now: Any, name: str) -> Iterator[str]:
    if type(before) is type(now) and dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(now, field.name)
            yield from _differences(old, new, f"{name}.{field.name}")
    elif before != now:
        yield f"{name} was {before}, and is {now}"


def check_fits(run: RunConfig, start: StartingPoint, abstract: TrainState) -> None:
    """Raises a `UserError` where the model or the optimizer is not that of the run's checkpoint, or the model not that of
    another of ours that is taken whole."""
    if start.step is not None:
        check_same_parameters(absolute_path(run.model_dir) / "checkpoints" / str(start.step), abstract.params)
    elif start.checkpoint is not None and start.checkpoint.format == "t5x_lab" and not start.restore.has_rules:
        check_same_parameters(start.checkpoint.path, abstract.params, added_names(abstract.params, run.model.network))
    _check_optimizer(run, start, abstract)


def check_agreement(run: RunConfig, start: StartingPoint) -> None:
    """Raises a `UserError` where this process found another step than the first one: they would wait for each other."""
    mine = -1 if start.step is None else start.step
    first = broadcast(mine)
    if mine != first:
        raise UserError(
            f"This process finds step {mine} in MODEL_DIR {run.model_dir}, and the first one step {first} (-1: none). "
            "MODEL_DIR must be on storage that all processes see."
        )


def first_state(
    run: RunConfig, training: Training, checkpoints: Checkpoints, start: StartingPoint, batches: Batches
) -> TrainState:
    """The state that a run starts with; moves `batches` to its position."""
    if start.step is not None:
        return checkpoints.restore(start.step, training.abstract_state, batches)
    sharded = training.sharded
    fresh = functools.partial(sharded.init_params, run.seed)
    if start.checkpoint is None:
        return training.init_state(fresh())
    model = (sharded.abstract_params, sharded.model.axes, start.restore)
    added = added_names(sharded.abstract_params, run.model.network)
    params = load_params(start.checkpoint, *model, fresh, added)
    return carry_over(start.checkpoint, training.init_state(params), *model, added)
