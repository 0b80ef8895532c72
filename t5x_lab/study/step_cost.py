"""Cost of a training step, computed from a configuration, without data and without parameters."""

import dataclasses

from t5x_lab.config.errors import UserError
from t5x_lab.models.classifier import make_model
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.train.batch import resolve_batch
from t5x_lab.runs.train.training_flops import training_flops


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of a training step.

    Attributes:
      tokens: tokens of the batch, padding included.
      flops: FLOPs, forward and backward.
      parameters: number of parameters of the model.
    """

    tokens: int
    flops: int
    parameters: int


def step_cost(run: RunConfig) -> StepCost:
    """Returns the cost of a step of a run.

    Raises:
      UserError: for invalid settings.
    """
    if run.data.batch_schedule:
        raise UserError("BATCH_SCHEDULE is set, but the steps of a study's run must have equal costs. Remove it.")
    model = make_model(run.model)
    lengths = resolve_batch(run.data, run.model.network.architecture).lengths
    tokens = run.data.batch_size * run.model.sequences * sum(lengths)
    return StepCost(tokens, run.data.batch_size * training_flops(run, model, *lengths), model.num_parameters)
