"""Networks of a user's: the documentation's, T5X's way of writing Linen, and what is said of wrong ones."""

import importlib
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.linen import partitioning
from helpers import documented, random_batch, tiny_config

from t5x_lab.checkpoints.layers import stack_layers, unstack_layers, unstacked_parts
from t5x_lab.checkpoints.lazy_tensors import from_array
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.flops import traced_flops
from t5x_lab.optim.optimizers import AdamW
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.model.inference import Inference
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.training.step import make_eval_step


@pytest.fixture(autouse=True)
def _imports_from_here(monkeypatch):
    monkeypatch.syspath_prepend(".")
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def written(module: str, *texts: str) -> dict:
    """The names of a module that consists of these texts."""
    pathlib.Path(f"{module}.py").write_text("\n\n".join(texts))
    return vars(importlib.import_module(module))


def convolutions(old: str = "", new: str = "") -> Callable:
    """The documentation's network, which generates too; with a text of that part replaced."""
    text = documented("custom/network.md", "class Convolutions").replace("@gin.configurable\n", "")
    more = documented("custom/network.md", "def prefill")
    assert old in more
    network_class = written("my_network", text, more.replace(old, new))["GeneratingConvolutions"]
    return lambda *, rngs: network_class(vocab_size=64, emb_dim=16, width=3, rngs=rngs)


@pytest.mark.slow
@pytest.mark.parametrize("page_has, name", [("class Convolutions", "Convolutions"), ("class LinenGru", "LinenGru")])
def test_the_documentations_networks_are_bound_by_gin(page_has, name):
    written("my_network", documented("custom/network.md", page_has))
    text = documented("custom/network.md", "import my_network").replace("Convolutions", name)
    pathlib.Path("my.gin").write_text(text)
    config = GinConfig(["my.gin"])
    for again in (config, GinConfig([], [config.text])):
        model = Model(again.model())
        assert model.config.network.architecture == "causal_decoder" and not model.can_generate
    params = model.init(jax.random.key(0))
    batch = random_batch("causal_decoder")
    logits = model.logits(params, batch)
    assert logits.shape == (4, 12, 384)
    np.testing.assert_array_equal(model.logits(params, batch), logits)  # at rest there is no dropout
    first, second = (model.logits(params, batch, jax.random.key(seed)) for seed in (1, 2))
    assert not np.array_equal(first, logits) and not np.array_equal(first, second)

    log_probs = jax.nn.log_softmax(logits)
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    expected = -np.take_along_axis(log_probs, targets[..., None], -1)[..., 0] * weights
    sums, _ = make_eval_step(model)(params, batch)
    np.testing.assert_allclose(sums.loss, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(model.score(params, batch).log_prob, -expected.sum(1), rtol=1e-5)


def test_a_network_written_as_t5xs_are_says_its_axes():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            init = linen.initializers.normal(0.1)
            table = partitioning.param_with_axes("table", init, (64, 16), axes=("vocab", "embed"))
            x = partitioning.with_sharding_constraint(table[tokens], ("batch", "length", "embed"))
            kernel_init = linen.with_logical_partitioning(init, ("embed", "vocab"))
            return linen.Dense(64, use_bias=False, kernel_init=kernel_init)(x)

    class Bridged(nnx.Module):
        architecture, vocab_size = "causal_decoder", 64

        def __init__(self, *, rngs):
            self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(jnp.zeros((1, 1), int))

        def __call__(self, batch):
            return self.net(batch["decoder_input_tokens"])

        def logits(self, x):
            return x

    sharded = ShardedModel(ModelConfig(Bridged), MeshShape(1, 2, 2), jax.devices()[:4])
    axes = {"net": {"table": ("vocab", "embed"), "Dense_0": {"kernel": ("embed", "vocab")}}}
    assert sharded.model.axes == axes
    params = sharded.init_params(0)
    assert params["net"]["table"].sharding.shard_shape((64, 16)) == (32, 8)
    batch = random_batch("causal_decoder")
    table, kernel = (np.asarray(x) for x in (params["net"]["table"], params["net"]["Dense_0"]["kernel"]))
    expected = table[batch["decoder_input_tokens"]] @ kernel
    np.testing.assert_allclose(jax.jit(sharded.model.logits)(params, batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_network_of_ones_own_generates_as_if_each_token_were_chosen_by_hand():
    """Greedy, by beams, and shared scores, of the documentation's convolutions with `prefill` and `decode`."""
    sharded = ShardedModel(ModelConfig(convolutions()), MeshShape(1, 1, 1), jax.devices()[:1])
    model, inference = sharded.model, Inference(sharded)
    assert model.can_generate
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(1)))
    logits = jax.jit(model.logits)
    prompts, steps = [[5, 6, 7], [8], [9, 10, 11, 12]], 5

    def greedy(prompt):
        tokens = [0, *prompt]
        for _ in range(steps):
            batch = {"decoder_input_tokens": np.pad(tokens, (0, 12 - len(tokens)))[None].astype(np.int32)}
            tokens.append(int(np.argmax(logits(params, batch)[0, len(tokens) - 1])))
        return tokens[1 + len(prompt) :]

    expected = {i: greedy(prompt) for i, prompt in enumerate(prompts)}
    prompts = [[0, *prompt] for prompt in prompts]
    generated = inference.generate(params, prompts, limits=[steps] * 3, eos_id=63, batch_size=2)
    assert {i: tokens.tolist() for i, tokens, _ in generated} == expected
    tokens, scores = inference.search(params, prompts, max_tokens=steps, beams=BeamConfig(2, 0.0), eos_id=63)
    log_prob, _ = inference.score(params, prompts, [row[row > 0].tolist() for row in tokens[:, 0]])
    np.testing.assert_allclose(scores[:, 0], log_prob, rtol=1e-4)
    shared, _ = inference.score(params, prompts[:1] * 4, [[3, 4], [5], [6, 7, 8], [9]])
    alone = [inference.score(params, prompts[:1], [target])[0][0] for target in ([3, 4], [5], [6, 7, 8], [9])]
    np.testing.assert_allclose(shared, alone, rtol=1e-4)


@pytest.mark.parametrize("name", ["encoder_decoder", "causal_decoder", "gpt1", "encoder", "shared_stacks"])
def test_flops_by_hand_are_those_of_the_traced_forward_pass(name):
    """Three times its matrix products, over lengths for which attention is not computed in blocks."""
    config = tiny_config(name)
    model = Model(ModelConfig(config))
    batch = {name: x for name, x in random_batch(name, rows=1).items() if not name.endswith("weights")}
    if name == "encoder":
        batch = {"encoder_input_tokens": batch["decoder_target_tokens"]}
    lengths = [batch[name].shape[1] if name in batch else 0 for name in ("encoder_input_tokens", "decoder_input_tokens")]
    assert 3 * traced_flops(model.logits, model.abstract_params, batch) == config.flops(*lengths)


def test_traced_flops_count_scans_branches_and_convolutions():
    x, matrix = jnp.ones((2, 8)), jnp.ones((8, 8))
    product = 2 * 2 * 8 * 8
    loop = lambda x: jax.lax.scan(lambda x, _: (x @ matrix, None), x, length=5)[0]
    assert traced_flops(jax.jit(loop), x) == 5 * product
    branch = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ matrix @ matrix, lambda x: x, x)
    assert traced_flops(branch, x) == 2 * product
    image, filters = jnp.ones((3, 10, 4)), jnp.ones((7, 4, 6))  # batch, width, channels; window, in, out
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    assert traced_flops(convolve, image, filters) == 2 * (3 * 10 * 6) * (7 * 4)


def test_layers_side_by_side_with_dropout_have_a_key_each():
    """NNX's own way to scan layers; and a list of layers goes through another format and back under its own names."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(nnx.relu(self.linear(x)))

    class Stacked(nnx.Module):
        architecture, vocab_size = "causal_decoder", 64

        def __init__(self, *, rngs):
            self.embed = nnx.Embed(64, 8, rngs=rngs)
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)

        def __call__(self, batch):
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(self.embed(batch["decoder_input_tokens"]), self.blocks)

        def logits(self, x):
            return self.embed.attend(x)

    model = Model(ModelConfig(Stacked))
    params, batch = model.init(jax.random.key(0)), random_batch("causal_decoder")
    assert params["blocks"]["linear"]["kernel"].shape == (3, 8, 8)
    assert np.std(params["blocks"]["linear"]["kernel"][0] - params["blocks"]["linear"]["kernel"][1]) > 0
    logits = [model.logits(params, batch, jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("names", [("layers/0/kernel", "layers/1/kernel"), ("layers_0/kernel", "layers_1/kernel")])
def test_layers_that_are_not_stacked_keep_their_names_in_conversions(names):
    arrays = {f"decoder/{name}": np.random.default_rng(0).normal(size=(4, 5)) for name in names}
    tensors = {name: from_array(array) for name, array in arrays.items()}
    parts = unstacked_parts(tensors)
    again = stack_layers(unstack_layers(tensors), parts)
    assert {name: tensor.shape for name, tensor in again.items()} == {name: (4, 5) for name in tensors}
    stacked = {"decoder/layers/kernel": from_array(np.ones((2, 4, 5))), "decoder/scale": from_array(np.ones(()))}
    again = stack_layers(unstack_layers(stacked), unstacked_parts(stacked))
    assert {name: tensor.shape for name, tensor in again.items()} == {name: x.shape for name, x in stacked.items()}


def test_two_configurations_of_one_network_stay_apart():
    """Though gin hands out the same class for both, and another configuration is read before the first is used."""
    text = documented("custom/network.md", "class Convolutions")
    written("my_sizes", text.replace("@gin.configurable", "@gin.configurable('Sized')"))
    bindings = ["import my_sizes", "MODEL = @ModelConfig()", "ModelConfig.network = @Sized", "Sized.vocab_size = 64"]
    small, large = (GinConfig([], [*bindings, f"Sized.emb_dim = {size}"]).model() for size in (8, 32))
    assert Model(small).abstract_params["embed"]["embedding"].shape == (64, 8)
    assert Model(large).abstract_params["embed"]["embedding"].shape == (64, 32)
    assert 0 < small.network.flops(0, 8) < large.network.flops(0, 8)


GOOD = """\
from flax import nnx
import jax, jax.numpy as jnp

class Net(nnx.Module):
    architecture, vocab_size = "causal_decoder", 64

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 8, rngs=rngs)

    def __call__(self, batch):
        return self.embed(batch["decoder_input_tokens"])

    def logits(self, x):
        return self.embed.attend(x)
"""


def test_a_network_that_is_bound_with_parentheses_is_a_sentence():
    written("my_brackets", documented("custom/network.md", "class Convolutions"))
    text = documented("custom/network.md", "import my_network").replace("my_network", "my_brackets")
    text = text.replace("@Convolutions", "@my_brackets.Convolutions()").replace("Convolutions.v", "my_brackets.Convolutions.v")
    with pytest.raises(UserError) as error:
        GinConfig([], [text]).model()
    assert "Bind networks, losses, schedules and activations without parentheses: @Name" in error.value.sentence


# What is wrong: the text of GOOD that is replaced, by what, and what is said.
WRONG = {
    "no architecture": (
        "architecture, vocab_size =",
        "kind, vocab_size =",
        "Net has no attribute architecture. Define it in the class or the module",
    ),
    "no vocab_size": ("vocab_size = ", "size = ", "Net has no attribute vocab_size. Define it in the class or the module"),
    "an unknown architecture": ('"causal_decoder"', '"causal_decodr"', 'Did you mean "causal_decoder"?'),
    "a vocabulary that is no number": ('"causal_decoder", 64', '"causal_decoder", "64"', "Net.vocab_size is '64'"),
    "no logits": ("def logits", "def output", "Net has no logits. A network module needs __call__"),
    "no call": ("def __call__", "def apply", "Net has no __call__."),
    "a feature that is not there": (
        "decoder_input_tokens",
        "inputs",
        "The network Net fails on a batch of decoder_input_tokens, decoder_target_tokens, decoder_segment_ids, decoder_positions: my_wrong.py, line 11, raises KeyError",
    ),
    "a mean over the length": (
        '"])',
        '"]).mean(1)',
        "Net returns hidden states of shape [2, 8] for 2 rows. The shape [2, 3, ...] is expected.",
    ),
    "logits of another size": (
        "self.embed.attend(x)",
        "x",
        "Net.logits returns logits of shape [2, 3, 8] for 2 rows. The shape [2, 3, 64] is expected.",
    ),
    "no floats": ("self.embed(batch", "abs(batch", "A float array [2, 3, ...] is expected"),
    "running averages": (
        "rngs=rngs)\n",
        "rngs=rngs)\n        self.norm = nnx.BatchNorm(8, rngs=rngs)\n",
        "Net has the state norm/mean of type BatchStat. A network may have parameters",
    ),
    "whole numbers as parameters": (
        "rngs=rngs)\n",
        "rngs=rngs)\n        self.shift = nnx.Param(jnp.ones(3, int))\n",
        "The parameter shift of Net has dtype int32. Parameters must be float32.",
    ),
    "too few axes": (
        "rngs=rngs)\n",
        "rngs=rngs)\n        self.shift = nnx.Param(jnp.ones((3, 3)), axes=('embed',))\n",
        "The parameter shift of Net has the axes ('embed',) but the shape (3, 3). Give one name per dimension.",
    ),
    "an array that is no parameter": (
        "rngs=rngs)\n",
        "rngs=rngs)\n        self.table = jnp.ones((3, 3))\n",
        "A network has an array as an attribute. Use nnx.Param",
    ),
    "a half as many bits": (
        "rngs=rngs)\n",
        "rngs=rngs)\n        self.shift = nnx.Param(jnp.ones(3, jnp.bfloat16))\n",
        "The parameter shift of Net has dtype bfloat16. Parameters must be float32.",
    ),
    "an output matrix the other way round": (
        "def logits",
        "def output_matrix(self):\n        return self.embed.embedding[...], 1.0\n\n    def logits",
        "Net.output_matrix returns shapes [(64, 8), ()]. It must return a matrix of shape (8, 64) and a scalar scale",
    ),
    "an error of its own": (
        "self.embed = ",
        "raise ValueError('no room')\n        x = ",
        "The network Net cannot be made: my_wrong.py, line 8, raises ValueError: no room.",
    ),
    "no module": ("class Net(nnx.Module)", "class Net", "It must return a flax.nnx.Module"),
    "no rngs": ("*, rngs", "rng", "Net has no argument rngs, which initializes its parameters"),
    "half a decoder": (
        "def logits",
        "def prefill(self, prompt, max_tokens):\n        return 1\n\n    def logits",
        "Add the other",
    ),
    "FLOPs that are no number": (
        "def logits",
        "def flops(self, a, b):\n        return None\n\n    def logits",
        "Net.flops returns None. It must return the FLOPs of one sequence",
    ),
}


def run_of(net):
    data = DataConfig("sotu", {"targets": 8}, 4, ByteVocabulary())
    return RunConfig(ModelConfig(net), AdamW(), data, "run", train_steps=1)


@pytest.mark.parametrize("old, new, says", WRONG.values(), ids=WRONG)
def test_what_is_said_of_a_wrong_network(old, new, says):
    assert old in GOOD
    net = written("my_wrong", GOOD.replace(old, new))["Net"]
    with pytest.raises(UserError) as error:
        run_of(net)
    assert says in error.value.sentence


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "self._at(tokens, length - 1), ",
            "self({'decoder_input_tokens': tokens}), ",
            ".prefill returns hidden states of shape",
        ),
        ("stack(hidden, axis=1), (seen", "stack(hidden, axis=1), (seen.astype(float)", "changes the shapes of its state"),
        ("jnp.stack(hidden, axis=1)", "hidden[0]", ".decode returns hidden states of shape [2, 16] for 2 rows"),
    ],
)
def test_what_is_said_of_a_wrong_decoder(old, new, says):
    with pytest.raises(UserError) as error:
        ModelConfig(convolutions(old, new))
    assert says in error.value.sentence


@pytest.mark.slow
def test_a_linen_network_generates_and_keeps_constants():
    """Through the bridge, which counts what it draws at every call, in a loop; with a table of positions as a constant."""

    class Sums(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dense(64)(jnp.cumsum(linen.Embed(64, 8)(tokens), axis=1))

    class Network(nnx.Module):
        architecture, vocab_size, max_length = "causal_decoder", 64, 16

        def __init__(self, *, rngs):
            self.linen = nnx.bridge.ToNNX(Sums(), rngs=rngs).lazy_init(jnp.zeros((1, 1), int))
            self.places = nnx.Variable(jnp.sin(jnp.arange(16.0)))

        def __call__(self, batch):
            tokens = batch["decoder_input_tokens"]
            return self.linen(tokens) + self.places[: tokens.shape[1]][None, :, None]

        def logits(self, x):
            return x

        def prefill(self, prompt, max_tokens):
            tokens, length = jnp.pad(prompt, ((0, 0), (1, max_tokens))), 1 + jnp.sum(prompt > 0, axis=1)
            return self._at(tokens, length - 1), (tokens, length)

        def decode(self, state, tokens, layers=None):
            prefix, length = state
            prefix = jnp.where(jnp.arange(prefix.shape[1])[None] == length[:, None], tokens, prefix)
            return self._at(prefix, length)[:, None], (prefix, length + 1)

        def _at(self, tokens, index):
            hidden = self({"decoder_input_tokens": tokens[:, :16]})
            return jnp.take_along_axis(hidden, jnp.minimum(index, 15)[:, None, None], axis=1)[:, 0]

    sharded = ShardedModel(ModelConfig(Network), MeshShape(1, 1, 1), jax.devices()[:1])
    params = jax.tree.map(lambda x: 5 * x, sharded.init_params(0))
    assert set(params) == {"linen"}  # the constant is no parameter
    ((_, tokens, _),) = Inference(sharded).generate(params, [[0, 5, 6]], limits=[4], eos_id=63)
    written = [0, 5, 6]
    for _ in range(4):
        logits = sharded.model.logits(params, {"decoder_input_tokens": np.array([written], np.int32)})
        written.append(int(np.argmax(logits[0, -1])))
    assert tokens.tolist() == written[3:]
    table, dense = params["linen"]["Embed_0"]["embedding"], params["linen"]["Dense_0"]
    expected = (
        np.cumsum(np.asarray(table)[[0, 5, 6]], axis=0) @ np.asarray(dense["kernel"])
        + np.asarray(dense["bias"])[None]
        + np.sin(np.arange(3.0))[:, None]
    )
    logits = sharded.model.logits(params, {"decoder_input_tokens": np.array([[0, 5, 6]], np.int32)})
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-4)


def test_what_fails_on_packed_examples_alone_is_found_before_training():
    source = GOOD.replace(
        'return self.embed(batch["decoder_input_tokens"])',
        'return self.embed(batch["decoder_input_tokens"]) + batch.get("decoder_positions", jnp.ones((2, 3)))[:, :2]',
    )
    with pytest.raises(UserError, match=r"decoder_positions: my_packed.py, line 11, raises"):
        run_of(written("my_packed", source)["Net"])
