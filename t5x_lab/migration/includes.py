"""Counterparts of the gin files of T5X and flaxformer."""

import dataclasses
import functools
import re
from collections.abc import Sequence

from t5x_lab.config.gin_files import PACKAGE_GIN

_ROOTS = ("flaxformer/t5x/", "t5x/configs/", "t5x/examples/", "t5x/contrib/")
# What T5X's model files and run files set, and ours do not.
_SAMPLING = ("SamplingConfig.temperature = 1.0", "SamplingConfig.top_k = 40")
ONE_BEAM = ("MetricsEvaluation.decoding = @BeamConfig()", "BeamConfig.size = 1  # T5X's default")
_SUM_OF_TOKENS = "LOSS_NORMALIZING_FACTOR = None  # the sum over tokens, T5X's default"
KEEP_ALL = "SaveCheckpointConfig.keep = None  # all checkpoints, T5X's default"
_CACHED = "USE_CACHED_TASKS = True  # T5X's default"
CARRY = 'RestoreCheckpointConfig.carry = ["optimizer", "step"]  # TRAIN_STEPS counts from the checkpoint, as in T5X'
CARRY_STEP = 'RestoreCheckpointConfig.carry = ["step"]  # TRAIN_STEPS counts from the checkpoint, as in T5X'
_OF_RUNS = ("BATCH_SIZE = 128", "EVAL_PERIOD = 1000", "DataConfig.eval_steps = 20", KEEP_ALL, _CACHED)
# Not our files of these names, which also bind OPTIMIZER and DROPOUT_RATE.
_PRETRAINING = (
    'LearningRate.factors = "constant * rsqrt_decay"',
    "LearningRate.base_learning_rate = 1.0",
    "LearningRate.warmup_steps = 10000",
    "CHECKPOINT_PERIOD = 1000",
    *_OF_RUNS,
)
_FINETUNING = (
    'LearningRate.factors = "constant"',
    "LearningRate.base_learning_rate = 0.001",
    "LearningRate.warmup_steps = 1000",
    "DROPOUT_RATE = 0.1",
    "INFER_EVAL_PERIOD = %EVAL_PERIOD",
    "MetricsEvaluation.truncate_inputs = None",
    "CHECKPOINT_PERIOD = 5000",
    *_OF_RUNS,
    CARRY,
)
_EVALUATION = ('MetricsEvaluation.split = "test"  # T5X\'s default',)
_C4 = (
    'MIXTURE_OR_TASK_NAME = "c4_v220_span_corruption"',
    'TASK_FEATURE_LENGTHS = {"inputs": 512, "targets": 114}',
    "BATCH_SIZE = 256",
    "DROPOUT_RATE = 0.0",
)

_LONGT5 = "flaxformer/t5x/configs/longt5"
_LOCAL = ("TransformerConfig.layer_pattern = (@longt5/LayerKind(),)", "longt5/LayerKind.encoder_window = (127, 127)")
_GLOBAL = "TransformerConfig.global_block_size = 16"

# Macros of T5X's run files that a project may refer to, or replace in one place.
RUN_MACROS = {
    "BATCH_SIZE": 128, "EVAL_STEPS": 20, "SHUFFLE_TRAIN_EXAMPLES": True, "RANDOM_SEED": None, "USE_HARDWARE_RNG": False,
    "EVALUATOR_USE_MEMORY_CACHE": True, "EVALUATOR_NUM_EXAMPLES": None, "JSON_WRITE_N_RESULTS": None,
    "MIXTURE_OR_TASK_MODULE": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """The translation of a file of T5X.

    Attributes:
      lines: lines to write in place of the include. () = none.
      note: what to do where there are none, a sentence.
      is_model: whether the file defines a network and its settings.
      is_run: whether the file defines a training run.
    """

    lines: Sequence[str] = ()
    note: str = ""
    is_model: bool = False
    is_run: bool = False


def t5x_file(include: str) -> str | None:
    """Returns the path of a file of T5X's or flaxformer's from its package on, "t5x/configs/runs/pretrain.gin"; else None."""
    starts = (f"/{include}".find(f"/{root}") for root in _ROOTS)
    return next((include[start:] for start in starts if start >= 0), None)


@functools.cache
def counterpart(include: str) -> Counterpart | None:
    """Returns what a file becomes; None if it is no file of T5X and flaxformer with a counterpart."""
    path = t5x_file(include)
    if path is None:
        return None
    if match := re.fullmatch(r"t5x/configs/runs/(\w+)\.gin", path):
        return _run_file(match[1])
    if match := re.fullmatch(r"t5x/examples/(t5|scalable_t5)/(t5_1_0|t5_1_1|mt5|byt5)/(\w+)\.gin", path):
        return _model(f"models/{match[2]}/{match[3].lower()}.gin", is_scalable=match[1] == "scalable_t5")
    if match := re.fullmatch(r"flaxformer/t5x/configs/t5/models/(t5_1_0|t5_1_1|mt5|byt5)_(\w+)\.gin", path):
        return _model(f"models/{match[1]}/{match[2].lower()}.gin")
    if match := re.fullmatch(r"flaxformer/t5x/configs/t5/architectures/t5_(1_1_)?flaxformer\.gin", path):
        tied = "False" if match[1] else "True"
        lines = ('TransformerConfig.architecture = "encoder_decoder"', f"TransformerConfig.logits_via_embedding = {tied}")
        return Counterpart(lines)
    if match := re.fullmatch(rf"{_LONGT5}/models/longt5_1_1(_transient_global)?_(\w+)\.gin", path):
        return _model(f"models/longt5/{'global' if match[1] else 'local'}_{match[2].lower()}.gin")
    if match := re.fullmatch(rf"{_LONGT5}/models/mlongt5_transient_global_(\w+)\.gin", path):
        model = _model(f"models/mt5/{match[1].lower()}.gin")
        return model and Counterpart((*model.lines, *_LOCAL, _GLOBAL), is_model=True)
    if match := re.fullmatch(rf"{_LONGT5}/architectures/longt5_1_1_(transient_global_)?flaxformer\.gin", path):
        lines = ('TransformerConfig.architecture = "encoder_decoder"', "TransformerConfig.logits_via_embedding = False")
        return Counterpart((*lines, *_LOCAL, *([_GLOBAL] if match[1] else [])))
    if match := re.fullmatch(r"t5x/examples/decoder_only/(?:models/)?(\w+)\.gin", path):
        model = _model(f"models/decoder/{match[1].lower()}.gin")
        return model and Counterpart((*model.lines, *_SAMPLING), is_model=True)
    if match := re.fullmatch(r"t5x/examples/t5/t5_1_1/examples/(\w+)_c4_pretrain\.gin", path):
        model = _model(f"models/t5_1_1/{match[1].lower()}.gin")
        steps = ("TRAIN_STEPS = 10000",) if match[1] == "small" else ("TRAIN_STEPS = 100000", "EVAL_PERIOD = 2000")
        return model and Counterpart((*model.lines, *_PRETRAINING, *_C4, *steps), is_model=True, is_run=True)
    return None


def _run_file(name: str) -> Counterpart | None:
    if name == "pretrain":
        return Counterpart(_PRETRAINING, is_run=True)
    if name == "finetune":
        return Counterpart(_FINETUNING, is_run=True)
    if name == "eval":
        return Counterpart((*_EVALUATION, "MetricsEvaluation.truncate_inputs = None"))
    if name == "infer":
        return Counterpart(_EVALUATION)
    if name == "infer_from_tfexample_file":
        return Counterpart(note="Instead of this file: t5x_lab infer --model_dir=RUN --input=FILE.jsonl --output=FILE.jsonl")
    return None


def _model(file: str, is_scalable: bool = False) -> Counterpart | None:
    if not (PACKAGE_GIN / file).is_file():
        return None
    lines = [f'include "{file}"', _SUM_OF_TOKENS, *(() if "/decoder/" in file else ONE_BEAM)]
    if "/byt5/" in file:
        lines.append("ByteVocabulary.extra_ids = 0  # as in T5X's file")
    if is_scalable:
        lines.append('TransformerConfig.relative_bias = "per_layer"  # as in scalable_t5')
    return Counterpart(tuple(lines), is_model=True)
