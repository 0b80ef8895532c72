"""What a run begins with: its own latest checkpoint, another run's, or nothing."""

import dataclasses

from etils import epath

from t5x_lab.checkpoints.layout import check_settings, find_checkpoint, finished_steps, read_info
from t5x_lab.checkpoints.manager import Checkpoints, naming_damage, restore_params
from t5x_lab.config.errors import UserError
from t5x_lab.runs.assemble import Training
from t5x_lab.runs.config import RunConfig
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Begin:
    """What a run begins with: a step of its own, or the parameters of a checkpoint, or neither; and why, as a sentence."""

    reason: str
    step: int | None = None
    checkpoint: epath.Path | None = None


def where_to_start(run: RunConfig) -> Begin:
    """Decides by precedence: what is in MODEL_DIR, then INITIAL_CHECKPOINT_PATH, then fresh parameters."""
    steps = finished_steps(run.model_dir)
    if steps and not run.resume:
        raise UserError(
            f"MODEL_DIR {run.model_dir} holds a run at step {steps[-1]}, and RESUME=False asks for a fresh start. Nothing is "
            "ever deleted: choose another MODEL_DIR, or move that one away."
        )
    if steps:
        with naming_damage(epath.Path(run.model_dir).absolute() / "checkpoints" / str(steps[-1])):
            check_settings(run.model_dir, steps[-1], run.identity())
        beats = " (INITIAL_CHECKPOINT_PATH is not used: MODEL_DIR comes first)" if run.initial_checkpoint_path else ""
        return Begin(f"Continuing after step {steps[-1]}, the latest checkpoint in {run.model_dir}{beats}.", step=steps[-1])
    if run.initial_checkpoint_path:
        path = find_checkpoint(run.initial_checkpoint_path)
        reason = (
            f"Starting at step 0 with the parameters of {path} (its step {read_info(path)['step']}), because "
            f"{run.model_dir} holds no checkpoint and INITIAL_CHECKPOINT_PATH is set."
        )
        return Begin(reason, checkpoint=path)
    return Begin(f"Starting at step 0 with fresh parameters: {run.model_dir} holds no checkpoint.")


def first_state(run: RunConfig, training: Training, checkpoints: Checkpoints, begin: Begin, batches: Batches) -> TrainState:
    """The state that a run begins with; moves `batches` to where they were."""
    if begin.step is not None:
        return checkpoints.restore(begin.step, training.abstract_state, batches)
    if begin.checkpoint is not None:
        return training.start(restore_params(begin.checkpoint, training.placed.abstract_params))
    return training.start(training.placed.init_params(run.seed))
