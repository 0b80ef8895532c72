"""`RunConfig`: the whole configuration of a training run."""

import dataclasses

from t5x_lab.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_lab.config.checks import check_positive, check_range, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.config.macros import macro
from t5x_lab.data.config import DataConfig, stable_repr
from t5x_lab.evaluation.config import EarlyStopping
from t5x_lab.evaluation.evaluation import check_evaluations
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.distillation import Teacher
from t5x_lab.networks.network import Network
from t5x_lab.optim.groups import optimizer_identity
from t5x_lab.optim.optimizers import Optimizer
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.partitioning.rules import ShardingRules
from t5x_lab.training.hooks import check_hooks


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Configuration of a training run.

    Attributes:
      model, optimizer, data: see their classes.
      train_steps, train_tokens: end of training, one of the two: the last step, or the first step at which the tokens processed
        (padding excluded) reach this number. Both count from the start of the run.
      model_dir: run directory.
      initial_checkpoint_path: a run or a checkpoint of any format whose parameters a new run starts from. None = fresh ones.
      restore: what a new run takes from that checkpoint.
      teacher: model whose predictions are learned, with `distillation` in `ModelConfig.losses`. None = no distillation.
      resume: whether to continue the run in `model_dir`. False requires a `model_dir` without a run.
      seed: seed of parameters, dropout and data.
      mesh: devices along the axes `replica`, `data`, `fsdp`, `sequence`, `tensor`.
      sharding: changes to the rules by which dimensions are split over mesh axes.
      microbatches: number of parts of a batch that are processed sequentially.
      evals: evaluations: `LossEvaluation`, `MetricsEvaluation`, `RankingEvaluation` or your own, see
        `t5x_lab.evaluation.evaluation.Evaluation`.
      eval_period: steps between evaluations without their own period.
      early_stopping: rule that ends training when an evaluation stops improving. None = never.
      saving: when checkpoints are saved and which are kept.
      trainable: regular expression. Parameters whose full names match it are trained, the others are frozen, without gradients
        and optimizer state. None = all, or those of the optimizer's groups that are not frozen.
      hooks: hooks of training, see `t5x_lab.training.hooks.Hook`. Metrics are also written by hooks.
      bad_steps: maximum number of consecutive steps with a non-finite loss or gradient that are skipped. One more ends
        training.
      average_decay: decay of an exponential moving average of the weights, which is evaluated and saved too. None = no average.
      max_minutes: minutes after which a command saves and exits with status 3, as after SIGTERM; the same command continues.
        None = no limit.
      wait_minutes: how long a process waits for others before it ends with a message.
      profile_steps: number of steps to trace into `model_dir`/profile, from the third step of the process. 0 = none. A process
        that receives SIGUSR1 traces as many steps from the next one on, or five.
    """

    model: ModelConfig = dataclasses.field(metadata=macro("MODEL"))
    optimizer: Optimizer = dataclasses.field(metadata=macro("OPTIMIZER"))
    data: DataConfig
    model_dir: str = dataclasses.field(metadata=macro("MODEL_DIR"))
    train_steps: int | None = dataclasses.field(default=None, metadata=macro("TRAIN_STEPS"))
    train_tokens: int | None = dataclasses.field(default=None, metadata=macro("TRAIN_TOKENS"))
    initial_checkpoint_path: str | None = dataclasses.field(default=None, metadata=macro("INITIAL_CHECKPOINT_PATH"))
    restore: RestoreCheckpointConfig = RestoreCheckpointConfig()
    teacher: Teacher | None = dataclasses.field(default=None, metadata=macro("TEACHER"))
    resume: bool = dataclasses.field(default=True, metadata=macro("RESUME"))
    seed: int = dataclasses.field(default=0, metadata=macro("SEED"))
    mesh: object = dataclasses.field(default="data=-1", metadata=macro("MESH"))
    sharding: ShardingRules = ShardingRules()
    microbatches: int = dataclasses.field(default=1, metadata=macro("MICROBATCHES"))
    eval_period: int = dataclasses.field(default=1000, metadata=macro("EVAL_PERIOD"))
    evals: tuple = dataclasses.field(default=(), metadata=macro("EVALS"))
    early_stopping: EarlyStopping | None = dataclasses.field(default=None, metadata=macro("EARLY_STOPPING"))
    saving: SaveCheckpointConfig = SaveCheckpointConfig()
    trainable: str | None = dataclasses.field(default=None, metadata=macro("TRAINABLE"))
    hooks: tuple = dataclasses.field(default=(), compare=False)  # they have state
    bad_steps: int = dataclasses.field(default=0, metadata=macro("BAD_STEPS"))
    average_decay: float | None = dataclasses.field(default=None, metadata=macro("AVERAGE_DECAY"))
    max_minutes: float | None = dataclasses.field(default=None, metadata=macro("MAX_MINUTES"))
    wait_minutes: float = dataclasses.field(default=30.0, metadata=macro("WAIT_MINUTES"))
    profile_steps: int = dataclasses.field(default=0, metadata=macro("PROFILE_STEPS"))

    def __post_init__(self):
        check_types(self)
        check_positive(self, "train_steps", "train_tokens", "microbatches", "eval_period")
        check_range(self, "seed", 0, 2**31)
        check_range(self, "profile_steps", 0, 1001)
        check_range(self, "bad_steps", 0, 2**31)
        check_range(self, "average_decay", 0.0, 1.0)
        check_positive(self, "wait_minutes", "max_minutes")
        check_hooks(self.hooks)
        check_evaluations(self.evals)
        if self.model.unchecked and self.data.converter is None and self.data.pack:
            raise self.model.unchecked
        if (self.train_steps is None) == (self.train_tokens is None):
            raise UserError(
                f"TRAIN_STEPS is {self.train_steps} and TRAIN_TOKENS is {self.train_tokens}. Set exactly one of them: the "
                "number of the last step, or the tokens to process, padding excluded. Both count from the start of the run."
            )
        if self.teacher is not None and not self.model.losses:
            raise UserError(
                "TEACHER is set, but ModelConfig.losses is empty, so that nothing is learned from it. Add "
                'ModelConfig.losses = {"distillation": @distillation}, or use recipes/distillation.gin.'
            )
        if not self.model_dir:
            raise UserError("MODEL_DIR is empty. Set it to the run directory.")
        for name, size in self.data.named_batch_sizes():
            if size % self.microbatches:
                raise UserError(
                    f"{name} is {size}, which is not a multiple of MICROBATCHES={self.microbatches}. All microbatches must "
                    "have the same number of rows."
                )
        self.mesh_shape  # noqa: B018  (raises for an invalid mesh)

    def identity(self) -> dict[str, str]:
        """Returns the settings that a run must be resumed with, under their gin names."""
        return {
            "SEED": str(self.seed),
            "OPTIMIZER": optimizer_identity(self.optimizer),
            "TRAINABLE": str(self.trainable),
            "PEFT": stable_repr(self.model.peft),
            **_network_identity(self.model.network),
            **self.data.identity(),
        }

    @property
    def mesh_shape(self) -> MeshShape:
        return MeshShape.parse(self.mesh)


# Fields of networks that decide how a function is computed or regularized, and not which one.
_COMPUTATION = ("dropout_rate", "dtype", "scan_layers", "remat_policy", "longest_sequence", "initializer")


def _network_identity(network: Network) -> dict[str, str]:
    """Returns the settings of a network that decide which function of its parameters it computes."""
    kind = type(network).__name__
    names: list[str] = [field.name for field in dataclasses.fields(network)] if dataclasses.is_dataclass(network) else []
    values = {f"{kind}.{name}": stable_repr(getattr(network, name)) for name in names if name not in _COMPUTATION}
    return {"ModelConfig.network": f"@{kind}()", **values}
