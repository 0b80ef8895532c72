"""What a run begins with: its own latest checkpoint, another run's, or nothing."""

import dataclasses
import functools

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_lab.checkpoints.layout import check_settings, finished_steps, rooted
from t5x_lab.checkpoints.loading import carry_over, load_params
from t5x_lab.checkpoints.manager import Checkpoints, naming_damage
from t5x_lab.checkpoints.sources import FORMATS, Place, find
from t5x_lab.config.errors import UserError
from t5x_lab.runs.assemble import Training
from t5x_lab.runs.config import RunConfig
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Begin:
    """What a run begins with: a step of its own, or another checkpoint, or neither; and why, as a sentence."""

    reason: str
    step: int | None = None
    checkpoint: Place | None = None


def where_to_start(run: RunConfig) -> Begin:
    """Decides by precedence: what is in MODEL_DIR, then INITIAL_CHECKPOINT_PATH, then fresh parameters."""
    steps = finished_steps(run.model_dir)
    if steps and not run.resume:
        raise UserError(
            f"MODEL_DIR {run.model_dir} holds a run at step {steps[-1]}, and RESUME=False asks for a fresh start. Nothing is "
            "ever deleted: choose another MODEL_DIR, or move that one away."
        )
    if steps:
        with naming_damage(rooted(run.model_dir) / "checkpoints" / str(steps[-1])):
            check_settings(run.model_dir, steps[-1], run.identity())
        beats = " (INITIAL_CHECKPOINT_PATH is not used: MODEL_DIR comes first)" if run.initial_checkpoint_path else ""
        return Begin(f"Continuing after step {steps[-1]}, the latest checkpoint in {run.model_dir}{beats}.", step=steps[-1])
    if run.initial_checkpoint_path:
        place = find(run.initial_checkpoint_path)
        more = " and the optimizer" if "optimizer" in run.restore.carry else ""
        by_rules = " by the rules of RestoreCheckpointConfig" if run.restore.has_rules else ""
        reason = (
            f"Starting at {'its step' if 'step' in run.restore.carry else 'step 0'} with the parameters{more} of {place.path} "
            f"({FORMATS[place.format]}){by_rules}, because {run.model_dir} holds no checkpoint and INITIAL_CHECKPOINT_PATH is "
            "set."
        )
        return Begin(reason, checkpoint=place)
    return Begin(f"Starting at step 0 with fresh parameters: {run.model_dir} holds no checkpoint.")


def check_agreed(run: RunConfig, begin: Begin) -> None:
    """Raises a `UserError` where this process found another beginning than the first one: they would wait for each other."""
    mine = -1 if begin.step is None else begin.step
    if jax.process_count() > 1:
        first = int(multihost_utils.broadcast_one_to_all(np.asarray(mine)))
        if mine != first:
            raise UserError(
                f"This process finds step {mine} in MODEL_DIR {run.model_dir}, and the first one step {first} (-1: none). "
                "MODEL_DIR must be on storage that all processes see."
            )


def first_state(run: RunConfig, training: Training, checkpoints: Checkpoints, begin: Begin, batches: Batches) -> TrainState:
    """The state that a run begins with; moves `batches` to where they were."""
    if begin.step is not None:
        return checkpoints.restore(begin.step, training.abstract_state, batches)
    placed = training.placed
    fresh = functools.partial(placed.init_params, run.seed)
    if begin.checkpoint is None:
        return training.start(fresh())
    params = load_params(begin.checkpoint, placed.abstract_params, placed.model.axes, run.restore, fresh)
    return carry_over(begin.checkpoint, training.start(params), placed.abstract_params, placed.model.axes, run.restore)
