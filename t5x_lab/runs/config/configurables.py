"""Everything that gin may bind, from all layers, registered with gin."""

import gin

from t5x_lab.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig, Mixing, TextFiles
from t5x_lab.data.objectives.denoising import Denoising
from t5x_lab.data.objectives.language_modeling import MaskedLm
from t5x_lab.data.vocabularies.config import (
    ByteVocabulary,
    HuggingFaceVocabulary,
    SentencePieceVocabulary,
    SpecialTokens,
)
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
)
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.distillation import Teacher
from t5x_lab.networks.adapter import Adapter
from t5x_lab.networks.config import EncoderShape
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.linen_network import LinenNetwork
from t5x_lab.networks.lora import Lora
from t5x_lab.networks.lstm import LstmConfig
from t5x_lab.networks.rotary import RotaryScaling
from t5x_lab.networks.soft_prompt import SoftPrompt
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.observe.console import Console
from t5x_lab.observe.metrics import JsonLines
from t5x_lab.observe.norms import Norms
from t5x_lab.observe.tensorboard import TensorBoard
from t5x_lab.observe.weights_and_biases import WeightsAndBiases
from t5x_lab.optim.groups import Groups
from t5x_lab.optim.optimizers import Adafactor, AdamW, Lion, Muon, ScheduleFreeAdamW, Sgd
from t5x_lab.optim.schedules import CosineDecay, LearningRate, LinearDecay, WarmupLinear, WarmupStableDecay
from t5x_lab.optim.unfreezing import GradualUnfreezing, TrainFirst
from t5x_lab.papers import data_sets as _data_sets  # noqa: F401  (registers them)
from t5x_lab.papers.gpt1 import classification as _classification  # noqa: F401  (registers its tasks)
from t5x_lab.papers.gpt1.probes import Acceptability, Answers, Blimp, Referents, Sentiment
from t5x_lab.papers.gpt1.standardize import standardize
from t5x_lab.partitioning.rules import ShardingRules
from t5x_lab.prompts.classification.config import Classification
from t5x_lab.prompts.classification.converter import SequencesConverter
from t5x_lab.prompts.config import Collection, FewShot, Records
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.runs.config import task_defaults  # noqa: F401  (registers its functions)
from t5x_lab.runs.config.run_config import RunConfig

# Modules of T5X's classes of the same name, so that "utils.SaveCheckpointConfig" works.
_T5X_MODULES = {
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
    Teacher,
    TransformerConfig,
    RotaryScaling,
    LayerKind,
    EncoderShape,
    LstmConfig,
    LinenNetwork,
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
    ScheduleFreeAdamW,
    Sgd,
    Groups,
    GradualUnfreezing,
    TrainFirst,
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
    """Returns BATCH_SIZE for about this number of tokens, padding included: the nearest positive multiple of `shards`.

    Args:
      tokens: tokens of inputs and targets in all rows.
      lengths: TASK_FEATURE_LENGTHS.
      shards: DATA_SHARDS.
    """
    if not lengths or shards < 1:
        raise UserError(f"batch_in_tokens needs TASK_FEATURE_LENGTHS and DATA_SHARDS above 0. They are {lengths} and {shards}.")
    return max(1, round(tokens / sum(lengths.values()) / shards)) * shards


for _configurable in CONFIGURABLES:
    gin.external_configurable(_configurable, module=".".join(filter(None, ("t5x_lab", _T5X_MODULES.get(_configurable)))))
gin.external_configurable(standardize, module="t5x_lab")
