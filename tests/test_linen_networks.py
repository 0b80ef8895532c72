"""Linen networks as T5X's projects write them, bound as they are: they train, resume, evaluate, decode, compile and shard."""

import pathlib
import shutil

import commands
import jax
import linen_networks
import numpy as np
import pytest
from flax import linen, serialization
from helpers import exhaustive_except
from test_networks import random_batch

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.linen_network import LinenNetwork
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.inference import Inference
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble

pytestmark = pytest.mark.slow
MODULES = {
    "encoder_decoder": linen_networks.Transformer,
    "causal_decoder": linen_networks.DecoderOnly,
    "prefix_decoder": linen_networks.DecoderOnly,
}


def sharded_model(architecture, mesh=MeshShape(1, 1, 1), **changes):
    config = linen_networks.Config(vocab_size=64, **changes)
    network = LinenNetwork(MODULES[architecture](config), architecture)
    return ShardedModel(ModelConfig(network), mesh, mesh.first_of(jax.devices()))


@pytest.mark.parametrize("architecture", MODULES)
def test_logits_and_axes_are_those_of_the_linen_module(architecture):
    sharded = sharded_model(architecture)
    params = sharded.init_params(0)
    batch = random_batch(architecture)
    module = sharded.model.config.network.module
    names = ["encoder_input_tokens"] * (architecture == "encoder_decoder") + ["decoder_input_tokens", "decoder_target_tokens"]
    others = {name: value for name, value in batch.items() if name.endswith(("segment_ids", "positions", "causal_attention"))}
    expected = module.apply({"params": params}, *(batch[name] for name in names), **others, enable_dropout=False)
    np.testing.assert_allclose(sharded.model.logits(params, batch), expected, rtol=1e-5, atol=1e-5)
    axes = sharded.model.axes
    assert axes["decoder"]["layers_0"]["self_attention"]["query"]["kernel"] == ("embed", "joined_kv")
    assert axes["decoder"]["layers_1"]["scale"] == ("embed",)


@pytest.mark.parametrize("architecture", exhaustive_except(MODULES, ("encoder_decoder", "prefix_decoder")))
def test_tokens_are_those_that_teacher_forcing_would_choose(architecture):
    """Prompts of different lengths, continued token by token with the module's own cache."""
    sharded = sharded_model(architecture)
    params = jax.tree.map(lambda x: 2 * x, sharded.init_params(1))
    start = [] if architecture == "encoder_decoder" else [0]
    prompts = [[*start, 5, 9, 11, 3], [*start, 7, 2]]
    generated = {i: tokens.tolist() for i, tokens, _ in Inference(sharded).generate(params, prompts, limits=[5, 5], eos_id=63)}
    for i, prompt in enumerate(prompts):
        written: list[int] = []
        for _ in range(5):
            if architecture == "encoder_decoder":
                inputs = [0, *written]
                batch = {"encoder_input_tokens": np.array([prompt])}
            else:
                inputs = [*prompt, *written]
                batch = {"decoder_causal_attention": np.array([[int(j < len(prompt)) for j in range(len(inputs))]])}
            batch |= {"decoder_input_tokens": np.array([inputs]), "decoder_target_tokens": np.ones((1, len(inputs)), int)}
            if architecture == "causal_decoder":
                del batch["decoder_causal_attention"]
            written.append(int(np.argmax(sharded.model.logits(params, batch)[0, -1])))
        assert generated[i] == written[: len(generated[i])] and (len(generated[i]) == 5 or written[len(generated[i])] == 63)


def slots_of_t5x(x):
    """Adafactor's slots of an unscanned parameter: v_row has the smaller dimension of a matrix, v_col the larger one."""
    if x.ndim < 2 or min(x.shape) < 8:
        return {"v": np.full(x.shape, 0.5, np.float32), "v_row": np.zeros(1, np.float32), "v_col": np.zeros(1, np.float32)}
    row, column = (np.arange(size, dtype=np.float32) for size in sorted(x.shape))
    return {"v": np.zeros(1, np.float32), "v_row": row, "v_col": column}


def test_its_checkpoints_of_t5x_load_under_the_modules_own_names(tmp_path):
    """Parameters are equal, and a row mean of Adafactor has the dimension `embed`, which T5X calls v_row or v_col by its size."""
    sharded = sharded_model("encoder_decoder", emb_dim=24, num_heads=2)
    params = sharded.init_params(2)
    optimizer = Adafactor(LearningRate("constant", 0.01), min_dim_size_to_factor=8)
    state = {"step": np.int32(7), "param_states": jax.tree.map(slots_of_t5x, params)}
    content = {"version": 3, "optimizer": {"target": jax.tree.map(np.asarray, params), "state": state}}
    (tmp_path / "checkpoint_7").mkdir()
    (tmp_path / "checkpoint_7" / "checkpoint").write_bytes(serialization.msgpack_serialize(content))

    axes, template = sharded.model.axes, sharded.abstract_params
    loaded = load_params(find(str(tmp_path)), template, axes)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    training = assemble(sharded, optimizer, batch_size=2, microbatches=1, seed=0)
    carry = RestoreCheckpointConfig(carry=("optimizer", "step"))
    state = carry_over(find(str(tmp_path)), training.init_state(loaded), template, axes, carry)
    attention = state.opt_state.v_row["decoder"]["layers_0"]["self_attention"]  # joined_kv 16, embed 24
    assert int(state.step) == 7
    np.testing.assert_array_equal(attention["out"]["kernel"], np.arange(24)[None])
    np.testing.assert_array_equal(attention["query"]["kernel"], np.arange(24)[:, None])


PROJECT = """
from __gin__ import dynamic_registration

import __main__ as train_script
from t5x import models
from t5x import adafactor
from t5x import utils
import linen_networks

include "t5x/configs/runs/pretrain.gin"

MIXTURE_OR_TASK_NAME = "sotu_span_corruption"
TASK_FEATURE_LENGTHS = {"inputs": 64, "targets": 24}
TRAIN_STEPS = 6
DROPOUT_RATE = 0.1
BATCH_SIZE = 8
USE_CACHED_TASKS = False
OPTIMIZER = @adafactor.Adafactor()
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @linen_networks.Transformer()
  optimizer_def = %OPTIMIZER
linen_networks.Transformer.config = @linen_networks.Config()
linen_networks.Config.dropout_rate = %DROPOUT_RATE
utils.SaveCheckpointConfig.period = 3
"""
FLAGS = ["--gin_file=project.gin", "--gin.VOCABULARY=@ByteVocabulary()", "--gin.DataConfig.eval_steps=2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["encoder_decoder", "prefix_decoder"])
def test_a_project_with_a_network_of_its_own_trains_resumes_evaluates_decodes_compiles_and_shards(architecture):
    shutil.copy(linen_networks.__file__, "linen_networks.py")
    text = PROJECT
    if architecture == "prefix_decoder":
        text = text.replace("EncoderDecoderModel", "DecoderOnlyModel").replace("networks.Transformer", "networks.DecoderOnly")
        text = text.replace("  optimizer_def", "  inputs_bidirectional_attention = True\n  optimizer_def")
        text = text.replace("sotu_span_corruption", "sotu_prefix_lm_objective_decoder_architecture")
        text = text.replace('"inputs": 64, "targets": 24', '"targets": 64')
    pathlib.Path("project.gin").write_text(text)
    run = lambda *argv, **environment: commands.run(*argv, environment=environment)
    succeeded = lambda done: done.returncode == 0 or pytest.fail(done.stderr)
    succeeded(run("train", *FLAGS, "--gin.MODEL_DIR=run"))
    succeeded(run("train", *FLAGS, "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=9"))
    succeeded(run("train", *FLAGS, "--gin.MODEL_DIR=whole", "--gin.TRAIN_STEPS=9"))
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    succeeded(run("train", *FLAGS, "--gin.MODEL_DIR=sharded", "--gin.MESH=data=1,fsdp=2,tensor=2", **four))
    losses = {
        name: {line["step"]: line["loss"] for line in read_metrics(name) if line["split"] == "train"}
        for name in ("run", "whole", "sharded")
    }
    assert losses["run"] == losses["whole"] and len(losses["run"]) == 9
    for step in (1, 2, 3):
        assert losses["sharded"][step] == pytest.approx(losses["whole"][step], rel=2e-3)
    succeeded(evaluated := run("eval", "--model_dir=run"))
    assert "step 9  eval/" in evaluated.stdout
    succeeded(run("generate", "--model_dir=run", "--prompt=The Congress", "--max_tokens=4"))
    compiled = run("compile", "--topology=v5e:2x2", *FLAGS, "--gin.MESH=fsdp=2,tensor=2", XLA_FLAGS="")
    succeeded(compiled)
    assert "fits" in compiled.stdout


def test_a_network_of_the_projects_own_is_migrated_as_a_linen_network():
    pathlib.Path("project.gin").write_text(PROJECT)
    assert main(["migrate", "project.gin", "--output=ours"]) == 0
    text = pathlib.Path("ours/project.gin").read_text()
    assert "ModelConfig.network = @LinenNetwork()\nLinenNetwork.module = @linen_networks.Transformer()\n" in text
    shutil.copy(linen_networks.__file__, "linen_networks.py")
    network = GinConfig(["ours/project.gin"], ["VOCABULARY = @ByteVocabulary()"]).model().network
    assert (network.name, network.vocab_size, network.module.config.dropout_rate) == ("Transformer", 384, 0.1)


@pytest.mark.parametrize(
    "module, says",
    [
        (linen_networks.Config(), "It must be a module of flax.linen"),
        (linen_networks.Dense(8, ("embed", "mlp")), "Set LinenNetwork.vocab_size"),
    ],
)
def test_what_is_said_of_a_wrong_module(module, says):
    with pytest.raises(UserError, match=says):
        LinenNetwork(module)


def test_a_module_without_a_cache_trains_and_does_not_generate():
    class Gru(linen.Module):
        vocab_size: int = 64

        @linen.compact
        def __call__(self, decoder_input_tokens, decoder_target_tokens, *, enable_dropout=True):
            x = linen.RNN(linen.GRUCell(8))(linen.Embed(self.vocab_size, 8)(decoder_input_tokens))
            return linen.Dense(self.vocab_size, name="out")(x)

    model = Model(ModelConfig(LinenNetwork(Gru(), "causal_decoder")))
    batch = random_batch("causal_decoder")
    assert model.logits(model.init(jax.random.key(0)), batch).shape == (4, 12, 64) and not model.can_generate
    with pytest.raises(UserError, match="has parameters with the name logits, which is taken"):
        Named = type(
            "Named",
            (Gru,),
            {"__call__": linen.compact(lambda self, a, b: linen.Dense(64, name="logits")(linen.Embed(64, 8)(a)))},
        )
        Model(ModelConfig(LinenNetwork(Named(), "causal_decoder")))
