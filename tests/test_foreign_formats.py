"""T5X's and Hugging Face's checkpoints, read and written: numbers, logits, generated tokens, and files one should not trust."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct

import jax
import numpy as np
import pytest
from conftest import shared_data
from etils import epath
from flax import serialization, traverse_util
from helpers import exhaustive_except, tiny_config
from test_t5x_parity import MODELS, from_t5x, our_model

import t5x_lab
from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import t5x
from t5x_lab.checkpoints.formats import t5x_lab as native
from t5x_lab.checkpoints.formats.huggingface import directory as huggingface
from t5x_lab.checkpoints.formats.huggingface import safetensors_files
from t5x_lab.checkpoints.formats.location import find, open_source
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.checkpoints.layers import network_parts, unstack_layers
from t5x_lab.checkpoints.layout import named_leaves
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, concatenate, from_array, stack
from t5x_lab.cli.main import main as cli_main
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.config import EncoderShape
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.rotary import RotaryScaling
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.convert.convert import convert
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble

pytestmark = pytest.mark.slow


def sharded_model(network, mesh=MeshShape(1, 1, 1)):
    return ShardedModel(ModelConfig(network), mesh, mesh.first_of(jax.devices()))


def equal_trees(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), **(dict(rtol=0, atol=0) | tolerance)), a, b
    )


def test_lazy_tensors_are_numpys_arrays():
    a = np.arange(24.0).reshape(2, 3, 4)
    t = from_array(a)
    index = (slice(0, 2), slice(1, 3))
    pairs = [
        (t.index(1, 2), a[:, 2]),
        (t.narrow(2, 1, 3), a[:, :, 1:3]),
        (t.transpose(), a.T),
        (t.reshape((2, 12)), a.reshape(2, 12)),
        (t.reshape((2, 3, 2, 2)), a.reshape(2, 3, 2, 2)),
        (concatenate([t, t.narrow(1, 0, 1)], 1), np.concatenate([a, a[:, :1]], 1)),
        (stack([t.index(0, 1), t.index(0, 0)]), a[::-1]),
    ]
    for tensor, array in pairs:
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.read_all(), array)
        part = (*index, *(slice(None) for _ in range(array.ndim - 2)))[: array.ndim]
        np.testing.assert_array_equal(tensor.read(tuple(slice(*s.indices(n)) for s, n in zip(part, array.shape))), array[part])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["native/checkpoint_0", "native/checkpoint_5", "orbax/checkpoint_5"])
def test_a_t5x_checkpoint_is_read_to_the_bit_and_its_optimizer_too(name, layout):
    """The files' own numbers, by T5X's `expected.npz`; the slots are those that our Adafactor has after the same five steps."""
    folder = shared_data("t5x_checkpoints", name)
    if not (folder / layout).exists():
        pytest.skip(f"{name} has no {layout}")
    model = our_model(folder, scanned="scanned" in name)
    sharded = sharded_model(model.config.network)
    expected = np.load(folder / "expected.npz")
    prefix = "params_before/" if layout.endswith("0") else "params_after_5/"
    t5x_params = {key.removeprefix(prefix): expected[key] for key in expected.files if key.startswith(prefix)}
    place = find(str(folder / layout.split("/")[0]), int(layout[-1]))
    params = load_params(place, sharded.abstract_params, sharded.model.axes)
    equal_trees(params, from_t5x(t5x_params, model))
    if layout.endswith("0"):
        return
    optimizer = Adafactor(LearningRate("constant", 0.01), min_dim_size_to_factor=16)
    training = assemble(sharded, optimizer, batch_size=2, microbatches=1, seed=0)
    carry = RestoreCheckpointConfig(carry=("optimizer", "step"))
    state = carry_over(place, training.init_state(params), sharded.abstract_params, sharded.model.axes, carry)
    assert int(state.step) == 5 and int(state.opt_state.step) == 5

    batch = {key.removeprefix("batch/"): expected[key] for key in expected.files if key.startswith("batch/")}
    before = {key.removeprefix("params_before/"): expected[key] for key in expected.files if key.startswith("params_before/")}
    transformation = optimizer.make(model.axes)
    actual = from_t5x(before, model)
    slots = transformation.init(actual)
    gradient, update = jax.jit(jax.grad(lambda p: model.loss(p, batch).objective)), jax.jit(transformation.update)
    for _ in range(5):
        updates, slots = update(gradient(actual), slots, actual)
        actual = jax.tree.map(lambda a, b: a + b, actual, updates)
    for slot, wanted in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(slots), strict=True):
        np.testing.assert_allclose(slot, wanted, rtol=2e-3, atol=1e-12)


def test_a_t5x_checkpoint_with_momentum_is_continued_as_t5x_would(tmp_path):
    """T5X's formulas in float64, its slots m and v after three steps read from its format; the fourth step is made here."""
    config = tiny_config("causal_decoder", num_decoder_layers=1)
    sharded = sharded_model(config)
    flat = lambda tree: {name.replace("layers/", "layers_0/"): x for name, x in named_leaves(tree).items()}
    unstacked = lambda tree: {n: x[0] if "layers_0" in n else x for n, x in flat(tree).items()}
    params = {name: np.asarray(x, np.float64) for name, x in unstacked(random_params(sharded.model)).items()}
    rng = np.random.default_rng(1)
    slots = {name: {"m": np.zeros_like(x), "v": np.zeros_like(x)} for name, x in params.items()}

    def t5x_step(n, gradients):
        for name, x in params.items():
            slot, g = slots[name], gradients[name]
            decay = 1 - (n + 1.0) ** -0.8
            slot["v"] = decay * slot["v"] + (1 - decay) * (g * g + 1e-30)
            update = g / np.sqrt(slot["v"])
            update /= max(1.0, np.sqrt(np.mean(update**2)))
            subtrahend = 0.1 * max(1e-3, np.sqrt(np.mean(x**2))) * update
            slot["m"] = 0.9 * slot["m"] + (1 - 0.9) * subtrahend
            params[name] = (1 - 0.01) * x - slot["m"]

    draw = lambda: {name: rng.normal(size=x.shape) for name, x in params.items()}
    for n in range(3):
        t5x_step(n, draw())

    names = (("decoder/final_norm", "decoder/decoder_norm"), ("logits_dense", "decoder/logits_dense"))
    names += (("/self_attention_norm", "/pre_self_attention_layer_norm"), ("/mlp_norm", "/pre_mlp_layer_norm"))

    def nested(tree):
        renamed = {}
        for name, x in tree.items():
            for path, t5x_path in names:
                name = name.replace(path, t5x_path)
            renamed[tuple(name.split("/"))] = x
        return traverse_util.unflatten_dict(renamed)

    unused = {"v_row": np.zeros(1, np.float32), "v_col": np.zeros(1, np.float32)}
    of_params = {name: {**unused, **{k: x.astype(np.float32) for k, x in slot.items()}} for name, slot in slots.items()}
    target = nested({name: x.astype(np.float32) for name, x in params.items()})
    state = {"step": np.int32(3), "param_states": nested(of_params)}
    (tmp_path / "checkpoint_3").mkdir()
    index = serialization.msgpack_serialize({"version": 3, "optimizer": {"target": target, "state": state}})
    (tmp_path / "checkpoint_3" / "checkpoint").write_bytes(index)

    optimizer = Adafactor(LearningRate("constant", 0.1), momentum=0.9, weight_decay=0.01)
    training = assemble(sharded, optimizer, batch_size=2, microbatches=1, seed=0)
    place, axes = find(str(tmp_path), 3), sharded.model.axes
    t5x_restored = load_params(place, sharded.abstract_params, axes)
    carry = RestoreCheckpointConfig(carry=("optimizer", "step"))
    restored = carry_over(place, training.init_state(t5x_restored), sharded.abstract_params, axes, carry)
    gradients = draw()
    stacked = [gradients[name].reshape(x.shape).astype(np.float32) for name, x in flat(t5x_restored).items()]
    grads = jax.tree.unflatten(jax.tree.structure(t5x_restored), stacked)
    updates, _ = optimizer.make(axes).update(grads, restored.opt_state, restored.params)
    t5x_step(3, gradients)
    for name, x in unstacked(jax.tree.map(lambda a, b: a + b, restored.params, updates)).items():
        np.testing.assert_allclose(x, params[name], rtol=1e-5, atol=1e-6, err_msg=name)


NETWORKS = {
    "t5_1_0": dict(mlp_activations=("relu",), logits_via_embedding=True, num_decoder_layers=2),
    "t5_1_1": dict(num_encoder_layers=3),
    "byt5": dict(vocab_size=384, num_encoder_layers=4, num_decoder_layers=2),
    "umt5": dict(relative_bias="per_layer", num_encoder_layers=3, num_decoder_layers=3, logits_via_embedding=True),
    "longt5": dict(num_encoder_layers=3, layer_pattern=(LayerKind(encoder_window=(3, 3)),)),
    "longt5_global": dict(num_encoder_layers=3, layer_pattern=(LayerKind(encoder_window=(3, 3)),), global_block_size=4),
    "flan_ul2": dict(mlp_activations=("silu", "linear"), head_dim=8, num_heads=2, num_encoder_layers=3),
    "gpt1": dict(
        architecture="causal_decoder", mlp_activations=("gelu",), logits_via_embedding=True, scaling="standard",
        positions="learned", max_positions=40, norm="layer", norm_position="post", norm_epsilon=1e-5, use_bias=True,
        mlp_dim=64, head_dim=4, dtype="float32",
    ),
    "llama": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, head_dim=6, dtype="float32",
    ),
    "qwen3": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, head_dim=6, qk_norm=True, rotary_theta=1e6, dtype="float32",
    ),
    "llama3": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        head_dim=6, rotary_theta=500_000.0, rotary_scaling=RotaryScaling(8.0, "llama3", 1.0, 4.0, 16), dtype="float32",
    ),
    "gemma2": dict(
        architecture="causal_decoder", scaling="standard", positions="rotary", num_kv_heads=2, head_dim=6, norm_position="both",
        logits_via_embedding=True, scale_embeddings=True, attention_logit_cap=2.0, logit_cap=3.0, dtype="float32",
        num_decoder_layers=5, layer_pattern=(LayerKind(window=4), LayerKind()),
    ),
    "gemma3": dict(
        architecture="causal_decoder", scaling="standard", positions="rotary", num_kv_heads=2, head_dim=6, norm_position="both",
        logits_via_embedding=True, scale_embeddings=True, qk_norm=True, query_pre_attn_scalar=9.0, dtype="float32",
        rotary_theta=1e6, rotary_scaling=RotaryScaling(8.0, "linear"), num_decoder_layers=8,
        layer_pattern=(LayerKind(window=4, rotary_theta=100.0),) * 5 + (LayerKind(),),
    ),
    "t5gemma": dict(
        scaling="standard", positions="rotary", num_kv_heads=2, head_dim=6, norm_position="both", share_embeddings=False,
        logits_via_embedding=True, scale_embeddings=True, attention_logit_cap=2.0, logit_cap=3.0, dtype="float32",
        num_encoder_layers=3, num_decoder_layers=3, layer_pattern=(LayerKind(window=4, encoder_window=(4, 4)), LayerKind()),
    ),
    "t5gemma_unbalanced": dict(
        scaling="standard", positions="rotary", num_kv_heads=2, head_dim=6, norm_position="both", share_embeddings=False,
        scale_embeddings=True, attention_logit_cap=2.0, logit_cap=3.0, dtype="float32", num_encoder_layers=4,
        num_decoder_layers=1, layer_pattern=(LayerKind(window=3, encoder_window=(3, 3)), LayerKind()),
        encoder=EncoderShape(emb_dim=24, num_heads=6, num_kv_heads=3, head_dim=4, mlp_dim=40, query_pre_attn_scalar=9.0),
    ),
    "t5gemma2": dict(
        scaling="standard", positions="rotary", num_kv_heads=2, head_dim=6, norm_position="both", logits_via_embedding=True,
        scale_embeddings=True, qk_norm=True, merged_attention=True, rotary_theta=1e6, rotary_scaling=RotaryScaling(8.0, "linear"),
        num_encoder_layers=3, num_decoder_layers=4, dtype="float32",
        layer_pattern=(LayerKind(window=4, encoder_window=(1, 2), rotary_theta=100.0),) * 2 + (LayerKind(),),
    ),
    "mistral": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, head_dim=6, layer_pattern=(LayerKind(window=4),), dtype="float32",
    ),
    "qwen2_windows": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        use_bias=("qkv",), layer_pattern=(LayerKind(), LayerKind(window=3), LayerKind(window=3)), dtype="float32",
    ),
    "qwen3_windows": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, head_dim=6, qk_norm=True, layer_pattern=(LayerKind(window=4), LayerKind()), dtype="float32",
    ),
    "smollm3": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, num_decoder_layers=5, rotary_theta=5e4, dtype="float32", logits_via_embedding=True,
        layer_pattern=(LayerKind(), LayerKind(window=4, rotary=False), LayerKind(window=4)),
    ),
    "olmo2": dict(
        architecture="causal_decoder", mlp_activations=("silu", "linear"), scaling="standard", positions="rotary",
        num_kv_heads=2, norm_position="output", qk_norm="all_heads", norm_epsilon=1e-5, dtype="float32",
    ),
}  # fmt: skip


def network(kind: str) -> TransformerConfig:
    changes = dict(NETWORKS[kind])
    return tiny_config(changes.pop("architecture", "encoder_decoder"), **changes)


def random_params(model: Model, seed=0) -> dict:
    """Weights with which everything matters: no zero biases, no scales of one."""
    rng = np.random.default_rng(seed)
    draw = lambda leaf: (
        rng.normal(size=leaf.shape) * 0.3 + (1.0 if len(leaf.shape) == 2 and leaf.shape[-1] == 16 else 0.0)
    ).astype(np.float32)
    return jax.tree.map(draw, model.abstract_params)


def exported(kind, directory, **options):
    """A random model of ours, and transformers' model of the directory that it was written to."""
    model = Model(ModelConfig(network(kind)))
    params = random_params(model)
    directory.mkdir()
    tensors = unstack_layers({name: from_array(leaf) for name, leaf in named_leaves(params).items()})
    huggingface.write(directory, tensors, model.config.network, **options)
    return model, params


def theirs_of(directory):
    pytest.importorskip("torch", reason="pip install -e '.[compare]' compares with transformers")
    transformers = pytest.importorskip("transformers")
    kind = json.loads((directory / "config.json").read_text())
    auto = transformers.AutoModelForSeq2SeqLM if kind.get("is_encoder_decoder") else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    of_images = ("model.encoder.vision_tower", "model.encoder.multi_modal_projector")
    is_text = lambda name: not (name.startswith(of_images) or name.endswith("eoi_embedding"))
    info["missing_keys"] = set(filter(is_text, info["missing_keys"]))
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def batches(model):
    """Rows with padding in both features."""
    rng = np.random.default_rng(1)
    tokens = lambda *lengths: np.array([np.pad(rng.integers(2, 64, n), (0, 12 - n)) for n in lengths])
    targets = tokens(12, 7, 3)
    batch = {"decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1], "decoder_target_tokens": targets}
    if model.config.network.has_encoder:
        batch["encoder_input_tokens"] = tokens(12, 5, 9)
    return batch


def their_logits(hf_model, batch):
    torch = pytest.importorskip("torch")

    inputs = {name: torch.tensor(value) for name, value in batch.items()}
    with torch.no_grad():
        if "encoder_input_tokens" in batch:
            ids = inputs["encoder_input_tokens"]
            out = hf_model(input_ids=ids, attention_mask=(ids > 0).long(), decoder_input_ids=inputs["decoder_input_tokens"])
        else:
            out = hf_model(input_ids=inputs["decoder_input_tokens"])
    return out.logits.numpy()


def assert_close(actual, expected, where):
    scale = np.abs(expected[where]).max()
    assert np.abs(actual - expected)[where].max() < 2e-5 * scale, (np.abs(actual - expected)[where].max(), scale)


IN_MAKE_TEST = NETWORKS.keys() - {
    "longt5",
    "umt5",
    "flan_ul2",
    "byt5",
    "qwen3",
    "mistral",
    "qwen3_windows",
    "llama3",
    "t5gemma_unbalanced",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_except(NETWORKS, IN_MAKE_TEST))
def test_logits_and_greedy_tokens_equal_transformers_in_both_directions(kind, tmp_path):
    torch = pytest.importorskip("torch")

    model, params = exported(kind, tmp_path / "hf")
    hf_model = theirs_of(tmp_path / "hf")
    batch = batches(model)
    where = batch["decoder_target_tokens"] > 0
    assert_close(np.asarray(jax.jit(model.logits)(params, batch)), their_logits(hf_model, batch), where)
    if "encoder_input_tokens" in batch:  # two examples packed into a row are the two alone
        two = {name: value[1:] for name, value in batch.items()}
        packed = {}
        for name in ("encoder_input_tokens", "decoder_target_tokens", "decoder_input_tokens"):
            lengths = [7, 3] if name.startswith("decoder") else [5, 9]
            rows = [two[name][i][:n] for i, n in enumerate(lengths)]
            feature = name.split("_")[0]
            packed[name] = np.concatenate(rows)[None]
            packed[f"{feature}_segment_ids"] = np.repeat([1, 2], lengths)[None]
            packed[f"{feature}_positions"] = np.concatenate([np.arange(n) for n in lengths])[None]
        logits = np.asarray(jax.jit(model.logits)(params, packed))[0]
        alone = their_logits(hf_model, two)
        assert_close(logits, np.concatenate([alone[0, :7], alone[1, :3]]), np.ones(10, bool))

    # What transformers saves, in several files, is read again.
    hf_model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    place = find(str(tmp_path / "again"))
    assert place.format == "hf"
    sharded = sharded_model(model.config.network, MeshShape(1, 2, 2))
    rounding = dict(atol=1e-7) if "gemma" in kind else {}  # its scales are stored as what they differ from 1
    equal_trees(load_params(place, sharded.abstract_params, sharded.model.axes), params, **rounding)
    read = huggingface.read_config(tmp_path / "again")[1]
    assert {n: s.shape for n, s in network_parts(read).items()} == {
        n: s.shape for n, s in network_parts(model.config.network).items()
    }

    # Greedy generation.
    prompt = np.random.default_rng(2).integers(2, 64, (2, 6))
    start = {} if model.config.network.has_encoder else {"pad_token_id": 0}
    ids = torch.tensor(prompt if model.config.network.has_encoder else np.pad(prompt, ((0, 0), (1, 0))))
    generated = hf_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, num_beams=1, **start
    )
    generated = generated[:, 1:] if model.config.network.has_encoder else generated[:, 7:]
    from t5x_lab.decoding.generation import complete
    from t5x_lab.decoding.sampling import SamplingConfig

    write = jax.jit(lambda p, ids: complete(model, p, ids, 0, max_tokens=10, config=SamplingConfig(), eos_id=1)[0])
    logits = np.asarray(write(params, prompt))
    for a, b in zip(logits.reshape(2, -1).tolist(), generated.tolist(), strict=True):
        a, b = ([t for t in row[: (row.index(1) if 1 in row else len(row))]] for row in (a, b))
        assert a == b


def test_a_t5gemma_2_that_transformers_made_is_read(tmp_path):
    """Its names of tensors are those without "text_model", and its ids those of its classes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = huggingface.find_family(network("t5gemma2"))[1]
    torch.manual_seed(0)
    model = transformers.T5Gemma2ForConditionalGeneration(transformers.AutoConfig.for_model(**settings)).eval()
    model.save_pretrained(tmp_path)
    read = Model(ModelConfig(dataclasses.replace(huggingface.read_config(tmp_path)[1], dtype="float32")))
    sharded = sharded_model(read.config.network)
    params = load_params(find(str(tmp_path)), sharded.abstract_params, sharded.model.axes)
    batch = batches(read)
    where = batch["decoder_target_tokens"] > 0
    assert_close(np.asarray(jax.jit(read.logits)(params, batch)), their_logits(model, batch), where)
    assert huggingface.special_tokens(tmp_path, 64) == {"start": 2, "end": 1, "padding": 0}


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_config_json_leaves_out_is_transformers_default(kind, tmp_path):
    """Each setting is left out once, and what transformers makes of the rest is read too."""
    transformers = pytest.importorskip("transformers")
    settings = huggingface.find_family(network(kind))[1]
    stacks = [(), *(path for path in (("decoder",), ("encoder",), ("encoder", "text_config")) if inner(settings, path))]
    compared = 0
    for path in stacks:
        for name in inner(settings, path):
            left_out = json.loads(json.dumps(settings))
            del inner(left_out, path)[name]
            try:
                filled = transformers.AutoConfig.for_model(**left_out).to_dict()
            except Exception:  # such a model does not exist
                continue
            read = []
            for config in (left_out, filled):
                (tmp_path / "config.json").write_text(json.dumps(config, default=str))
                try:
                    network_read = huggingface.read_config(tmp_path)[1]
                    read.append(dataclasses.replace(network_read, num_kv_heads=network_read.kv_heads, dtype="float32"))
                except UserError as error:
                    read.append(str(error))
            assert read[0] == read[1], (path, name)
            compared += not isinstance(read[0], str)
    assert compared > 5


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("rotary_type", ["linear", "dynamic", "yarn"])
def test_rotary_positions_in_older_config_json_are_read(kind, rotary_type, tmp_path):
    """Compares with transformers, with and without the newer settings beside the older ones."""
    transformers = pytest.importorskip("transformers")

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        return dataclasses.replace(huggingface.read_config(tmp_path)[1], dtype="float32")

    settings = huggingface.find_family(network(kind))[1]
    older = {"rope_theta": 5000.0, "rope_scaling": {"rope_type": rotary_type, "factor": 2.0}, "max_position_embeddings": 24}
    older |= {"rope_local_base_freq": 77.0} if kind == "gemma3" else {}
    alone = {name: value for name, value in settings.items() if name != "rope_parameters"} | older
    for config in (alone, settings | older):
        filled = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
        assert read(config) == read(filled)
    result = read(alone)
    assert result.rotary_theta == 5000.0 and (result.rotary_scaling or result.longest_sequence == 24)


def test_kinds_of_layers_are_those_that_transformers_reads(tmp_path):
    """Gemma 2 has no period of windows, and T5Gemma may have none at all."""
    read = lambda config: (tmp_path / "config.json").write_text(json.dumps(config)) and huggingface.read_config(tmp_path)[1]
    gemma = {"model_type": "gemma2", "num_hidden_layers": 4}
    assert read({**gemma, "sliding_window_pattern": 4}) == read({**gemma, "rope_local_base_freq": 5.0}) == read(gemma)
    for kind in ("t5gemma", "t5gemma2"):
        settings = huggingface.find_family(network(kind))[1]
        for path in [("decoder",), ("encoder", "text_config") if kind == "t5gemma2" else ("encoder",)]:
            stack = inner(settings, path)
            stack |= {"sliding_window": None, "layer_types": ["full_attention"] * stack["num_hidden_layers"]}
        assert read(settings).layer_pattern == ()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers of 2 layers, and num_hidden_layers 5"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0. It must be from 1 to 10,000"),
        ("mistral", {"num_hidden_layers": 10**9}, "num_hidden_layers 1,000,000,000. It must be from 1 to 10,000"),
        ("t5_1_1", {"num_layers": 10**9}, "num_layers 1,000,000,000. It must be from 1 to 10,000"),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 5},
            'layer_types of 5 layers, chunked_attention, .* reads "full_att',
        ),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types of 1 layers, full_attention, and num_hidden_layers 8"),
        ("gemma2", {"sliding_window": None}, 'type "sliding_attention" without a size'),
    ],
)
def test_layers_that_no_model_has_are_sentences(kind, changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**huggingface.find_family(network(kind))[1], **changes}))
    with pytest.raises(UserError, match=message):
        huggingface.read_config(tmp_path)


def inner(config, path):
    for name in path:
        config = config.get(name, {})
    return config


@pytest.mark.parametrize(
    "kinds, changes",
    [
        (("t5_1_1", "gpt1"), dict(layer_pattern=(LayerKind(window=3), LayerKind()))),
        (("t5_1_1",), dict(share_embeddings=False)), (("t5_1_1",), dict(merged_attention=True)),
        (("t5_1_1",), dict(share_embeddings=False, encoder=EncoderShape(emb_dim=24, num_heads=6))),
        (("t5gemma", "t5gemma2"), dict(rotary_cross_attention=True)),
    ],
)  # fmt: skip
def test_what_a_class_of_transformers_lacks_is_not_written_as_it(kinds, changes):
    for kind in kinds:
        with pytest.raises(UserError, match="transformers has no class for this network"):
            huggingface.find_family(dataclasses.replace(network(kind), **changes))


def test_safetensors_files_are_the_librarys(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(3, 5)).astype(np.float32), "b/c": np.arange(7), "d": np.float16(rng.normal(size=(2, 2, 2)))}
    arrays["e"] = np.zeros((0, 4), np.float32)
    safetensors_files.write(tmp_path, {name: from_array(array) for name, array in arrays.items()})
    read = library.load_file(tmp_path / "model.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
    library.save_file(arrays, tmp_path / "theirs.safetensors")
    for name, tensor in safetensors_files.open_file(tmp_path / "theirs.safetensors").items():
        np.testing.assert_array_equal(tensor.read_all(), arrays[name])


def test_writing_needs_memory_for_one_tensor(tmp_path):
    """Two of twenty tensors are in memory at once: the one being written, and the next one being read."""
    alive: list[int] = []

    class Counted(np.ndarray):
        def __del__(self):
            if self.base is None:
                alive.append(-1)

    def read(index):
        alive.append(1)
        assert sum(alive) <= 2
        return np.zeros((64, 64), np.float32).view(Counted).copy()

    tensors = {str(i): LazyTensor((64, 64), np.dtype(np.float32), read) for i in range(20)}
    files = safetensors_files.write(tmp_path, tensors, bytes_per_file=5 * 64 * 64 * 4)
    assert len(files) == 5 and len(safetensors_files.open_directory(tmp_path)) == 20


def header(path, **changes):
    """The file again, with another header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries.update(changes)
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_files_that_one_should_not_trust_are_sentences(tmp_path):
    def refused(match, change, source="hf"):
        directory = tmp_path / "case"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / source, directory)
        change(directory)
        with pytest.raises(UserError, match=match):
            sharded = sharded_model(network("t5_1_0"))
            load_params(find(str(directory)), sharded.abstract_params, sharded.model.axes)

    exported("t5_1_0", tmp_path / "hf")
    weights = "model.safetensors"
    write = lambda name, data: lambda d: (d / name).write_bytes(data)
    whole = (tmp_path / "hf" / weights).read_bytes()
    refused("is incomplete: ", write(weights, whole[: len(whole) // 2]))
    refused("its header has 1,152,921,504,606,846,976 bytes, but the file", write(weights, struct.pack("<Q", 1 << 60) + b"{}"))
    refused("is not a complete safetensors file", write(weights, b"short"))
    refused("damaged header", write(weights, struct.pack("<Q", 4) + b"nope"))
    terabytes = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}
    refused(
        "is incomplete: shared.weight, .* should be at bytes", lambda d: header(d / weights, **{"shared.weight": terabytes})
    )
    refused("damaged header", lambda d: header(d / weights, **{"shared.weight": {**terabytes, "shape": [-1]}}))
    refused("reads F64", lambda d: header(d / weights, **{"shared.weight": {**terabytes, "dtype": "F4"}}))
    (length,) = struct.unpack("<Q", whole[:8])
    entry = json.loads(whole[8 : 8 + length])["shared.weight"]
    start, end = entry["data_offsets"]
    by = -4 if start else 4
    overlapping = {**entry, "data_offsets": [start + by, end + by]}
    refused("two tensors overlap", lambda d: header(d / weights, **{"shared.weight": overlapping}))
    refused(
        "is incomplete: shared.weight, which its config.json requires, is missing",
        lambda d: (d / weights).unlink() or safetensors_files.write(d, {"x": from_array(np.zeros(3))}),
    )
    refused('type "bert"', write("config.json", b'{"model_type": "bert"}'))
    refused("is not a valid config.json", write("config.json", b"{"))
    refused("has shared.weight with shape", lambda d: rewrite(d / "config.json", vocab_size=99))
    refused("does not have decoder/layers_3", lambda d: None, "hf_small") if (tmp_path / "hf_small").exists() else None

    def pickled(directory):
        (directory / weights).unlink()
        (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")

    refused("is a pickle file, which t5x_lab does not read because it can execute code", pickled)
    assert not pathlib.Path("executed").exists()
    index = lambda file: json.dumps({"weight_map": {"shared.weight": file}}).encode()
    for outside in ("../hf/model.safetensors", "/etc/passwd", ".."):
        refused("not a file of its directory", write(safetensors_files.INDEX, index(outside)))
    refused("lists none.safetensors, which does not exist", write(safetensors_files.INDEX, index("none.safetensors")))
    refused("is damaged", write(safetensors_files.INDEX, b"[]"))


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_t5x_files_that_one_should_not_trust_are_sentences(tmp_path):
    import msgpack
    from etils import epath

    original = shared_data("t5x_checkpoints", "decoder_causal") / "native" / "checkpoint_5"
    index = (original / "checkpoint").read_bytes()

    def refused(match, data, remove=None, make=None):
        directory = tmp_path / "checkpoint_5"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(original, directory)
        if make:
            (directory / make).mkdir()
        (directory / "checkpoint").write_bytes(data)
        if remove:
            (shutil.rmtree if (directory / remove).is_dir() else os.remove)(directory / remove)
        with pytest.raises(UserError, match=match):
            {name: tensor.read_all() for name, tensor in t5x.open(epath.Path(directory)).params.items()}

    tree = msgpack.unpackb(index, raw=False, strict_map_key=False)
    refused("is not a T5X checkpoint, or damaged", index[: len(index) // 2])
    refused("is not a T5X checkpoint, or damaged", b"cos\nsystem\n(S'touch executed'\ntR.")
    refused("version 9", msgpack.packb({**tree, "version": 9}))
    refused("has no parameters", msgpack.packb({"version": 3, "optimizer": {}}))
    refused("is incomplete: target/decoder/token_embedder", index, "target.decoder.token_embedder.embedding") if (
        original / "target.decoder.token_embedder.embedding"
    ).exists() else None
    chunk = min((original / "target.decoder.token_embedder.embedding").glob("[0-9]*")).name
    refused("cannot be read", index, f"target.decoder.token_embedder.embedding/{chunk}")
    bomb = json.loads((original / "target.decoder.token_embedder.embedding" / ".zarray").read_text())
    for wrong in ({"chunks": [99_999_999_999, 1]}, {"chunks": [64, 99_999_999]}):
        in_index = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": "x"},
            "metadata": {**bomb, **wrong},
            "dtype": "float32",
        }
        evil = {"version": 3, "optimizer": {"target": {"x": in_index}}}
        refused("x has chunks of shape", msgpack.packb(evil), make="x")
    place = lambda path: {"driver": "zarr", "kvstore": {"driver": "file", "path": path}, "metadata": {"shape": [3]}}
    for path in ("../../../etc", "/etc/", "..", ""):
        evil = {"version": 3, "optimizer": {"target": {"x": place(path)}}}
        refused("is incomplete: .*, which does not exist", msgpack.packb(evil))


def test_a_network_that_transformers_has_no_class_for_is_a_sentence(tmp_path):
    for changes in (dict(use_bias=True), dict(num_kv_heads=2), dict(positions="learned"), dict(qk_norm=True)):
        with pytest.raises(UserError, match="transformers has no class for this network"):
            huggingface.find_family(tiny_config("encoder_decoder", **changes))


def test_from_gin_takes_a_checkpoint_of_any_format(tmp_path):
    folder = shared_data("t5x_checkpoints", "t5_1_1")
    network = our_model(folder, scanned=False).config.network
    bindings = [f"TransformerConfig.{name} = {value!r}" for name, value in vars(network).items()]
    run = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], bindings, checkpoint=str(folder / "native"))
    expected = np.load(folder / "expected.npz")
    table = np.asarray(traverse_util.flatten_dict(run.params, sep="/")["token_embedder/embedding"])
    np.testing.assert_array_equal(table, expected["params_after_5/token_embedder/embedding"])


def test_commands_read_a_checkpoint_of_t5x_with_a_model_file(capsys):
    source = shared_data("t5x_checkpoints", "from_t5x_repository") / "test_t5_tiny.checkpoint_0"
    pieces = shared_data("t5_vocabulary") / "sentencepiece.model"
    generate = ["generate", f"--model_dir={source}", "--prompt=Some text.", "--max_tokens=5"]
    assert cli_main(generate) == 2 and "holds no configuration. Pass the model file" in capsys.readouterr().err
    gin = ["models/t5_1_1/tiny.gin"], [f"SentencePieceVocabulary.path = {str(pieces)!r}"]
    assert cli_main([*generate, f"--gin_file={gin[0][0]}", f"--gin_bindings={gin[1][0]}"]) == 0
    expected = t5x_lab.from_gin(*gin, checkpoint=str(source)).generate(["Some text."], max_tokens=5)[0][0]
    assert capsys.readouterr().out.strip() == f"Some text.\t{expected}".strip()


def test_gin_flags_are_refused_with_a_checkpoint_that_describes_its_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for command in (["generate", "--prompt=a"], ["infer", "--input=a", "--output=b"]):
        assert cli_main([*command, f"--model_dir={tmp_path}", "--gin.DROPOUT_RATE=0.0"]) == 2
        assert "has the configuration of its model. Leave the gin flags out" in capsys.readouterr().err


def test_convert_there_and_back(tmp_path, capsys):
    """T5X's small test model to a run, to Hugging Face with its tokenizer, and to a run again: the same numbers and text."""
    transformers = pytest.importorskip("transformers")
    source = shared_data("t5x_checkpoints", "from_t5x_repository") / "test_t5_tiny.checkpoint_0"
    pieces = shared_data("t5_vocabulary") / "sentencepiece.model"
    main = lambda *argv: cli_main(["convert", *argv])
    from_t5x = ["--from=t5x", f"--source={source}", "--to=t5x_lab"]
    assert main(*from_t5x, "--target=ours") == 2 and "holds no configuration" in capsys.readouterr().err
    gin = ["--gin_file=models/t5_1_1/tiny.gin", f"--gin.SentencePieceVocabulary.path={pieces}"]
    assert main(*from_t5x, "--target=ours", *gin, "--gin.TransformerConfig.mlp_dim=20") == 2
    assert "with shape" in capsys.readouterr().err and not pathlib.Path("ours").exists()
    assert main(*from_t5x, "--target=ours", *gin) == 0
    assert main("--source=ours", "--to=hf", "--target=theirs", "--from=hf") == 2
    assert main("--source=ours", "--to=hf", "--target=theirs") == 0
    assert (
        main("--source=ours", "--to=hf", "--target=theirs") == 2 and "exists. Choose a new directory" in capsys.readouterr().err
    )
    assert main("--source=theirs", "--to=t5x_lab", "--target=again") == 0

    original, again = t5x_lab.load("ours"), t5x_lab.load("again")
    equal_trees(original.params, again.params)
    assert original.vocabulary.encode("Some text.") == again.vocabulary.encode("Some text.")
    tokenizer = transformers.AutoTokenizer.from_pretrained("theirs")
    for text in ("Hello world, how are you?", "Straße  two  spaces", "a <extra_id_0> b"):
        assert tokenizer(text).input_ids == [*original.vocabulary.encode(text), 1]
    (checkpoint,) = pathlib.Path("again/checkpoints").iterdir()
    capsys.readouterr()
    assert cli_main(["inspect", "again", "--verify"]) == 0 and "all checksums are correct" in capsys.readouterr().out
    assert cli_main(["inspect", "theirs", "--json"]) == 0
    assert sum(math.prod(row["shape"]) for row in json.loads(capsys.readouterr().out)["tensors"]) == original.num_parameters
    data = max(checkpoint.glob("params/d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert cli_main(["inspect", "again", "--verify"]) == 2 and "damaged" in capsys.readouterr().err
    assert main("--source=again", "--to=hf", "--target=damaged") == 2 and not pathlib.Path("damaged").exists()


@pytest.mark.parametrize(
    "error, says",
    [(UserError("A mistake of the user."), "^A mistake of"), (OSError(5, "Disk"), "other cannot be written: Disk")],
)
def test_an_error_of_a_conversion_to_object_storage_is_not_taken_for_one_of_storage(error, says, monkeypatch):
    """A folder in the place of a bucket, from which an incomplete copy is removed."""

    def fail(*unused):
        pathlib.Path("other").mkdir()
        raise error

    t5x_lab.from_gin(["models/rotary_decoder/tiny.gin"]).save("ours")
    monkeypatch.setattr("t5x_lab.runs.convert.convert.is_object_storage", lambda path: True)
    monkeypatch.setattr("t5x_lab.runs.convert.convert._move", fail)
    with pytest.raises(UserError, match=says):
        convert(find("ours"), "other", "t5x_lab")
    assert not pathlib.Path("other").exists()


def test_the_decoder_of_a_run_is_llamas(tmp_path):
    """bfloat16 on disk; the tokenizer is left out where there is none, and said so."""
    run = t5x_lab.from_gin(["models/rotary_decoder/tiny.gin"], ["TransformerConfig.dtype = 'float32'"])
    run.save("ours")
    assert "No tokenizer" in convert(find("ours"), "theirs", "hf", dtype="bfloat16")
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained("theirs", attn_implementation="eager").float().eval()
    tokens = np.random.default_rng(0).integers(2, 1000, (2, 9))
    batch = {"decoder_input_tokens": tokens, "decoder_target_tokens": tokens}
    logits = run.logits(**batch)
    np.testing.assert_allclose(their_logits(hf_model, batch), logits, atol=0.02 * np.abs(logits).max())
    # Numbers of 16 bits become parameters of 32, with checksums of what was written.
    convert(find("theirs"), "back", "t5x_lab")
    np.testing.assert_allclose(t5x_lab.load("back").logits(**batch), logits, atol=0.02 * np.abs(logits).max())
    with pytest.raises(UserError, match="ours already has a checkpoint of step 0. Choose another directory"):
        run.save("ours")
    for target, match in (
        ("theirs/inside", "is inside the source directory"),
        ("/proc/x/y", "cannot be written"),
    ):
        with pytest.raises(UserError, match=match):
            convert(find("theirs"), target, "t5x_lab")
    for source in ("theirs", "ours/checkpoints/0"):
        with pytest.raises(UserError, match="Remove --step"):
            find(source, step=77)


def test_the_mean_of_the_last_checkpoints_is_converted(tmp_path, capsys):
    config = GinConfig(["models/rotary_decoder/tiny.gin"])
    parts = network_parts(config.model().network)
    rng = np.random.default_rng(0)
    values = [{name: rng.normal(size=part.shape).astype(np.float32) for name, part in parts.items()} for _ in range(3)]
    for step, of_step in zip((10, 20, 30), values):
        place = epath.Path(tmp_path) / "run" / "checkpoints" / str(step)
        native.write(place, {name: from_array(value) for name, value in of_step.items()}, parts, step, config=config.text)
    command = ["convert", f"--source={tmp_path}/run", "--to=t5x_lab"]
    assert cli_main([*command, f"--target={tmp_path}/mean", "--average=2"]) == 0
    assert "the mean of the steps 20, 30 of" in capsys.readouterr().out
    assert cli_main([*command[:2], "--to=hf", f"--target={tmp_path}/card", "--average=2"]) == 0
    assert "Training step: mean of 20, 30" in (tmp_path / "card" / "README.md").read_text()
    written = open_source(find(str(tmp_path / "mean"))).params
    for name in parts:
        np.testing.assert_allclose(written[name].read_all(), (values[1][name] + values[2][name]) / 2, rtol=1e-6, atol=1e-7)
    assert cli_main([*command, f"--target={tmp_path}/more", "--average=4"]) == 2
    assert "--average is 4, but " in capsys.readouterr().err
    assert cli_main([*command, f"--target={tmp_path}/more", "--average=2", "--step=10"]) == 2
