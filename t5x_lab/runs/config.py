"""What gin builds: one `RunConfig`, made of the dataclasses of all layers, which are registered with gin here."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

import gin
from etils import epath

from t5x_lab.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_lab.config import gin_files
from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import NotSet, UserError
from t5x_lab.config.macros import lines_of, macro
from t5x_lab.data.config import (
    ByteVocabulary,
    DataConfig,
    HuggingFaceVocabulary,
    Mixing,
    SentencePieceVocabulary,
    SpecialTokens,
    TextFiles,
    Vocabulary,
    by_name,
)
from t5x_lab.data.denoising import Denoising
from t5x_lab.data.objective import MaskedLm
from t5x_lab.data.standardize import standardize
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.evaluation.config import (
    ClassificationEvaluation,
    EarlyStopping,
    LossEvaluation,
    MetricsEvaluation,
    ProbeEvaluation,
    RankingEvaluation,
    SamplesEvaluation,
    check_evaluations,
)
from t5x_lab.evaluation.probes import Acceptability, Answers, Blimp, Referents, Sentiment
from t5x_lab.models.model import ModelConfig
from t5x_lab.networks.adapter import Adapter
from t5x_lab.networks.config import RotaryScaling
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.networks.lora import Lora
from t5x_lab.networks.lstm import LstmConfig
from t5x_lab.networks.soft_prompt import SoftPrompt
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.observe.console import Console
from t5x_lab.observe.metrics import JsonLines
from t5x_lab.observe.norms import Norms
from t5x_lab.observe.tensorboard import TensorBoard
from t5x_lab.observe.weights_and_biases import WeightsAndBiases
from t5x_lab.optim.groups import Groups, optimizer_identity
from t5x_lab.optim.optimizers import Adafactor, AdamW, Lion, Muon, Optimizer, Sgd
from t5x_lab.optim.schedules import CosineDecay, LearningRate, LinearDecay, WarmupLinear, WarmupStableDecay
from t5x_lab.optim.unfreezing import GradualUnfreezing
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.partitioning.rules import ShardingRules
from t5x_lab.prompts.classification import Classification, SequencesConverter
from t5x_lab.prompts.config import Collection, FewShot, Prompts, Records
from t5x_lab.runs.of_task import classification_of
from t5x_lab.training.hooks import check_hooks

DEFAULTS = "runs/defaults.gin"
HINTS = {
    "MODEL": "Add a model file, for example --gin_file=models/t5_1_1/small.gin.",
    "MIXTURE_OR_TASK_NAME": "Add an objective file, for example --gin_file=objectives/span_corruption.gin, or name a task.",
    "TASK_FEATURE_LENGTHS": 'It gives tokens per feature, for example {"inputs": 512, "targets": 114}.',
    "MODEL_DIR": "It is the directory that the run is kept in.",
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run, whole.

    Attributes:
      model, optimizer, data: see their classes.
      train_steps, train_tokens: when training ends, one of the two: after that step, or after the first step that brings
        the tokens processed (padding excluded) to that many; both counted from the beginning of the run.
      model_dir: where the run is kept.
      initial_checkpoint_path: a run or a checkpoint of any format whose parameters a new run starts from, or None.
      restore: what a new run takes from there, and what else goes over.
      resume: whether to continue what is in `model_dir`; False asks for a fresh start and refuses to overwrite one.
      seed: of parameters, dropout and data.
      mesh: devices along `replica`, `data`, `fsdp`, `tensor`.
      sharding: which of them dimensions are split over, where the library's tables are not what is wanted.
      microbatches: parts that a batch is processed in, one after the other.
      evals: what is evaluated, how and when: `LossEvaluation`, `MetricsEvaluation`, `RankingEvaluation` or your own, see
        `t5x_lab.evaluation.config.Evaluation`.
      eval_period: steps between evaluations that do not say otherwise.
      early_stopping: when to end because an evaluation gets no better; None = never.
      saving: when checkpoints are made and which are kept.
      trainable: a regular expression; parameters whose whole names match it are trained, the others stay what they are, with
        no gradient and no slots. None = all; of an optimizer with groups, those of groups that are not frozen.
      hooks: what happens beside training, see `t5x_lab.training.hooks.Hook`; metrics are written by hooks, too.
      bad_steps: steps in a row whose loss or gradient is not finite that are skipped; the next one ends the training.
      average_decay: of an exponential moving average of the weights, which is evaluated and saved beside them; None = none.
      wait_minutes: how long one of several processes waits for the others, before it says for what, and ends.
      profile_steps: how many steps are traced into `model_dir`/profile, from the third of this process; 0 = none.
    """

    model: ModelConfig = dataclasses.field(metadata=macro("MODEL"))
    optimizer: Optimizer = dataclasses.field(metadata=macro("OPTIMIZER"))
    data: DataConfig
    model_dir: str = dataclasses.field(metadata=macro("MODEL_DIR"))
    train_steps: int | None = dataclasses.field(default=None, metadata=macro("TRAIN_STEPS"))
    train_tokens: int | None = dataclasses.field(default=None, metadata=macro("TRAIN_TOKENS"))
    initial_checkpoint_path: str | None = dataclasses.field(default=None, metadata=macro("INITIAL_CHECKPOINT_PATH"))
    restore: RestoreCheckpointConfig = RestoreCheckpointConfig()
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
    hooks: tuple = dataclasses.field(default=(), compare=False)  # they have a state of their own
    bad_steps: int = dataclasses.field(default=0, metadata=macro("BAD_STEPS"))
    average_decay: float | None = dataclasses.field(default=None, metadata=macro("AVERAGE_DECAY"))
    wait_minutes: float = dataclasses.field(default=30.0, metadata=macro("WAIT_MINUTES"))
    profile_steps: int = dataclasses.field(default=0, metadata=macro("PROFILE_STEPS"))

    def __post_init__(self):
        check_types(self)
        positive(self, "train_steps", "train_tokens", "microbatches", "eval_period")
        in_range(self, "seed", 0, 2**31)
        in_range(self, "profile_steps", 0, 1001)
        in_range(self, "bad_steps", 0, 2**31)
        in_range(self, "average_decay", 0.0, 1.0)
        positive(self, "wait_minutes")
        check_hooks(self.hooks)
        check_evaluations(self.evals)
        if self.model.unchecked and self.data.converter is None and self.data.pack:
            raise self.model.unchecked
        if (self.train_steps is None) == (self.train_tokens is None):
            raise UserError(
                f"TRAIN_STEPS is {self.train_steps} and TRAIN_TOKENS is {self.train_tokens}; give one of them: the number of "
                "the last step, or the tokens to process, padding excluded. Both count from the beginning of the run."
            )
        if not self.model_dir:
            raise UserError("MODEL_DIR is empty; name the directory that the run is kept in.")
        if self.data.batch_size % self.microbatches:
            raise UserError(
                f"BATCH_SIZE is {self.data.batch_size}, which MICROBATCHES={self.microbatches} does not divide; every "
                "microbatch has the same number of rows."
            )
        self.mesh_shape  # noqa: B018  (a mistake in it is found here)

    def identity(self) -> dict[str, str]:
        """Settings that a checkpoint is continued with unchanged, under the names the user sets them by."""
        return {
            "SEED": str(self.seed),
            "OPTIMIZER": optimizer_identity(self.optimizer),
            "TRAINABLE": str(self.trainable),
            "ADDED": by_name(self.model.added),
            **self.data.identity(),
        }

    @property
    def mesh_shape(self) -> MeshShape:
        return MeshShape.parse(self.mesh)


# Where T5X has the class of the same name, so that a module in front of it ("utils.SaveCheckpointConfig") is understood.
_MODULES_OF_T5X = {
    SaveCheckpointConfig: "utils",
    RestoreCheckpointConfig: "utils",
    TransformerConfig: "network",
    Adafactor: "adafactor",
}
CONFIGURABLES = (
    RunConfig,
    LossEvaluation,
    MetricsEvaluation,
    RankingEvaluation,
    SamplesEvaluation,
    ClassificationEvaluation,
    ProbeEvaluation,
    Blimp,
    Sentiment,
    Acceptability,
    Answers,
    Referents,
    EarlyStopping,
    SamplingConfig,
    BeamConfig,
    SaveCheckpointConfig,
    RestoreCheckpointConfig,
    ModelConfig,
    TransformerConfig,
    RotaryScaling,
    LstmConfig,
    Lora,
    SoftPrompt,
    Adapter,
    ClassificationHead,
    DataConfig,
    Mixing,
    Denoising,
    MaskedLm,
    TextFiles,
    SentencePieceVocabulary,
    ByteVocabulary,
    HuggingFaceVocabulary,
    SpecialTokens,
    Prompts,
    Records,
    FewShot,
    Collection,
    Classification,
    SequencesConverter,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    Sgd,
    Groups,
    GradualUnfreezing,
    LearningRate,
    LinearDecay,
    WarmupLinear,
    CosineDecay,
    WarmupStableDecay,
    ShardingRules,
    Console,
    JsonLines,
    TensorBoard,
    WeightsAndBiases,
    Norms,
)


@gin.configurable(module="t5x_lab")
def batch_in_tokens(tokens: int, lengths: dict[str, int], shards: int) -> int:
    """Rows of a batch of about so many tokens, padding included: the nearest multiple of `shards`, at least one of each.

    Args:
      tokens: of inputs and targets together, in all rows.
      lengths: TASK_FEATURE_LENGTHS, of one row.
      shards: DATA_SHARDS.
    """
    if not lengths or shards < 1:
        raise UserError(f"batch_in_tokens needs TASK_FEATURE_LENGTHS and DATA_SHARDS above 0; they are {lengths} and {shards}.")
    return max(1, round(tokens / sum(lengths.values()) / shards)) * shards


for _configurable in CONFIGURABLES:
    gin.external_configurable(_configurable, module=".".join(filter(None, ("t5x_lab", _MODULES_OF_T5X.get(_configurable)))))
gin.external_configurable(standardize, module="t5x_lab")


class GinConfig:
    """A configuration, parsed once; the parts that a command needs are built when asked for.

    Args:
      files, bindings, search_paths, source: see `t5x_lab.config.gin_files.parse`.

    Attributes:
      text: all of it as one gin file; reading that alone gives the same configuration.
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        bindings: Sequence[str] = (),
        search_paths: Sequence[str] = (),
        source: str = "on the command line",
    ):
        gin_files.parse([DEFAULTS, *files], bindings, search_paths, source, before="\n".join(lines_of(CONFIGURABLES)))
        self.text = gin_files.config_text()

    def _build(self, selector: str):
        gin_files.parse([], [self.text])  # gin's state is global, and another configuration may have been read since
        return gin_files.build(selector, HINTS)

    def run(self) -> RunConfig:
        return self._build("RunConfig")

    def model(self) -> ModelConfig:
        return self._build("RunConfig.model")

    def data(self) -> DataConfig:
        return self._build("DataConfig")

    def prompts(self) -> Prompts:
        return self._build("DataConfig.prompts")

    def classification(self) -> Classification:
        """What the run's task classifies.

        Raises:
          UserError: when it is none that does.
        """
        task = self._build("head_of_task.task") or self._build("DataConfig.mixture_or_task_name")  # of the user's own head
        return classification_of(task, self.prompts())

    def mesh(self) -> MeshShape:
        return MeshShape.parse(self._build("RunConfig.mesh"))

    def sharding(self) -> ShardingRules:
        return self._build("RunConfig.sharding")

    def evals(self) -> tuple:
        return tuple(self._build("RunConfig.evals"))

    def trainable(self) -> str | None:
        return self._build("RunConfig.trainable")

    def optimizer(self) -> Optimizer:
        return self._build("RunConfig.optimizer")

    def keeps_average(self) -> bool:
        return self._build("RunConfig.average_decay") is not None

    def vocabulary(self) -> Vocabulary:
        return self._build("DataConfig.vocabulary")

    def vocabulary_if_set(self) -> Vocabulary | None:
        """None of a model of token ids alone."""
        try:
            return self.vocabulary()
        except NotSet:
            return None

    def special_tokens(self) -> SpecialTokens:
        return self._build("DataConfig.special_tokens")


def run_config_file(model_dir: str) -> str:
    """The path of a run directory's config.gin.

    Raises:
      UserError: when there is none.
    """
    path = epath.Path(model_dir) / "config.gin"
    if not path.exists():
        raise UserError(f"{model_dir} is not a run directory: it has no config.gin. Name the MODEL_DIR of a training run.")
    if "://" not in str(path):
        return str(path)
    copy = pathlib.Path(tempfile.mkdtemp()) / "config.gin"  # gin reads local files
    copy.write_text(path.read_text())
    return str(copy)
