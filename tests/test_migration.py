"""`t5x_lab migrate`: files in the style of T5X projects become files with the same settings here."""

import os
import pathlib
import re
import shutil
import subprocess
import types

import pytest

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import binding
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.migration.project import Project
from t5x_lab.migration.statements import Binding, MacroReference, Reference, read_statements
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.optim.optimizers import Adafactor, AdamW
from t5x_lab.runs.config.gin_config import GinConfig, known_macros

TASKS = "import seqio\n"  # the project's own module
# A model and a run without T5X's files, as projects copy them: every binding that a training needs.
MODEL = """
from __gin__ import dynamic_registration
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.t5 import network

# The loss.
LABEL_SMOOTHING = 0.1
LOSS_NORMALIZING_FACTOR = None
DROPOUT_RATE = %gin.REQUIRED

VOCABULARY = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary.sentencepiece_model_file = "vocabulary.model"
OPTIMIZER = @adafactor.Adafactor()
adafactor.Adafactor:
  decay_rate = 0.9  # faster than T5's
  step_offset = 0
  logical_factor_rules = @adafactor.standard_logical_factor_rules()
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
  label_smoothing = %LABEL_SMOOTHING
  loss_normalizing_factor = %LOSS_NORMALIZING_FACTOR
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 4224
  emb_dim = 96
  num_heads = 3
  dropout_rate = %DROPOUT_RATE
"""
RUN = """
from __gin__ import dynamic_registration
import __main__ as train_script
from t5x import gin_utils
from t5x import partitioning
from t5x import trainer
from t5x import utils
import my_tasks

include "model.gin"

MODEL_DIR = %gin.REQUIRED
DROPOUT_RATE = 0.05
STEPS = 300
RANDOM_SEED = 17
LEARNING_RATE = 0.02
FORGOTTEN = 5
train_script.train:
  model = %MODEL
  model_dir = %MODEL_DIR
  train_dataset_cfg = @train/utils.DatasetConfig()
  train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()
  infer_eval_dataset_cfg = None
  checkpoint_cfg = @utils.CheckpointConfig()
  partitioner = @partitioning.PjitPartitioner()
  trainer_cls = @trainer.Trainer
  total_steps = %STEPS
  eval_steps = 7
  eval_period = 50
  stats_period = 10
  random_seed = %RANDOM_SEED
  use_hardware_rng = True
  summarize_config_fn = @gin_utils.summarize_gin_config
partitioning.PjitPartitioner:
  num_partitions = 1
  model_parallel_submesh = (2, 1, 1, 2)
  logical_axis_rules = @partitioning.standard_logical_axis_rules()
train/utils.DatasetConfig:
  mixture_or_task_name = "my_task"
  task_feature_lengths = {"inputs": 24, "targets": 8}
  split = "train"
  batch_size = 6
  shuffle = True
  seed = None
  use_cached = False
  pack = False
train_eval/utils.DatasetConfig:
  mixture_or_task_name = "my_task"
  task_feature_lengths = {"inputs": 24, "targets": 8}
  split = "test"
  batch_size = 12
  shuffle = False
  seed = 42
utils.CheckpointConfig:
  restore = @utils.RestoreCheckpointConfig()
  save = @utils.SaveCheckpointConfig()
utils.RestoreCheckpointConfig:
  path = "pretrained"
  mode = "specific"
  dtype = "float32"
utils.SaveCheckpointConfig:
  period = 25
  keep = 4
  dtype = "float32"
trainer.Trainer:
  num_microbatches = 3
  learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler.base_learning_rate = %LEARNING_RATE
"""


@pytest.fixture
def project():
    pathlib.Path("my_tasks.py").write_text(TASKS)
    pathlib.Path("model.gin").write_text(MODEL)
    pathlib.Path("run.gin").write_text(RUN)


def test_a_run_has_the_settings_that_t5x_would_give_it(project, capsys, monkeypatch):
    """Also T5X's defaults where nothing binds a parameter, which differ from those here."""
    assert main(["migrate", "run.gin", "--output=out"]) == 0
    assert "2 of 2 files are whole" in capsys.readouterr().out
    monkeypatch.chdir("out")
    pathlib.Path("my_tasks.py").write_text(TASKS)
    run = GinConfig(["run.gin"], ['MODEL_DIR = "x"']).run()
    assert (run.train_steps, run.seed, run.microbatches, run.initial_checkpoint_path) == (300, 17, 3, "pretrained")
    assert run.restore.carry == ("optimizer", "step")
    assert (run.saving.period, run.saving.keep, run.eval_period, run.mesh) == (25, 4, 50, "data=-1,tensor=4")
    data = run.data
    assert (data.mixture_or_task_name, data.task_feature_lengths) == ("my_task", {"inputs": 24, "targets": 8})
    assert (data.batch_size, data.pack, data.shuffle, data.eval_steps) == (6, False, True, 7)
    assert (data.vocabulary.path, data.vocabulary.extra_ids) == ("vocabulary.model", 0)  # SeqIO has no sentinels by default
    loss = next(each for each in run.evals if each.name == "eval")
    assert (loss.split, loss.batch_size) == ("test", 12)
    model = run.model
    assert (model.z_loss, model.label_smoothing, model.loss_normalizing_factor) == (0.0, 0.1, None)
    network = model.network
    assert isinstance(network, TransformerConfig) and network.architecture == "encoder_decoder"
    assert (network.vocab_size, network.emb_dim, network.num_heads, network.dropout_rate) == (4224, 96, 3, 0.05)
    assert (network.num_encoder_layers, network.num_decoder_layers, network.head_dim, network.mlp_dim) == (6, 6, 64, 2048)
    assert (network.mlp_activations, network.dtype) == (("relu",), "float32")
    assert isinstance(run.optimizer, Adafactor) and run.optimizer.decay_rate == 0.9
    rate = run.optimizer.learning_rate  # constant * linear_warmup * rsqrt_decay with 1,000 steps of warm-up
    for step in (10, 500, 1000, 4000):
        expected = 0.02 * min(1.0, step / 1000) / max(step, 1000) ** 0.5
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5)


def test_what_has_no_effect_is_left_out_and_named(project, capsys):
    assert main(["migrate", "run.gin", "--output=out"]) == 0
    text = pathlib.Path("out/run.gin").read_text()
    assert "import my_tasks\n" in text and "# from t5x import trainer\n" in text
    assert "# FORGOTTEN = 5\n#   Nothing that is left uses it." in text
    assert "# train_script.train.stats_period = 10\n#   metrics.jsonl has every step; the console a line a minute." in text
    assert "PROJECT_LEARNING_RATE = 0.02" in text  # LEARNING_RATE is a schedule here
    assert "# The loss.\n" in pathlib.Path("out/model.gin").read_text()
    assert main(["migrate", "run.gin", "--output=out"]) == 2
    assert "out/run.gin exists" in capsys.readouterr().err


def test_t5xs_own_files_have_counterparts_with_what_they_set_otherwise(capsys):
    pathlib.Path("finetune.gin").write_text("""
include "t5x/examples/t5/t5_1_1/small.gin"
include "/home/me/t5x/t5x/configs/runs/finetune.gin"
MIXTURE_OR_TASK_NAME = "t5_glue_cola"
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 8}
TRAIN_STEPS = 1_000_100
INITIAL_CHECKPOINT_PATH = "pretrained"
infer_eval/utils.DatasetConfig.batch_size = 16
models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 3
""")
    assert main(["migrate", "finetune.gin", "--output=out"]) == 0
    assert "1 of 1 files are whole" in capsys.readouterr().out
    run = GinConfig(["out/finetune.gin"], ['MODEL_DIR = "x"']).run()
    assert run.model.network.num_encoder_layers == 8 and run.model.loss_normalizing_factor is None
    assert (run.saving.keep, run.saving.period, run.data.use_cached) == (None, 5000, True)
    assert run.restore.carry == ("optimizer", "step")  # TRAIN_STEPS counts from the checkpoint's step
    assert run.model.network.dropout_rate == 0.1
    assert (run.optimizer.learning_rate.factors, run.optimizer.learning_rate.base_learning_rate) == ("constant", 0.001)
    metrics = next(each for each in run.evals if each.name == "infer")
    assert (metrics.batch_size, metrics.decoding.size, metrics.truncate_inputs) == (16, 3, None)


def test_what_a_person_has_to_decide_is_listed_with_its_line(capsys):
    pathlib.Path("hard.gin").write_text("""
import optax
from t5x import optimizers
from flaxformer.architectures.longt5 import longt5_architecture
import mine

OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.clip(), @optax.adamw()]
optax.clip.max_delta = 1.0
optax.adamw.learning_rate = 1e-4
models.EncoderDecoderModel.module = @longt5_architecture.LongEncoderDecoder()
mine.Thing.size = 3
partitioning.standard_logical_axis_rules.additional_rules = @mine.rules()
include "flaxformer/t5x/configs/longt5/models/longt5_1_1_galaxy.gin"
include "nowhere.gin"
""")
    assert main(["migrate", "hard.gin", "--output=out"]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 files are whole" in out
    for line, says in (
        (11, "The network is longt5, which is not here"),
        (13, "ShardingRules.parameters"),
        (14, "has no counterpart"),
        (15, "nowhere.gin is not found"),
    ):
        assert f"  line {line}: " in out and says in out, (line, out)
    text = pathlib.Path("out/hard.gin").read_text()
    assert "OPTIMIZER = @AdamW()\nAdamW.clip_global_norm = None\n" in text and "AdamW.clip_value = 1.0\n" in text
    assert "mine.Thing.size = 3\n" in text and 'adamw/LearningRate.factors = "constant"' in text


def test_chained_clipping_by_the_norm_is_the_optimizers_own():
    pathlib.Path("adamw.gin").write_text("""
include "t5x/examples/t5/t5_1_1/small.gin"
OPTIMIZER = @optimizers.chain()
optimizers.chain.transformations = [@optax.clip_by_global_norm(), @optax.adamw()]
optax.clip_by_global_norm.max_norm = 0.5
optax.adamw:
  learning_rate = @optax.warmup_cosine_decay_schedule()
  weight_decay = 0.2
optax.warmup_cosine_decay_schedule:
  init_value = 0.0
  peak_value = 1e-3
  warmup_steps = 100
  decay_steps = %TRAIN_STEPS
  end_value = 1e-5
TRAIN_STEPS = 1000
MIXTURE_OR_TASK_NAME = "a"
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 8}
""")
    assert main(["migrate", "adamw.gin", "--output=out"]) == 0
    optimizer = GinConfig(["out/adamw.gin"], ['MODEL_DIR = "x"']).run().optimizer
    assert isinstance(optimizer, AdamW) and (optimizer.clip_global_norm, optimizer.weight_decay) == (0.5, 0.2)
    for step, expected in ((50, 5e-4), (100, 1e-3), (550, (1e-3 + 1e-5) / 2), (1000, 1e-5)):
        assert float(optimizer.learning_rate(step)) == pytest.approx(expected, rel=1e-4)


def test_a_run_file_after_the_model_leaves_its_optimizer_and_dropout():
    pathlib.Path("own.gin").write_text("""
import optax
from t5x import optimizers
include "t5x/examples/t5/t5_1_1/small.gin"
OPTIMIZER = @optimizers.adamw()
optax.adamw.learning_rate = 1e-4
DROPOUT_RATE = 0.2
include "t5x/configs/runs/pretrain.gin"
MIXTURE_OR_TASK_NAME = "a"
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 8}
TRAIN_STEPS = 10
""")
    assert main(["migrate", "own.gin", "--output=out"]) == 0
    run = GinConfig(["out/own.gin"], ['MODEL_DIR = "x"']).run()
    assert isinstance(run.optimizer, AdamW) and run.model.network.dropout_rate == 0.2
    assert (run.optimizer.clip_global_norm, run.optimizer.weight_decay) == (None, 0.0001)  # optax's defaults
    assert float(run.optimizer.learning_rate(5)) == float(run.optimizer.learning_rate(50_000)) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "text, migrated",
    [
        ('utils.DatasetConfig.split = "test"\nevaluate.output_dir = "x"\n', 'MetricsEvaluation.split = "test"\n'),
        ('utils.DatasetConfig.split = "train[:10]"\n', 'DataConfig.split = "train[:10]"\n'),
        (
            "decoding.temperature_sample.topk = 40\n",
            "SamplingConfig.top_k = 40\nSamplingConfig.temperature = 1.0  # T5X's default\n",
        ),
        (
            "import mine\nNUM_HEADS = 4\nmine.C.heads = %NUM_HEADS\n",
            "import mine\nTransformerConfig.num_heads = 4\nmine.C.heads = 4\n",
        ),
        ("import mine\ntrainer.Trainer.learning_rate_fn = @mine.f()\n", "import mine\nLEARNING_RATE = @mine.f()\n"),
        ("RestoreCheckpointConfig.path = []\n", ""),
        ("trainer.Trainer.num_microbatches = 0\n", ""),
        ("Trainer.num_microbatches = 4\nTrainer.num_microbatches = None\n", "MICROBATCHES = 4\nMICROBATCHES = 1\n"),
        (
            "adafactor.Adafactor.factored = False\n",
            "Adafactor.min_dim_size_to_factor = 1000000000  # no second moment is factored\n",
        ),
        (
            "Adafactor.global_norm_clip_threshold = 1.0\nAdafactor.weight_decay_rate_lr_exponent = 2.0\n",
            "Adafactor.clip_global_norm = 1.0\nAdafactor.weight_decay_lr_exponent = 2.0\n",
        ),
        (
            "PjitPartitioner.num_partitions = 4\npartitioning.standard_logical_axis_rules.parameter_partitioning_dims = 2\n",
            'MESH = "fsdp=-1,tensor=4"\n',
        ),
        ("standard_logical_axis_rules.parameter_partitioning_dims = 2\n", 'MESH = "fsdp=-1"\n'),
        (
            "PjitPartitioner.logical_axis_rules = [('batch', 'data'), ('embed', 'data'), ('mlp', None), ('heads', 'model'), "
            "('kv', None), ('mine', 'model'), ('mine', None)]\n",
            'MESH = "fsdp=-1"\nShardingRules.parameters = {"mine": "tensor", "mlp": None}\n',
        ),
        (
            "PjitPartitioner.num_partitions = 2\nPjitPartitioner.logical_axis_rules = [('embed', 'data'), ('vocab', None)]\n",
            'MESH = "fsdp=-1,tensor=2"\nShardingRules.parameters = {"vocab": None}\n',
        ),
        (
            "partitioning.standard_logical_axis_rules.additional_rules = [('mine', 'model'), ('mlp', None)]\n",
            'ShardingRules.parameters = {"mine": "tensor"}\n',
        ),
        ("LOGICAL_AXIS_RULES = @partitioning.standard_logical_axis_rules()\n", ""),
        ('train.actions = {"TRAIN_EVAL": [@trainer.TerminateOnNanAction()]}\n', ""),
        ("bias_init/linen.initializers.normal.stddev = 1e-6\nBIAS_INIT = @bias_init/linen.initializers.normal()\n", ""),
        (
            'include "flaxformer/t5x/configs/t5/architectures/t5_flaxformer.gin"\nEncoderDecoderModel.module = %ARCHITECTURE\n',
            'TransformerConfig.architecture = "encoder_decoder"\nTransformerConfig.logits_via_embedding = True\n',
        ),
    ],
)
def test_single_bindings(text, migrated):
    pathlib.Path("one.gin").write_text(text)
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    lines = pathlib.Path("out/one.gin").read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == migrated


@pytest.mark.parametrize(
    "text",
    [
        'mine/utils.DatasetConfig.split = "test"\n',
        'inputs/SentencePieceVocabulary.sentencepiece_model_file = "a"\n',
        "layers.DecoderLayer.parallel = True\n",
        "EVAL_PERIOD = 0\n",
        "EncoderDecoderModel.module = %ARCHITECTURE\n",
        "normal.stddev = 0.02\n",
        'scope/linen.initializers.normal.dtype = "float32"\n',
        "train.actions = {'TRAIN': [@trainer.EarlyStoppingAction()]}\n",
        "from t5x import adafactor\nimport mine\nmine.C.optimizer = @adafactor.Adafactor()\n",
    ],
)
def test_what_would_change_its_meaning_is_left_to_a_person(text, capsys):
    pathlib.Path("one.gin").write_text(text)
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    assert "0 of 1 files are whole" in capsys.readouterr().out


def test_a_later_default_replaces_an_earlier_value():
    pathlib.Path("base.gin").write_text(
        "train/utils.DatasetConfig.pack = False\npartitioning.PjitPartitioner.num_partitions = 2\n"
    )
    later = "train/utils.DatasetConfig.pack = True\npartitioning.PjitPartitioner.num_partitions = 1\n"
    pathlib.Path("later.gin").write_text(f'include "base.gin"\n{later}')
    assert main(["migrate", "later.gin", "--output=out"]) == 0
    assert pathlib.Path("out/later.gin").read_text() == 'include "base.gin"\nDataConfig.pack = True\nMESH = "data=-1"\n'
    assert pathlib.Path("out/base.gin").read_text() == 'DataConfig.pack = False\nMESH = "data=-1,tensor=2"\n'


def test_flags_of_t5xs_launch_lines_are_taken(monkeypatch, capsys):
    monkeypatch.setenv("TFDS_DATA_DIR", "elsewhere")
    flags = ["--tfds_data_dir=data", "--seqio_additional_cache_dirs=a,b", "--alsologtostderr", "--logtostderr=true"]
    needed = ["MIXTURE_OR_TASK_NAME=sotu_full_lm", 'TASK_FEATURE_LENGTHS={"targets": 8}', "MODEL_DIR=run", "TRAIN_STEPS=1"]
    files = ["--gin_file=models/decoder/tiny.gin", "--gin.VOCABULARY=@ByteVocabulary()"]
    assert main(["train", *files, *flags, *(f"--gin.{each}" for each in needed), "--dry_run"]) == 0
    assert "CACHE_DIRS = ('a', 'b')" in capsys.readouterr().out
    assert os.environ["TFDS_DATA_DIR"] == "data"


def test_statements_are_read_without_imports_and_with_their_text(tmp_path):
    file = tmp_path / "a.gin"
    file.write_text("# one\nimport not_there\nX = {'a': (%Y, @f())}  # two\n\n# three\ns/m.C:\n  p = [1,\n       2]\n")
    texts = [(type(each).__name__, each.text, each.line) for each in read_statements(file)]
    assert texts == [
        ("Statement", "# one\n", 1),
        ("Import", "import not_there\n", 2),
        ("Binding", "X = {'a': (%Y, @f())}  # two\n", 3),
        ("Statement", "\n# three\n", 4),
        ("Binding", "s/m.C.p = [1, 2]\n", 7),
    ]
    binding = read_statements(file)[2]
    assert isinstance(binding, Binding) and binding.value == {"a": (MacroReference("Y"), Reference("f", True))}
    file.write_text("X = = 3\n")
    with pytest.raises(UserError, match="a.gin, line 1, is not gin: Unable"):
        read_statements(file)
    file.write_text('include "a.gin"\n')
    with pytest.raises(UserError, match="includes"):
        Project([str(file)], [str(tmp_path)], known_macros())


def test_macros_of_t5xs_run_files_have_their_values():
    """These files are not read, so that a reference to their macros becomes the value."""
    bindings = "train/DatasetConfig.shuffle = %SHUFFLE_TRAIN_EXAMPLES\ntrain.eval_steps = %EVAL_STEPS\n"
    pathlib.Path("one.gin").write_text(f'include "t5x/configs/runs/pretrain.gin"\n{bindings}')
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    last = (
        "# train/DatasetConfig.shuffle = %SHUFFLE_TRAIN_EXAMPLES\n#   That is the default here.\nDataConfig.eval_steps = 20\n"
    )
    assert pathlib.Path("out/one.gin").read_text().endswith(last)


def test_optimizers_by_names_of_parameters_are_groups():
    """Patterns of HParamMap may match a part of a name; those of `match_any` and those here match all of it."""
    pathlib.Path("scales.gin").write_text("""
include "t5x/examples/t5/t5_1_1/small.gin"
adafactor.Adafactor.multiply_by_parameter_scale = @adafactor.HParamMap()
adafactor.HParamMap.rules = [("relpos_bias", False), (".*", True)]
adafactor.Adafactor.decay_rate = 0.7
OPTIMIZER = @adafactor.Adafactor()
""")
    pathlib.Path("frozen.gin").write_text("""
include "t5x/examples/t5/t5_1_1/small.gin"
OPTIMIZER = @optimizers.MultiOptimizer()
optimizers.MultiOptimizer.traversals_and_optimizers = [(@bias/traversals.ModelParamTraversal(), @adafactor.Adafactor())]
bias/traversals.ModelParamTraversal.filter_fn = @match_any()
match_any.regexes = [".*/relpos_bias/.*", "/decoder/.*norm.*", "^.*norm.*$"]
""")
    assert main(["migrate", "scales.gin", "frozen.gin", "--output=out"]) == 0
    needed = [
        'MODEL_DIR = "x"',
        'MIXTURE_OR_TASK_NAME = "a"',
        'TASK_FEATURE_LENGTHS = {"inputs": 8, "targets": 8}',
        "TRAIN_STEPS = 1",
    ]
    scales, frozen = (GinConfig([f"out/{name}.gin"], needed).run().optimizer for name in ("scales", "frozen"))
    settings = [(pattern, each.multiply_by_parameter_scale, each.decay_rate) for pattern, each in scales.groups]
    assert settings == [(".*relpos_bias.*", False, 0.7), (".*", True, 0.7)]
    assert [(pattern, each is None) for pattern, each in frozen.groups] == [
        ("(.*/)?relpos_bias/.*", False), ("decoder/.*norm.*", False), ("^.*norm.*$", False), (".*", True),
    ]  # fmt: skip
    assert frozen.is_trained("encoder/relpos_bias/rel_embedding") and not frozen.is_trained("encoder/layers/mlp/wi/kernel")


IN_PLACE = [
    "train", "--gin.train/utils.DatasetConfig.task_feature_lengths={'inputs': 24, 'targets': 12}", "--gin_file=run.gin", "--gin.MODEL_DIR=x", "--gin.VOCABULARY=@seqio.ByteVocabulary()", "--dry_run",
    "--gin.train/utils.DatasetConfig.mixture_or_task_name=sotu_span_corruption", "--gin.utils.RestoreCheckpointConfig.path=None",
    "--gin.train_eval/utils.DatasetConfig.mixture_or_task_name=sotu_span_corruption",
    "--gin.train_eval/utils.DatasetConfig.split=validation", "--gin.train_eval/utils.DatasetConfig.batch_size=8",
    "--gin.train/utils.DatasetConfig.batch_size=24",
]  # fmt: skip


def test_files_of_t5x_are_read_as_they_are(project, capsys):
    """Bindings of the command line may have T5X's names or ours. The files in the working directory are not taken for translations."""
    mesh = "--gin.MESH=data=-1"  # of ours, in place of one in the file under T5X's name
    assert main([*IN_PLACE, mesh]) == 0
    out = "".join(capsys.readouterr())
    assert "command line: utils.RestoreCheckpointConfig.path = None -> INITIAL_CHECKPOINT_PATH = None\n" in out
    assert re.search(r"run.gin, line \d+: RANDOM_SEED = 17 -> SEED = 17\n", out)
    assert re.search(r"model.gin, line \d+: network.T5Config.emb_dim = 96 -> TransformerConfig.emb_dim = 96\n", out)
    assert "6,859,968 parameters" in out and "steps       0 to 300" in out and "fresh parameters" in out
    assert pathlib.Path("run.gin").read_text() == RUN


def test_files_of_t5x_with_open_decisions_are_not_read_as_they_are(project, capsys):
    assert main([*IN_PLACE, "--gin.train_script.train.eval_period=0"]) == 2
    error = capsys.readouterr().err
    assert "1 of their statements need a decision. Translate the files with t5x_lab migrate FILE --output=FOLDER" in error
    assert "command line: train_script.train.eval_period = 0\n    Evaluations have a period" in error


SCRIPT = r"""#!/bin/bash
MODEL_DIR=$1
# python3 -m t5x.train --gin_file=old.gin
HF_HUB_OFFLINE=1 python3 -m t5x.train \
  --gin_search_paths=gins,"${T5X_DIR}" \
  --gin_file="model.gin" \
  --gin_file="${T5X_DIR}/t5x/configs/runs/pretrain.gin" \
  --gin.MODEL_DIR="'${MODEL_DIR}'" \
  --gin.train/utils.DatasetConfig.batch_size=${BATCH} \
  --gin.TASK_FEATURE_LENGTHS="{\"inputs\": ${LENGTH}, \"targets\": 8}" \
  --gin.MIXTURE_OR_TASK_MODULE=\"my_tasks\" \
  --gin.partitioning.PjitPartitioner.num_partitions=$N \
  --gin.train.stats_period=100 \
  --gin.train.actions=@own_actions \
  --verbosity=1 \
  --tfds_data_dir $DATA 2>&1 | tee log.txt

if true; then
  python ${T5X_DIR}/t5x/eval.py --gin_search_paths=gins --gin_file=model.gin --gin.utils.DatasetConfig.split="'test'" \
    --gin.CHECKPOINT_PATH=\"$MODEL_DIR/checkpoint_1000\" --gin.EVAL_OUTPUT_DIR="'out'"; echo done
fi
"""
MIGRATED_SCRIPT = r"""#!/bin/bash
MODEL_DIR=$1
# python3 -m t5x.train --gin_file=old.gin
# --gin.train.stats_period=100: metrics.jsonl has every step; the console a line a minute.
# TO DO, --gin.train.actions=@own_actions: Hooks have the place of actions: HOOKS, docs/custom/hook.md.
# TO DO, --verbosity=1: t5x_lab train has no such flag.
HF_HUB_OFFLINE=1 t5x_lab train \
  --gin_search_paths=gins,"${T5X_DIR}" \
  --gin_file="model.gin" \
  --gin_file=t5x_files/configs_runs_pretrain.gin \
  --gin.MODEL_DIR="'${MODEL_DIR}'" \
  --gin.DataConfig.batch_size="${BATCH}" \
  --gin.LossEvaluation.batch_size=%BATCH_SIZE \
  --gin.TASK_FEATURE_LENGTHS="{\"inputs\": ${LENGTH}, \"targets\": 8}" \
  --gin_bindings="import my_tasks" \
  --gin.MESH="'data=-1,tensor=$N'" \
  --tfds_data_dir $DATA 2>&1 | tee log.txt

if true; then
  t5x_lab eval --gin_search_paths=gins --gin_file=model.gin --gin.MetricsEvaluation.split="'test'" \
    --gin.CHECKPOINT_PATH=\"$MODEL_DIR/checkpoint_1000\" --gin.EVAL_OUTPUT_DIR="'out'"; echo done
fi
"""


def test_a_launch_script_becomes_commands_of_t5x_lab(capsys):
    """A script has shell variables, quotes, files of T5X and of the project. Everything but its commands stays as it is."""
    pathlib.Path("gins").mkdir()
    pathlib.Path("gins/model.gin").write_text(MODEL)
    pathlib.Path("run.sh").write_text(SCRIPT)
    pathlib.Path("run.sh").chmod(0o755)
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    report = capsys.readouterr().out
    assert pathlib.Path("ours/run.sh").read_text() == MIGRATED_SCRIPT
    assert os.access("ours/run.sh", os.X_OK)
    assert "VOCABULARY = @SentencePieceVocabulary()" in pathlib.Path("ours/gins/model.gin").read_text()
    assert "LearningRate.warmup_steps = 10000\n" in pathlib.Path("ours/t5x_files/configs_runs_pretrain.gin").read_text()
    assert "line 14: --gin.train.actions=@own_actions\n" in report and "line 15: --verbosity=1\n" in report


def test_a_migrated_script_runs(tmp_path, monkeypatch, capsys):
    """The shell itself reads the translated commands: a stand-in for t5x_lab shows its arguments, which name a run."""
    pathlib.Path("gins").mkdir()
    pathlib.Path("gins/model.gin").write_text(MODEL + "DROPOUT_RATE = 0.0\nMIXTURE_OR_TASK_NAME = 'sotu_full_lm'\n")
    pathlib.Path("my_tasks.py").write_text("")
    pathlib.Path("run.sh").write_text(SCRIPT)
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    shown = tmp_path / "bin" / "t5x_lab"
    shown.parent.mkdir()
    shown.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$1.args"\n')
    shown.chmod(0o755)
    variables = {"PATH": f"{shown.parent}:{os.environ['PATH']}", "T5X_DIR": "/t5x", "BATCH": "4", "LENGTH": "32", "N": "1"}
    subprocess.run(["bash", "run.sh", "runs/a"], cwd="ours", env=variables, check=True, capture_output=True)
    arguments = pathlib.Path("ours/train.args").read_text().splitlines()
    assert {"--gin.DataConfig.batch_size=4", "--gin.MODEL_DIR='runs/a'", "--gin.MESH='data=-1,tensor=1'"} <= set(arguments)
    assert '--gin.TASK_FEATURE_LENGTHS={"inputs": 32, "targets": 8}' in arguments
    monkeypatch.chdir("ours")
    monkeypatch.syspath_prepend("..")
    capsys.readouterr()
    bindings = [binding(each.removeprefix("--gin.")) for each in arguments if each.startswith("--gin.")]
    files = [each.removeprefix("--gin_file=") for each in arguments if each.startswith("--gin_file=")]
    run = GinConfig(files, [*bindings, "TRAIN_STEPS = 10", "import my_tasks"], ("gins",)).run()
    assert (run.data.batch_size, run.model_dir, run.data.task_feature_lengths) == (4, "runs/a", {"inputs": 32, "targets": 8})


@pytest.mark.parametrize(
    "rules, lines",
    [
        ("((r'state/param_states.*', None),)", 'RestoreCheckpointConfig.carry = ["step"]'),
        ("[(r'^.*prompt.*$', None)]", 'RestoreCheckpointConfig.assignment_map = (("^.*prompt.*$", None),)'),
        ("((r'state/param_states/encoder/.*', None),)", "# TO DO"),
        ("[(r'.*attention.*', None)]", "# TO DO"),
        ("@my_rules()", "# TO DO"),
        ("[(%PATTERN, None)]", "# TO DO"),
        ("[(r'target(.*)mlp/expert(.*)', r'target\\1mlp\\2')]", "# TO DO"),
        ("None", "# "),
    ],
)
def test_rules_of_restoring_are_those_of_parameters_and_of_the_optimizer(rules, lines):
    path = 'utils.RestoreCheckpointConfig.path = "checkpoint_5"'
    binding = f"utils.RestoreCheckpointConfig.assignment_map = {rules}"
    pathlib.Path("rules.gin").write_text(f"from t5x import utils\n{binding}\n{path}\n")
    assert main(["migrate", "rules.gin", "--output=ours"]) == 0
    text = pathlib.Path("ours/rules.gin").read_text()
    assert text.split("\n")[2].startswith(lines), text
    carry = [line.split("  #")[0] for line in text.split("\n") if line.startswith("RestoreCheckpointConfig.carry")]
    assert carry[-1].endswith('= ["step"]' if "carry" in lines else '= ["optimizer", "step"]')


def test_comments_at_the_end_of_lines_stay():
    text = """
TRAIN_STEPS = 10  # short
utils.SaveCheckpointConfig:
  period = 5  # often
  keep = "# no comment"
trainer.Trainer.num_microbatches = 2  # of memory
"""
    pathlib.Path("comments.gin").write_text(f"from t5x import trainer\nfrom t5x import utils\n{text}")
    assert main(["migrate", "comments.gin", "--output=ours"]) == 0
    lines = pathlib.Path("ours/comments.gin").read_text().splitlines()
    assert "TRAIN_STEPS = 10  # short" in lines and "MICROBATCHES = 2  # of memory" in lines
    assert "CHECKPOINT_PERIOD = 5  # often" in lines and 'SaveCheckpointConfig.keep = "# no comment"' in lines


@pytest.mark.parametrize(
    "line, becomes",
    [
        ("(python3 -m t5x.train --gin.TRAIN_STEPS=3)", "(t5x_lab train --gin.TRAIN_STEPS=3)"),
        ("x=$(python3 -O -m t5x.infer --gin.TRAIN_STEPS=3)", "x=$(t5x_lab infer --gin.TRAIN_STEPS=3)"),
        ("cd /x&&/usr/bin/python3 -u t5x/train.py --gin.Z_LOSS=0.1&", "cd /x&&t5x_lab train --gin.Z_LOSS=0.1&"),
        ("python -m t5x.train --gin.TRAIN_STEPS=$((A + (B))) --gin.train.random_seed=3",
         "t5x_lab train --gin.TRAIN_STEPS=$((A + (B))) --gin.SEED=3"),
        ('python -m t5x.train --gin.MODEL_DIR="\'$(dirname "$(pwd)")/x\'" --gin.train.random_seed=3',
         't5x_lab train --gin.MODEL_DIR="\'$(dirname "$(pwd)")/x\'" --gin.SEED=3'),
        ("python -m t5x.train --gin.TRAIN_STEPS=3 \\\r\n  --gin.train.random_seed=3\r",
         "t5x_lab train --gin.TRAIN_STEPS=3 \\\r\n  --gin.SEED=3\r"),
        ("python -m t5x.train --gin.Z_LOSS=0.1 # --gin.X=3", "t5x_lab train --gin.Z_LOSS=0.1 # --gin.X=3"),
        ("python scripts/my_t5x/train.py --gin.train.random_seed=3", None),
        ("python -m t5x.scripts.xm --gin.train.random_seed=3", None),
        ('python -m t5x.train --gin_bindings="import my_tasks"', 't5x_lab train --gin_bindings="import my_tasks"'),
    ],
)  # fmt: skip
def test_commands_are_found_in_any_place_of_a_script(line, becomes):
    with open("run.sh", "w", newline="") as file:
        file.write(f"{line}\n")
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    with open("ours/run.sh", newline="") as file:
        assert file.read() == f"{line if becomes is None else becomes}\n"


@pytest.mark.parametrize(
    "line, note, last",
    [
        ("bash -c 'python3 -m t5x.train --gin.train.random_seed=3'", "It is inside a quoted text", "random_seed"),
        ('python -m t5x.train --gin.A="$(b', "Its end is not understood", "python"),
        ("python -m t5x.train --gin_file=nope.gin", "nope.gin is not found", "--gin_file=nope.gin"),
        ("python -m t5x.train --gin_file=$X", "Only the shell knows its name", "--gin_file=$X"),
        ('python -m t5x.train "${ARGS[@]}"', "Only the shell knows its flags", '"${ARGS[@]}"'),
        ("python -m t5x.train --gin.${K}=1", "It is not a binding of gin", "--gin.${K}=1"),
        ("python -m t5x.train --logdir out --gin.Z_LOSS=0.1", "has no such flag", "t5x_lab train --gin.Z_LOSS=0.1"),
    ],
)
def test_what_only_a_person_can_translate_in_a_script_is_reported(line, note, last, capsys):
    pathlib.Path("run.sh").write_text(f"{line}\n")
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    report = capsys.readouterr().out
    assert note in report and "0 of 1 files are whole" in report, report
    assert last in pathlib.Path("ours/run.sh").read_text().splitlines()[-1]


def test_two_files_with_one_place_are_refused(capsys):
    for name in ("a", "b"):
        pathlib.Path(name).mkdir()
        pathlib.Path(f"{name}/run.sh").write_text(f"# {name}\n")
    pathlib.Path("work").mkdir()
    os.chdir("work")
    assert main(["migrate", "../a/run.sh", "../b/run.sh", "--output=ours"]) == 2
    assert "would both be written to ours/run.sh" in capsys.readouterr().err


def test_evaluation_reads_the_split_that_t5x_would_read():
    """T5X's eval.gin and infer.gin read "test", unless a file says otherwise."""

    def split(text):
        pathlib.Path("eval.gin").write_text(f'from t5x import utils\ninclude "t5x/configs/runs/eval.gin"\n{text}')
        shutil.rmtree("ours", ignore_errors=True)
        assert main(["migrate", "eval.gin", "--output=ours"]) == 0
        return re.findall(r"^MetricsEvaluation.split = (\S+)", pathlib.Path("ours/eval.gin").read_text(), re.MULTILINE)[-1]

    assert split("") == '"test"'
    assert split('utils.DatasetConfig.split = "validation"\n') == '"validation"'
    assert split('MIXTURE_OR_TASK_SPLIT = "train"\n') == '"train"'


LONG = """
from __gin__ import dynamic_registration
from t5x import models
ARCHITECTURE = %gin.REQUIRED
include "flaxformer/t5x/configs/longt5/architectures/longt5_1_1_transient_global_flaxformer.gin"
NUM_HEADS = 2
NUM_ENCODER_LAYERS = 2
NUM_DECODER_LAYERS = 2
HEAD_DIM = 8
EMBED_DIM = 16
MLP_DIM = 32
NUM_EMBEDDINGS = 512
LOCAL_RADIUS = 5
TOKENS_PER_BLOCK = 4
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel.module = %ARCHITECTURE
"""


def test_longt5_of_flaxformer_has_its_windows_and_blocks(capsys):
    pathlib.Path("long.gin").write_text(LONG)
    pathlib.Path("base.gin").write_text('include "flaxformer/t5x/configs/longt5/models/longt5_1_1_transient_global_base.gin"\n')
    pathlib.Path("m.gin").write_text('include "flaxformer/t5x/configs/longt5/models/mlongt5_transient_global_base.gin"\n')
    pathlib.Path("local.gin").write_text('include "flaxformer/t5x/configs/longt5/models/longt5_1_1_large.gin"\n')
    assert main(["migrate", "long.gin", "base.gin", "m.gin", "local.gin", "--output=ours"]) == 0
    assert "4 of 4 files are whole" in capsys.readouterr().out
    networks = {name: GinConfig([f"ours/{name}.gin"]).model().network for name in ("long", "base", "m", "local")}
    windows = {name: (network.kinds[0].encoder_window, network.global_block_size) for name, network in networks.items()}
    assert windows == {"long": ((5, 5), 4), "base": ((127, 127), 16), "m": ((127, 127), 16), "local": ((127, 127), None)}
    assert (networks["long"].num_heads, networks["long"].logits_via_embedding, networks["m"].vocab_size) == (2, False, 250112)


@pytest.mark.parametrize(
    "line",
    [
        "train.trainer_cls = @mine.Trainer",
        "train.get_dataset_fn = @mine.read",
        "seqio.Evaluator.logger_cls = [@mine.Logger]",
        "utils.SaveCheckpointConfig.checkpointer_cls = @mine.Checkpointer",
        "train.inference_evaluator_cls = @mine.Evaluator",
        "partitioning.PjitPartitioner.logical_axis_rules = @mine.standard_logical_axis_rules()",
    ],
)
def test_what_is_the_projects_own_is_not_left_out_silently(line, capsys):
    pathlib.Path("own.gin").write_text(f"import mine\n{line}\n")
    assert main(["migrate", "own.gin", "--output=out"]) == 0
    assert "1 to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, migrated",
    [
        (
            "import mine\nNUM_HEADS = 2\nNUM_HEADS_2 = 4\nmine.f.heads = (%NUM_HEADS, %NUM_HEADS_2)\n",
            "mine.f.heads = (2, %NUM_HEADS_2)",
        ),
        (
            'include "t5x/examples/decoder_only/models/base.gin"\nDecoderOnlyModel.inputs_bidirectional_attention = True\n',
            'TransformerConfig.architecture = "prefix_decoder"',
        ),
        ("Trainer.learning_rate_fn = @utils.create_learning_rate_scheduler()\n", "LearningRate.warmup_steps = 1000"),
        ("# a\x0bb \u2028 c\nTRAIN_STEPS = 7\nBATCH_SIZE = 8\n", "TRAIN_STEPS = 7\nBATCH_SIZE = 8\n"),
    ],
)
def test_what_was_lost_or_changed_silently(text, migrated):
    pathlib.Path("one.gin").write_text(text)
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    assert migrated in pathlib.Path("out/one.gin").read_text()


def test_only_the_matcher_whose_meaning_is_defined_becomes_groups(capsys):
    pathlib.Path("one.gin").write_text("""
from t5x import optimizers
import mine
OPTIMIZER = @optimizers.MultiOptimizer()
optimizers.MultiOptimizer.traversals_and_optimizers = ((@optim.ModelParamTraversal(), @adafactor.Adafactor()),)
optim.ModelParamTraversal.filter_fn = @mine.inverse_match_any()
mine.inverse_match_any.regexes = [".*hyper.*"]
""")
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    assert "OPTIMIZER" in capsys.readouterr().out and "Groups.groups = [" not in pathlib.Path("out/one.gin").read_text()


def _run_of(text, needed=()):
    """Returns the run that a file of a T5X project describes after its translation."""
    pathlib.Path("one.gin").write_text(text)
    shutil.rmtree("ours", ignore_errors=True)
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    assert "TO DO" not in pathlib.Path("ours/one.gin").read_text()
    return GinConfig(["ours/one.gin"], ['MODEL_DIR = "x"', *needed]).run()


PRETRAINING = """
from t5x import utils
include "t5x/examples/t5/t5_1_1/tiny.gin"
include "t5x/configs/runs/pretrain.gin"
MIXTURE_OR_TASK_NAME = "b"
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 8}
TRAIN_STEPS = 10
DROPOUT_RATE = 0.0
"""


@pytest.mark.parametrize("scope, binding", [("train", ""), ("mine", "train.train_dataset_cfg = @mine/utils.DatasetConfig()\n")])
def test_data_of_training_alone_leave_those_of_evaluations(scope, binding):
    """T5X's run files read the macros in three places. A parameter replaces it in one of them."""
    run = _run_of(f"""{PRETRAINING}{binding}
{scope}/utils.DatasetConfig:
  mixture_or_task_name = "a"
  task_feature_lengths = {{"inputs": 12, "targets": 4}}
  batch_size = 64
BATCH_SIZE = 32
train.infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
""")
    data, (loss, metrics) = run.data, run.evals
    assert (data.mixture_or_task_name, data.task_feature_lengths, data.batch_size) == ("a", {"inputs": 12, "targets": 4}, 64)
    assert (loss.task, loss.lengths, loss.batch_size) == ("b", {"inputs": 24, "targets": 8}, 32)
    assert metrics.task == "b"


def test_a_parameter_stands_before_a_macro_of_the_same_meaning():
    run = _run_of(f"""{PRETRAINING}
train.random_seed = 7
train.eval_steps = 3
partitioning.PjitPartitioner.num_partitions = 2
RANDOM_SEED = 8
EVAL_STEPS = 4
NUM_MODEL_PARTITIONS = 1
network.T5Config.mlp_dim = 48
MLP_DIM = 96
""")
    assert (run.seed, run.data.eval_steps, run.mesh, run.model.network.mlp_dim) == (7, 3, "data=-1,tensor=2", 48)


def test_t5xs_run_files_replace_what_stands_before_them():
    before = "BATCH_SIZE = 8\nEVAL_PERIOD = 5\nutils.SaveCheckpointConfig.period = 5\ntrain.eval_steps = 5\n"
    run = _run_of(f"{before}{PRETRAINING}")
    assert (run.data.batch_size, run.eval_period, run.saving.period, run.data.eval_steps) == (128, 1000, 1000, 20)


def test_data_are_packed_where_t5x_would_pack_them(project):
    """T5X packs by default only in its run files."""
    without = RUN.replace("  pack = False\n", "")
    pathlib.Path("without.gin").write_text(without)
    assert main(["migrate", "without.gin", "--output=out"]) == 0
    assert "DataConfig.pack = False  # T5X's default" in pathlib.Path("out/without.gin").read_text()
    assert _run_of(PRETRAINING).data.pack


@pytest.mark.parametrize("file, sentinels", [("t5_1_1/base.gin", 100), ("byt5/base.gin", 0)])
def test_t5xs_models_have_its_sentinels(file, sentinels):
    """ByteVocabulary has none; the file of T5's vocabulary has 100, so that one of a project's own has none."""
    model = PRETRAINING.replace("t5_1_1/tiny.gin", file)
    assert _run_of(model).data.vocabulary.extra_ids == sentinels
    own = (
        'seqio.SentencePieceVocabulary.sentencepiece_model_file = "own.model"\nVOCABULARY = @seqio.SentencePieceVocabulary()\n'
    )
    assert _run_of(model + own).data.vocabulary.extra_ids == 0
    if sentinels:
        assert _run_of(model + own.partition("\n")[0]).data.vocabulary.extra_ids == 0


def test_decoders_sample_as_in_t5xs_file():
    model = PRETRAINING.replace("t5/t5_1_1/tiny.gin", "decoder_only/models/base.gin")
    decoding = _run_of(model).evals[1].decoding
    assert (decoding.temperature, decoding.top_k) == (1.0, 40)
    num_decodes = "models.DecoderOnlyModel.predict_batch_with_aux.num_decodes = 8\n"
    metrics = _run_of(f"{model}decoding.temperature_sample.topk = 1\n{num_decodes}").evals[1]
    assert (metrics.decoding.temperature, metrics.decoding.top_k, metrics.num_samples) == (1.0, 1, 8)


def test_encoder_decoders_have_one_beam_as_in_t5x(project):
    assert _run_of(PRETRAINING).evals[1].decoding == BeamConfig(1)
    assert main(["migrate", "run.gin", "--output=out"]) == 0
    assert "BeamConfig.size = 1  # T5X's default\n" in pathlib.Path("out/model.gin").read_text()
    sampled = "models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\n"
    assert _run_of(PRETRAINING + sampled).evals[1].decoding == SamplingConfig()


def test_metrics_are_evaluated_before_training_too():
    at_start = "train.run_eval_before_training = True\n"
    of_finetuning = PRETRAINING.replace("pretrain.gin", "finetune.gin") + 'INITIAL_CHECKPOINT_PATH = "x"\n'
    assert [each.at_start for each in _run_of(of_finetuning + at_start).evals] == [True, True]
    assert [each.at_start for each in _run_of(PRETRAINING + at_start).evals] == [True, False]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], dict(beam_size=3, beam_alpha=0.6, temperature=0.0, max_tokens=4, cut=True)),
        (["--temperature=1"], dict(beam_size=1, beam_alpha=None, temperature=1.0, max_tokens=4)),
    ],
)
def test_inference_has_the_task_and_the_beams_of_t5xs_file(flags, expected, monkeypatch):
    pathlib.Path("infer.gin").write_text("""
include "t5x/examples/t5/t5_1_1/tiny.gin"
include "t5x/configs/runs/infer.gin"
MIXTURE_OR_TASK_NAME = "b"
utils.DatasetConfig.mixture_or_task_name = "a"
utils.DatasetConfig.task_feature_lengths = {"inputs": 12, "targets": 4}
models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 3
""")
    pathlib.Path("pretrained").mkdir()
    pathlib.Path("pretrained/checkpoint").write_bytes(b"")  # of T5X; nothing is read
    settings = {}
    monkeypatch.setattr("t5x_lab.cli.infer.load_model", lambda args, config: types.SimpleNamespace(step=0))
    monkeypatch.setattr(
        "t5x_lab.cli.infer._task_examples", lambda args, config, model, **shard: settings.update(data=config.data())
    )
    infer = lambda *args, sampling, **kwargs: settings.update(sampling, cut=not kwargs["settings"]["whole_inputs"])
    monkeypatch.setattr("t5x_lab.evaluation.inference.infer.infer", infer)
    of_t5x = ["--gin.CHECKPOINT_PATH='pretrained'", "--gin.INFER_OUTPUT_DIR='out'"]
    assert main(["infer", "--gin_file=infer.gin", *of_t5x, *flags]) == 0
    assert expected.items() <= settings.items()
    assert (settings["data"].mixture_or_task_name, settings["data"].task_feature_lengths) == ("a", {"inputs": 12, "targets": 4})


def test_a_file_of_several_runs_has_to_become_the_same_for_all(capsys):
    """A default that one of the runs replaces is written; a value that differs is left to a person."""
    pathlib.Path("shared.gin").write_text('include "t5x/examples/t5/t5_1_1/tiny.gin"\nTrainer.num_microbatches = None\n')
    pathlib.Path("one.gin").write_text('include "shared.gin"\n')
    pathlib.Path("two.gin").write_text('Trainer.num_microbatches = 2\ninclude "shared.gin"\n')
    assert main(["migrate", "one.gin", "two.gin", "--output=ours"]) == 0
    assert "MICROBATCHES = 1\n" in pathlib.Path("ours/shared.gin").read_text()
    assert "3 of 3 files are whole" in capsys.readouterr().out
    pathlib.Path("shared.gin").write_text("import mine\nmine.f.heads = %NUM_HEADS\n")
    for name, heads in (("one", 2), ("two", 4)):
        pathlib.Path(f"{name}.gin").write_text(f'NUM_HEADS = {heads}\ninclude "shared.gin"\n')
    shutil.rmtree("ours")
    assert main(["migrate", "one.gin", "two.gin", "--output=ours"]) == 0
    out = capsys.readouterr().out
    assert "mine.f.heads = 2 for one.gin; mine.f.heads = 4 for two.gin. Copy this file for one of them.\n" in out


@pytest.mark.parametrize(
    "seeds, expected",
    [("train.random_seed = 3\ntrain/utils.DatasetConfig.seed = 4\n", 3), ("RANDOM_SEED = 9\nRANDOM_SEED = None\n", 0)],
)
def test_the_seed_of_a_run_is_that_of_training(seeds, expected):
    assert _run_of(PRETRAINING + seeds).seed == expected


@pytest.mark.parametrize(
    "bidirectional_first, value, architecture", [(True, True, "prefix"), (False, True, "prefix"), (False, False, "causal")]
)
def test_a_decoder_is_a_prefix_decoder_wherever_that_is_bound(bidirectional_first, value, architecture):
    bidirectional = f"models.DecoderOnlyModel.inputs_bidirectional_attention = {value}\n"
    config = "network.DecoderWrapper.config = @network.TransformerConfig()\n"
    of_t5x = "from t5x import models\nfrom t5x.examples.decoder_only import network\n"
    pathlib.Path("one.gin").write_text(of_t5x + (bidirectional + config if bidirectional_first else config + bidirectional))
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    lines = re.findall(r"^TransformerConfig.architecture = (.*)$", pathlib.Path("ours/one.gin").read_text(), re.MULTILINE)
    assert lines[-1] == f'"{architecture}_decoder"'


def test_a_macro_of_a_launch_line_that_files_read_is_the_projects(capsys):
    """LEARNING_RATE is a schedule here, so that the project's macro has another name in files and in launch lines."""
    pathlib.Path("run.gin").write_text("utils.create_learning_rate_scheduler.base_learning_rate = %LEARNING_RATE\n")
    pathlib.Path("run.sh").write_text("python -m t5x.train --gin_file=run.gin --gin.LEARNING_RATE=0.1 --gin.SEED=3\n")
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    assert "%PROJECT_LEARNING_RATE" in pathlib.Path("ours/run.gin").read_text()
    assert "--gin.PROJECT_LEARNING_RATE=0.1 --gin.SEED=3" in pathlib.Path("ours/run.sh").read_text()


def test_bindings_of_the_projects_own_do_not_stand_for_t5xs_of_the_same_name():
    own = "import mine\nmine.T5Config.num_heads = 3\nfrom t5x.examples.t5 import network\n"
    pathlib.Path("one.gin").write_text(f"{own}network.Transformer.config = @network.T5Config()\n")
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    assert "TransformerConfig.num_heads = 8  # T5X's default\n" in pathlib.Path("ours/one.gin").read_text()


@pytest.mark.parametrize(
    "text, migrated",
    [
        ("train.model = @models.EncoderDecoderModel()\n", "MODEL = @ModelConfig()\n"),
        ("EncoderDecoderModel.input_vocabulary = @seqio.ByteVocabulary()\n", "INPUT_VOCABULARY = @ByteVocabulary()\n"),
        ("\ufeffTRAIN_STEPS = 7\n", "TRAIN_STEPS = 7\n"),
        ('utils.DatasetConfig.use_cached = False\nevaluate.output_dir = "x"\n', "USE_CACHED_TASKS = False\n"),
        ('include "t5x/examples/t5/t5_1_1/examples/base_c4_pretrain.gin"\n', "EVAL_PERIOD = 2000\n"),
        ('include "t5x/configs/runs/eval.gin"\nTASK_FEATURE_LENGTHS = None\n', "MetricsEvaluation.truncate_inputs = None\n"),
    ],
)
def test_what_was_left_out_is_there(text, migrated):
    pathlib.Path("one.gin").write_text(text, encoding="utf-8")
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    assert migrated in pathlib.Path("ours/one.gin").read_text()


def test_a_file_that_is_not_gin_is_named_with_its_line(capsys):
    pathlib.Path("one.gin").write_text("TRAIN_STEPS = 7\nBATCH_SIZE = (\n")
    assert main(["migrate", "one.gin", "--output=ours"]) == 2
    assert re.search(r"one.gin, line \d, is not gin: [^.]*\.\n", capsys.readouterr().err)


def test_bindings_of_the_command_line_have_their_meaning_here(project, capsys):
    """T5X would not read EVAL_PERIOD where `train.eval_period` is bound."""
    assert main([*IN_PLACE, "--gin.MESH=data=-1", "--gin.EVAL_PERIOD=3"]) == 0
    assert re.search(r"^EVAL_PERIOD = 3$", capsys.readouterr().out, re.MULTILINE)


FINETUNING = """
from t5x import utils
from t5x import models
include "t5x/examples/t5/t5_1_1/base.gin"
include "t5x/configs/runs/finetune.gin"
MIXTURE_OR_TASK_NAME = "b"
TASK_FEATURE_LENGTHS = {"inputs": 24, "targets": 8}
TRAIN_STEPS = 10
INITIAL_CHECKPOINT_PATH = "pretrained/checkpoint_5"
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {"metrics.truncate_inputs": None, "metrics.lengths": None}),
        (
            "infer_eval/utils.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS\n",
            {"metrics.truncate_inputs": "right", "metrics.lengths": None},
        ),
        (
            'infer_eval/utils.DatasetConfig.task_feature_lengths = {"inputs": 9, "targets": 8}\n',
            {"metrics.truncate_inputs": "right", "metrics.lengths": {"inputs": 9, "targets": 8}},
        ),
        (
            "network.Transformer.config = @network.T5Config()\nnetwork.T5Config.emb_dim = 384\nDROPOUT_RATE = 0.3\n",
            {"network.emb_dim": 384, "network.mlp_dim": 2048, "network.mlp_activations": ("gelu", "linear"), "network.dropout_rate": 0.3},
        ),
        ("utils.CheckpointConfig.restore = None\n", {"run.initial_checkpoint_path": None}),
        (
            "utils.RestoreCheckpointConfig.path = [%INITIAL_CHECKPOINT_PATH]\n",
            {"run.initial_checkpoint_path": "pretrained/checkpoint_5"},
        ),
        (
            "models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\ndecoding.temperature_sample.topk = 0\n"
            "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 8\n",
            {"metrics.num_samples": 8, "metrics.decoding": SamplingConfig(1.0)},
        ),
        (
            "train.eval_period = 500\nEVAL_PERIOD = 2000\nutils.SaveCheckpointConfig.period = %EVAL_PERIOD\n",
            {"run.eval_period": 500, "loss.period": 500, "metrics.period": 500, "saving.period": 2000},
        ),
        (
            "models.EncoderDecoderModel.z_loss = 0.0\nZ_LOSS = 0.001\nnetwork.T5Config.dropout_rate = 0.0\nDROPOUT_RATE = 0.3\n"
            'utils.RestoreCheckpointConfig.path = "mine"\nINITIAL_CHECKPOINT_PATH = "other"\ntrain.total_steps = 50\n'
            "TRAIN_STEPS = 77\ntrain/utils.DatasetConfig.use_cached = False\nUSE_CACHED_TASKS = True\n",
            {
                "model.z_loss": 0.0, "network.dropout_rate": 0.0, "run.initial_checkpoint_path": "mine", "run.train_steps": 50,
                "data.use_cached": False,
            },
        ),
        (
            "train.infer_eval_dataset_cfg = @train_eval/utils.DatasetConfig()\ntrain_eval/utils.DatasetConfig.split = 'test'\n"
            "train/utils.DatasetConfig.mixture_or_task_name = 'a'\n",
            {"loss.split": "test", "metrics.split": "test", "loss.task": "b", "metrics.task": "b"},
        ),
    ],
)  # fmt: skip
def test_settings_after_t5xs_files_of_fine_tuning(text, expected):
    run = _run_of(FINETUNING + text)
    loss, metrics = run.evals
    parts = {"run": run, "data": run.data, "model": run.model, "network": run.model.network, "saving": run.saving}
    parts |= {"loss": loss, "metrics": metrics}
    actual = {name: getattr(parts[name.split(".")[0]], name.split(".")[1]) for name in expected}
    assert actual == expected


@pytest.mark.parametrize(
    "before, after, line",
    [
        ("train.train_eval_dataset_cfg = None", "train.train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()", "EVALS = (@LossEvaluation(), @infer/MetricsEvaluation())"),
        ("utils.RestoreCheckpointConfig.fallback_to_scratch = True", "utils.RestoreCheckpointConfig.fallback_to_scratch = False", "RestoreCheckpointConfig.strict = True"),
        ("RestoreCheckpointConfig.assignment_map = (('.*prompt.*', None),)", "RestoreCheckpointConfig.assignment_map = None", "RestoreCheckpointConfig.assignment_map = ()"),
        ("Adafactor.factored = False", "Adafactor.factored = True", "Adafactor.min_dim_size_to_factor = 128"),
        ("EVAL_PERIOD = 7\ntrain.eval_period = 250", "train.eval_period = %EVAL_PERIOD", "RunConfig.eval_period = %EVAL_PERIOD"),
    ],
)  # fmt: skip
def test_a_later_binding_restores_the_default(before, after, line):
    pathlib.Path("base.gin").write_text(f"{before}\n")
    pathlib.Path("later.gin").write_text(f'include "base.gin"\n{after}\n')
    assert main(["migrate", "later.gin", "--output=out"]) == 0
    assert f"{line}\n" in pathlib.Path("out/later.gin").read_text()


@pytest.mark.parametrize(
    "text, note",
    [
        ("train.train_eval_dataset_cfg = @train/utils.DatasetConfig()\ntrain/utils.DatasetConfig.batch_size = 16\n", None),
        ("HParamMap.rules = %RULES\nadafactor.Adafactor.multiply_by_parameter_scale = @HParamMap()\nOPTIMIZER = @Adafactor()\n", "Bind Groups.groups"),
        ("OPTIMIZER = @MultiOptimizer()\nMultiOptimizer.traversals_and_optimizers = [(1, 2, 3)]\n", "Bind Groups.groups"),
        ("train.actions = {'TRAIN': None}\n", None),
        ("RestoreCheckpointConfig.assignment_map = %MAP\n", "Write the rules as pairs"),
        ("CheckpointConfig.save = None\n", None),
        ("OPTIMIZER = @chain()\nchain.transformations = [@optax.adamw(), @optax.clip_by_global_norm()]\n", "not updates after it"),
        (
            "train/utils.DatasetConfig.split = 'train'\nutils.DatasetConfig.split = 'validation'\n",
            "It is for evaluations only, since it is bound for training",
        ),
    ],
)  # fmt: skip
def test_unusual_values_are_no_errors(text, note, capsys):
    pathlib.Path("one.gin").write_text(text)
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    assert (note or "1 of 1 files are whole") in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, migrated",
    [
        (
            "V = @seqio.ByteVocabulary()\nVOCABULARY = %V\n",
            "VOCABULARY = @ByteVocabulary()\nByteVocabulary.extra_ids = 0  # SeqIO's default\n",
        ),
        (
            "IN = @seqio.ByteVocabulary()\nEncoderDecoderModel.input_vocabulary = %IN\n",
            "INPUT_VOCABULARY = @ByteVocabulary()\nByteVocabulary.extra_ids = 0  # SeqIO's default\n",
        ),
        (
            "OPTIMIZER = @MultiOptimizer()\nMultiOptimizer.traversals_and_optimizers = [(@e/ModelParamTraversal(), @Adafactor())]\n"
            'e/traversals.ModelParamTraversal.filter_fn = @e/match_any()\nP = ".*/x/.*"\ne/optimizers.match_any.regexes = [%P]\n',
            "OPTIMIZER = @Groups()\nGroups.groups = [(\"(.*/)?x/.*\", @Adafactor()), ('.*', None)]\n",
        ),
    ],
)
def test_what_stands_behind_macros_and_scopes_is_translated(text, migrated, capsys):
    pathlib.Path("one.gin").write_text(text)
    assert main(["migrate", "one.gin", "--output=out"]) == 0
    assert "1 of 1 files are whole" in capsys.readouterr().out
    lines = pathlib.Path("out/one.gin").read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == migrated


def test_t5xs_own_files_alone_are_read_as_they_are(capsys):
    of_t5x = [f"--gin_file=t5x/{name}.gin" for name in ("examples/t5/t5_1_1/tiny", "configs/runs/pretrain")]
    task = ["MIXTURE_OR_TASK_NAME='sotu_span_corruption'", "TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 12}"]
    needed = [
        *task,
        "TRAIN_STEPS=1",
        "MODEL_DIR='x'",
        "DROPOUT_RATE=0.0",
        "USE_CACHED_TASKS=False",
        "VOCABULARY=@ByteVocabulary()",
    ]
    assert main(["train", *of_t5x, *(f"--gin.{each}" for each in needed), "--dry_run"]) == 0
    assert re.search(r"^SaveCheckpointConfig.keep = None$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    "text, setting, expected",
    [
        (f'{PRETRAINING}INITIAL_CHECKPOINT_PATH = "x"\n', lambda run: run.initial_checkpoint_path, None),
        (f"{FINETUNING}import types\nNUM_HEADS = 2\n", lambda run: run.model.network.num_heads, 12),
        (f"{FINETUNING}MIXTURE_OR_TASK_SPLIT = 'train'\n", lambda run: run.evals[1].split, None),
    ],
)
def test_macros_that_t5xs_files_do_not_read_have_no_effect(text, setting, expected):
    assert setting(_run_of(text)) == expected


def test_paths_of_evaluations_in_gin_files_are_taken(monkeypatch, capsys):
    """T5X's eval.gin and infer.gin name the checkpoint and the output directory. Their migrated launch lines have flags for them."""
    text = 'include "t5x/examples/t5/t5_1_1/tiny.gin"\ninclude "t5x/configs/runs/eval.gin"\nMIXTURE_OR_TASK_NAME = "a"\n'
    paths = 'CHECKPOINT_PATH = "checkpoint_5"\nEVAL_OUTPUT_DIR = "out"\n'
    pathlib.Path("eval.gin").write_text(text + paths)
    pathlib.Path("run.sh").write_text("python3 -m t5x.eval --gin_file=eval.gin\n$PY -m t5x.train --gin_file=eval.gin\n")
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    script = pathlib.Path("ours/run.sh").read_text()
    of_paths = "--gin.CHECKPOINT_PATH=\"'checkpoint_5'\" --gin.EVAL_OUTPUT_DIR=\"'out'\""
    assert of_paths in script and "t5x_lab train --gin_file=eval.gin\n" in script
    assert main(["eval", "--gin_file=eval.gin"]) == 2
    assert "checkpoint_5 does not exist" in capsys.readouterr().err


LAUNCHED = (
    "python3 -m t5x.{} --gin_file=t5x/examples/t5/t5_1_1/base.gin --gin_file=t5x/configs/runs/{}.gin --gin_file=a.gin {}\n"
)


@pytest.mark.parametrize(
    "program, run, flags, text, migrated",
    [
        (
            "train", "finetune", "", "utils.create_learning_rate_scheduler.warmup_steps = 500\n", "LearningRate.warmup_steps = 500\n",
        ),
        (
            "eval", "eval", "", 'utils.DatasetConfig.split = "validation"\nutils.DatasetConfig.batch_size = 16\n',
            'MetricsEvaluation.split = "validation"\nMetricsEvaluation.batch_size = 16\n',
        ),
        (
            "train", "pretrain", "--gin.LR=${lr}", "LR = 1e-3\noptax.adamw.learning_rate = %LR\n",
            'LR = 1e-3\nAdamW.learning_rate = @adamw/LearningRate()\nadamw/LearningRate.factors = "constant"\n'
            "adamw/LearningRate.base_learning_rate = %LR\n",
        ),
        (
            "train", "pretrain", "--gin.B=32", "B = 128\ntrain/utils.DatasetConfig.batch_size = %B\n"
            "train_eval/utils.DatasetConfig.batch_size = 128\n",
            "B = 128\nDataConfig.batch_size = %B\nLossEvaluation.batch_size = 128\n",
        ),
    ],
)  # fmt: skip
def test_files_are_translated_as_their_launch_lines_read_them(program, run, flags, text, migrated):
    """The other files of a command, its order and its bindings count."""
    pathlib.Path("a.gin").write_text(text)
    pathlib.Path("run.sh").write_text(LAUNCHED.format(program, run, flags))
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    lines = pathlib.Path("ours/a.gin").read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == migrated


def test_what_only_the_shell_knows_is_not_written_into_files(capsys):
    pathlib.Path("a.gin").write_text("N = 1\npartitioning.PjitPartitioner.num_partitions = %N\n")
    pathlib.Path("run.sh").write_text(LAUNCHED.format("train", "pretrain", "--gin.N=$N"))
    assert main(["migrate", "run.sh", "--output=ours"]) == 0
    assert "A launch script sets its value by a variable of the shell" in capsys.readouterr().out
    assert "⟦" not in pathlib.Path("ours/a.gin").read_text()


def test_a_changed_copy_of_a_run_file_of_t5x_is_read():
    """Projects that are copies of T5X's repository change its run files."""
    folder = pathlib.Path("t5x/configs/runs")
    folder.mkdir(parents=True)
    (folder / "pretrain.gin").write_text("""
from t5x import utils
USE_CACHED_TASKS = False
ROWS = 64
train/utils.DatasetConfig.batch_size = %ROWS
train_script.train.eval_period = 1000
utils.SaveCheckpointConfig.keep = 2
utils.create_learning_rate_scheduler.base_learning_rate = 0.5
""")
    run = _run_of(PRETRAINING)
    assert (run.data.use_cached, run.data.batch_size, run.saving.keep, run.eval_period) == (False, 64, 2, 1000)
    assert run.optimizer.learning_rate.base_learning_rate == 0.5
    assert "t5x/configs/runs/pretrain.gin\n" in pathlib.Path("ours/one.gin").read_text()


def test_parameters_before_t5xs_run_file_are_replaced_by_it():
    before = "train_script.train.eval_steps = 5\ntrain.random_seed = 5\ntrain/utils.DatasetConfig.batch_size = 16\n"
    after = "EVAL_STEPS = 7\nRANDOM_SEED = 8\nBATCH_SIZE = 32\n"
    more = "trainer.Trainer.num_microbatches = 2\ntrain/utils.DatasetConfig.pack = False\n"
    run = _run_of(before + more + FINETUNING + after)
    assert (run.data.eval_steps, run.seed, run.data.batch_size, run.microbatches, run.data.pack) == (7, 8, 32, 1, True)


def test_imports_are_those_of_a_file():
    """Gin's imports are not seen in files that include the one with them."""
    pathlib.Path("base.gin").write_text("from t5x import models\nmodels.EncoderDecoderModel.z_loss = 0.01\n")
    pathlib.Path("one.gin").write_text('include "base.gin"\nfrom mine import models\nmodels.EncoderDecoderModel.z_loss = 0.1\n')
    assert main(["migrate", "one.gin", "--output=ours"]) == 0
    assert "Z_LOSS = 0.01\n" in pathlib.Path("ours/base.gin").read_text()
    assert "models.EncoderDecoderModel.z_loss = 0.1\n" in pathlib.Path("ours/one.gin").read_text()
