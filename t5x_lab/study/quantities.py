"""Quantities of planned runs that a comparison may hold equal: tokens, FLOPs, parameters and settings.

They are computed from configurations, without data and without parameters.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from t5x_lab.checkpoints.formats.location import find
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import stable_repr
from t5x_lab.networks.network import has_encoder
from t5x_lab.runs.config.checkpoint_config import read_config
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.train.batch import resolve_batch
from t5x_lab.study.plan import Plan, PlannedRun
from t5x_lab.study.step_cost import StepCost, step_cost

TEXT_SETTINGS = (  # of DataConfig.identity
    "TextFiles", "TEXTS", "DataConfig.split", "DataConfig.unique_tokens", "MIXING", "Prompts", "DataConfig.rates_of",
)  # fmt: skip
_NOT_IN_COST = re.compile(r"^(SEED|MODEL_DIR|INITIAL_CHECKPOINT_PATH|TRAIN_STEPS) = .*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Quantities:
    """Quantities of a training run.

    Attributes:
      tokens: tokens of all its steps, padding included.
      batch_tokens: tokens of a batch, padding included.
      steps: steps of this run. Those of the run that it continues do not count.
      last_step: number of its last step. It includes the steps of the run that it continues if the step is carried over.
      flops: FLOPs of all its steps, forward and backward, with the forward pass of a teacher.
      parameters: number of parameters.
      seed, vocabulary, dropout, precision, text, optimizer: settings.
    """

    tokens: int
    batch_tokens: int
    steps: int
    last_step: int
    flops: float
    parameters: int
    seed: int
    vocabulary: str
    dropout: float
    precision: str
    text: str
    optimizer: str


def compute_quantities(plan: Plan) -> dict[str, Quantities]:
    """Returns the quantities of all training runs by name.

    Raises:
      UserError: for invalid settings of a run.
    """
    quantities: dict[str, Quantities] = {}
    costs: dict[str, StepCost] = {}  # those of other seeds are the same
    for name, run in plan.runs.items():
        if run.stage.command == "train":
            try:
                quantities[name] = _quantities(plan, run, quantities, costs)
            except UserError as error:
                raise UserError(f"The run {name} cannot be trained: {error.sentence}") from error
    return quantities


def _quantities(plan: Plan, planned: PlannedRun, earlier: Mapping[str, Quantities], costs: dict[str, StepCost]) -> Quantities:
    run = planned.config().run()
    if planned.last_step is not None and run.train_steps != planned.last_step:
        raise UserError(
            f"its settings have TRAIN_STEPS = {run.train_steps}, and {planned.stage.name}/Stage.steps makes it "
            f"{planned.last_step}. Remove one of the two."
        )
    settings = _NOT_IN_COST.sub("", planned.text)
    cost = costs[settings] = costs.get(settings) or step_cost(run)
    before = earlier.get(planned.after or "") if "step" in run.restore.carry else None
    if run.train_steps is not None:
        steps = run.train_steps - (before.last_step if before else 0)
    else:
        assert run.train_tokens is not None
        steps = math.ceil((run.train_tokens - (before.tokens if before else 0)) / cost.tokens)
    return Quantities(
        tokens=steps * cost.tokens,
        batch_tokens=cost.tokens,
        steps=steps,
        last_step=steps + (before.last_step if before else 0),
        flops=float(steps * (cost.flops + _teacher_flops(plan, run))),
        parameters=cost.parameters,
        seed=run.seed,
        vocabulary=f"{run.data.vocabulary}, {run.data.input_vocabulary}",
        dropout=float(getattr(run.model.network, "dropout_rate", 0.0)),
        precision=str(getattr(run.model.network, "dtype", "")),
        text=_text(run),
        optimizer=stable_repr(run.optimizer),
    )


def _teacher_flops(plan: Plan, run: RunConfig) -> int:
    """Returns the FLOPs of the teacher's forward pass for a batch, a third of those of its training. 0 without a teacher."""
    if run.teacher is None:
        return 0
    planned = next((other for other in plan.runs.values() if other.model_dir == run.teacher.path), None)
    network = (planned.config() if planned else read_config(find(run.teacher.path))).model().network
    lengths = resolve_batch(run.data, run.model.network.architecture).lengths
    return run.data.batch_size * network.flops(*lengths if has_encoder(network) else (0, sum(lengths))) // 3


def _text(run: RunConfig) -> str:
    """Returns the settings that decide which text is read, without those of the objective."""
    from t5x_lab.data.tasks.names import text_name  # needs TensorFlow

    identity = run.data.identity()
    name = text_name(run.data.mixture_or_task_name, run.data)
    return ", ".join([name, *(f"{setting}={identity[setting]}" for setting in TEXT_SETTINGS)])
