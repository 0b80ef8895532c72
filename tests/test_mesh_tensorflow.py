"""Checkpoints of Mesh TensorFlow, T5's original format: read to the bit, and continued as Mesh TensorFlow itself does."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import shared_data
from helpers import exhaustive
from test_foreign_formats import equal_trees, sharded_model

import t5x_lab
from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import find, open_as_saved, open_source
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.runs.train.assemble import assemble

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("flavour", ["1.0", exhaustive("1.1")])
def test_a_checkpoint_of_mesh_tensorflow_gives_its_logits_and_its_next_step(flavour, tmp_path):
    """A small model that Mesh TensorFlow made, trained and saved: parameters, logits, Adafactor's slots and one more step."""
    if importlib.util.find_spec("mesh_tensorflow") is None:
        pytest.skip("needs mesh-tensorflow, of t5x_lab[compare]")
    program = pathlib.Path(__file__).with_name("mesh_tensorflow_model.py")
    done = subprocess.run([sys.executable, program, tmp_path, flavour], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    network = TransformerConfig(
        architecture="encoder_decoder", vocab_size=384, emb_dim=128, num_heads=4, head_dim=32, mlp_dim=256,
        num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.0, dtype="float32",
        mlp_activations=("relu",) if flavour == "1.0" else ("gelu", "linear"), logits_via_embedding=flavour == "1.0",
    )  # fmt: skip
    sharded = sharded_model(network)
    model, template, axes = sharded.model, sharded.abstract_params, sharded.model.axes
    place = find(str(tmp_path), 3)
    assert (place.step, place.title, find(str(tmp_path)).step) == (3, "Mesh TensorFlow", 4)
    params = load_params(place, template, axes)

    values = np.load(tmp_path / "values.npz")
    targets = values["targets"]
    batch = {
        "encoder_input_tokens": values["inputs"],
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.float32),
    }
    logits, expected = np.asarray(model.logits(params, batch)), values["logits"]
    np.testing.assert_allclose(logits[targets > 0], expected[targets > 0], rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    optimizer = Adafactor(LearningRate("constant", 0.01))
    training = assemble(sharded, optimizer, batch_size=2, microbatches=1, seed=0)
    carry = RestoreCheckpointConfig(carry=("optimizer", "step"))
    state = carry_over(place, training.init_state(params), template, axes, carry)
    assert int(state.step) == 3 and int(state.opt_state.step) == 3
    gradients = jax.jit(jax.grad(lambda p: model.loss(p, batch).objective / targets.size))(params)
    updates, _ = jax.jit(optimizer.make(axes).update)(gradients, state.opt_state, params)
    after = jax.tree.map(lambda p, update: p + update, params, updates)
    saved = load_params(find(str(tmp_path / "model.ckpt-4.index")), template, axes)
    change = lambda new: jax.tree.map(lambda a, b: np.asarray(a - b), new, params)
    equal_trees(change(after), change(saved), rtol=1e-2, atol=2e-5)


def save(directory, tensors, step=1000):
    """Writes tensors by Mesh TensorFlow's names with TensorFlow's own writer."""
    import tensorflow as tf

    names = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=f"{directory}/model.ckpt-{step}",
        tensor_names=[*names, "global_step"],
        shape_and_slices=[""] * (len(names) + 1),
        tensors=[*(tf.constant(tensors[name]) for name in names), tf.constant(step, tf.int64)],
    )
    (pathlib.Path(directory) / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


def mesh_tensorflow_names(params):
    """T5X's parameters of an unscanned encoder-decoder by the names of T5's releases."""
    tensors = {}
    for name, value in params.items():
        stack, *rest = name.split("/")
        attentions = {"attention": "SelfAttention", "self_attention": "SelfAttention"}
        attentions["encoder_decoder_attention"] = "EncDecAttention"
        kinds = (
            ["SelfAttention", "DenseReluDense"]
            if stack == "encoder"
            else ["SelfAttention", "EncDecAttention", "DenseReluDense"]
        )
        norms = {"pre_attention_layer_norm": 0, "pre_self_attention_layer_norm": 0, "pre_cross_attention_layer_norm": 1}
        match rest:
            case ["embedding"]:
                new = "shared/embedding"
            case ["relpos_bias", _]:
                new = f"{stack}/block_000/layer_000/SelfAttention/relative_attention_bias"
            case ["logits_dense", _]:
                new = "decoder/logits/kernel"
            case [_, "scale"]:
                new = f"{stack}/final_layer_norm/scale"
            case [layer, norm, "scale"]:
                new = f"{stack}/block_{int(layer[7:]):03}/layer_{norms.get(norm, len(kinds) - 1):03}/layer_norm/scale"
            case [layer, "mlp", matrix, "kernel"]:
                new = f"{stack}/block_{int(layer[7:]):03}/layer_{len(kinds) - 1:03}/DenseReluDense/{matrix}/kernel"
            case [layer, attention, matrix, "kernel"]:
                kind = attentions[attention]
                letter = matrix[0]
                new = f"{stack}/block_{int(layer[7:]):03}/layer_{kinds.index(kind):03}/{kind}/{letter}"
        tensors[new] = value
    assert len(tensors) == len(params)
    return tensors


def test_weights_of_a_t5x_checkpoint_under_mesh_tensorflows_names_are_the_same_model(tmp_path, capsys):
    source = shared_data("t5x_checkpoints", "from_t5x_repository") / "test_t5_tiny.checkpoint_0"
    saved = {name.removeprefix("target/"): tensor.read_all() for name, tensor in open_as_saved(find(str(source))).items()}
    tensors = mesh_tensorflow_names(
        {n: x for n, x in saved.items() if n.startswith(("encoder/", "decoder/", "token_embedder/"))}
    )
    save(tmp_path, tensors)
    params, copy = open_source(find(str(source))).params, open_source(find(str(tmp_path))).params
    assert copy.keys() == params.keys()
    for name, tensor in params.items():
        np.testing.assert_array_equal(copy[name].read_all(), tensor.read_all())
    table = copy["token_embedder/embedding"]
    np.testing.assert_array_equal(table.read((slice(3, 5), slice(1, 4))), table.read_all()[3:5, 1:4])

    pieces = shared_data("t5_vocabulary") / "sentencepiece.model"
    gin = ["--gin_file=models/t5_1_1/tiny.gin", f"--gin.SentencePieceVocabulary.path={pieces}"]
    prefix = f"--source={tmp_path}/model.ckpt-1000"
    assert main(["convert", prefix, "--from=mesh_tensorflow", "--to=t5x_lab", "--target=ours", *gin]) == 0
    assert main(["convert", f"--source={source}", "--to=t5x_lab", "--target=theirs", *gin]) == 0
    assert "(Mesh TensorFlow) to ours" in capsys.readouterr().out
    equal_trees(t5x_lab.load("ours").params, t5x_lab.load("theirs").params)


def test_a_decoder_of_mesh_tensorflow_is_read_and_its_layers_may_have_biases_of_their_own(tmp_path):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    block = {
        "layer_000/SelfAttention/q": (8, 6), "layer_000/SelfAttention/k": (8, 6), "layer_000/SelfAttention/v": (8, 6),
        "layer_000/SelfAttention/o": (6, 8), "layer_000/SelfAttention/relative_attention_bias": (2, 4),
        "layer_000/rms_norm/scale": (8,), "layer_001/rms_norm/scale": (8,), "layer_001/DenseReluDense/wi/kernel": (8, 12),
        "layer_001/DenseReluDense/wo/kernel": (12, 8),
    }  # fmt: skip
    tensors = {f"transformer/block_{i:03}/{name}": draw(*shape) for i in range(2) for name, shape in block.items()}
    tensors |= {
        "transformer/embedding": draw(16, 8),
        "transformer/logits/kernel": draw(8, 16),
        "transformer/rms_norm/scale": draw(8),
    }
    save(tmp_path, tensors)
    network = TransformerConfig(
        architecture="causal_decoder", vocab_size=16, emb_dim=8, num_heads=2, head_dim=3, mlp_dim=12, num_decoder_layers=2,
        relpos_buckets=4, relative_bias="per_layer", mlp_activations=("relu",), logits_via_embedding=False,
    )  # fmt: skip
    sharded = sharded_model(network)
    params = load_params(find(str(tmp_path)), sharded.abstract_params, sharded.model.axes)
    layers = params["decoder"]["layers"]
    bias = "transformer/block_001/layer_000/SelfAttention/relative_attention_bias"
    np.testing.assert_array_equal(layers["relpos_bias"]["rel_embedding"][1], tensors[bias])
    np.testing.assert_array_equal(
        layers["mlp"]["wi"]["kernel"][0], tensors["transformer/block_000/layer_001/DenseReluDense/wi/kernel"]
    )


@pytest.mark.parametrize("damage", ["cut", "missing", "index", "others", "step"])
def test_a_damaged_checkpoint_of_tensorflow_is_refused_with_a_sentence(damage, tmp_path):
    save(tmp_path, {"encoder/block_000/layer_000/SelfAttention/q": np.ones((4, 4), np.float32)}, step=7)
    data, index = tmp_path / "model.ckpt-7.data-00000-of-00001", tmp_path / "model.ckpt-7.index"
    match damage:
        case "cut":
            data.write_bytes(data.read_bytes()[:-9])
        case "missing":
            data.unlink()
        case "index":
            index.write_bytes(index.read_bytes()[:-20] + bytes(20))
        case "others":
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            save(tmp_path, {"dense/kernel": np.ones((4, 4), np.float32)}, step=7)
    reason = {
        "cut": "should be at bytes", "missing": "which does not exist", "index": "or damaged", "others": "it has no block_000",
        "step": "has no checkpoint of step 8. It has 7",
    }[damage]  # fmt: skip
    with pytest.raises(UserError, match=reason):
        open_source(find(str(tmp_path), 8 if damage == "step" else None))


def test_every_byte_of_an_index_that_changes_is_refused_or_leaves_tensors_of_the_same_kind(tmp_path):
    """Foreign files are data: no change of them ends in another error than a sentence."""
    save(tmp_path, {f"encoder/block_{i:03}/layer_000/SelfAttention/q": np.ones((4, 4), np.float32) for i in range(3)})
    index = tmp_path / "model.ckpt-1000.index"
    original = index.read_bytes()
    rng = np.random.default_rng(0)
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= int(rng.integers(1, 256))
        index.write_bytes(bytes(changed))
        try:
            for tensor in open_source(find(str(tmp_path))).params.values():
                assert tensor.read_all().shape == tensor.shape
        except UserError:
            pass
