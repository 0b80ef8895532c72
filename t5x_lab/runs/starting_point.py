"""What a run starts from: its own latest checkpoint, another checkpoint, or fresh parameters."""

import dataclasses
import functools

from t5x_lab.checkpoints.formats import Location, find
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.checkpoints.layout import absolute_path, check_format, check_same_parameters, check_settings, finished_steps
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.checkpoints.verification import explaining_damage
from t5x_lab.config.errors import UserError
from t5x_lab.models.model import Params
from t5x_lab.partitioning.distributed import broadcast
from t5x_lab.runs.assemble import Training
from t5x_lab.runs.config import RunConfig
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """A step of the run itself, or another checkpoint, or neither; and why, as a sentence."""

    reason: str
    step: int | None = None
    checkpoint: Location | None = None


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
        with explaining_damage(path):
            check_format(path)
            check_settings(run.model_dir, steps[-1], run.identity())
        beats = " (INITIAL_CHECKPOINT_PATH is not used: MODEL_DIR comes first)" if run.initial_checkpoint_path else ""
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
        return StartingPoint(reason, checkpoint=checkpoint)
    return StartingPoint(f"Starting at step 0 with fresh parameters: {run.model_dir} holds no checkpoint.")


def check_fits(run: RunConfig, start: StartingPoint, abstract_params: Params) -> None:
    """Raises a `UserError` where the model is not that of the run's checkpoint, or of another of ours that is taken whole."""
    if start.step is not None:
        check_same_parameters(absolute_path(run.model_dir) / "checkpoints" / str(start.step), abstract_params)
    elif start.checkpoint is not None and start.checkpoint.format == "t5x_lab" and not run.restore.has_rules:
        check_same_parameters(start.checkpoint.path, abstract_params)


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
    model = (sharded.abstract_params, sharded.model.axes, run.restore)
    params = load_params(start.checkpoint, *model, fresh)
    return carry_over(start.checkpoint, training.init_state(params), *model)
