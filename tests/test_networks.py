"""Scanned = unrolled, remat changes nothing, packed = unpacked, cached = uncached, causal and prefix share parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ARCHITECTURES, VARIANTS, architecture_of, pack_rows, random_batch, tiny_config, tiny_model

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.generation import complete, generate, start
from t5x_lab.decoding.sampling import SamplingConfig, choose
from t5x_lab.models.model import Model, ModelConfig
from t5x_lab.ops.attention import expand_mask

# A decoder's are quick enough for every edit; the others run with the whole suite.
SOME_SLOW = ["prefix_decoder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("causal_decoder", "encoder_decoder"))]
BIASES = ["shared", pytest.param("per_layer", marks=pytest.mark.slow)]


@pytest.mark.parametrize("relative_bias", BIASES)
@pytest.mark.parametrize("architecture", SOME_SLOW)
def test_scanned_unrolled_and_rematerialised_give_equal_losses_and_gradients(architecture, relative_bias):
    batch = random_batch(architecture)
    reference = None
    for changes in (
        {"scan_layers": True},
        {"scan_layers": False},
        {"scan_layers": True, "remat_policy": "full"},
        {"scan_layers": False, "remat_policy": "minimal"},
    ):
        model = tiny_model(architecture, relative_bias=relative_bias, dropout_rate=0.1, **changes)
        params = jax.jit(model.init)(jax.random.key(0))
        objective = lambda p: model.loss(p, batch, dropout_key=jax.random.key(1)).objective
        result = jax.jit(jax.value_and_grad(objective))(params)
        if reference is None:
            reference = result
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), result, reference)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *VARIANTS])
def test_packed_examples_have_the_losses_they_have_alone(architecture):
    model = tiny_model(architecture)
    params = jax.jit(model.init)(jax.random.key(0))
    loss = jax.jit(model.loss)
    batch = random_batch(architecture, rows=4)
    alone = [loss(params, {name: x[row : row + 1] for name, x in batch.items()}) for row in (1, 2)]
    packed = pack_rows(batch, 1, 2, architecture)
    for segment, expected in enumerate(alone, start=1):
        weights = packed["decoder_loss_weights"] * (packed["decoder_segment_ids"] == segment)
        got = loss(params, {**packed, "decoder_loss_weights": weights})
        np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(got.z_loss, expected.z_loss, rtol=1e-5)


def test_a_prefix_decoder_is_a_causal_decoder_with_one_flag():
    causal, prefix = tiny_model("causal_decoder"), tiny_model("prefix_decoder")
    assert jax.tree.structure(causal.abstract_params) == jax.tree.structure(prefix.abstract_params)
    params = jax.jit(causal.init)(jax.random.key(0))
    batch = random_batch("prefix_decoder")
    assert not np.allclose(jax.jit(causal.logits)(params, batch), jax.jit(prefix.logits)(params, batch))
    del batch["decoder_causal_attention"]
    np.testing.assert_array_equal(jax.jit(causal.logits)(params, batch), jax.jit(prefix.logits)(params, batch))


def test_a_bidirectional_bias_tells_right_from_left():
    batch = random_batch("prefix_decoder")
    one, two = tiny_model("prefix_decoder"), tiny_model("prefix_decoder", bidirectional_bias=True)
    params = jax.jit(one.init)(jax.random.key(0))
    assert not np.allclose(jax.jit(one.logits)(params, batch), jax.jit(two.logits)(params, batch))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *VARIANTS])
def test_no_target_sees_its_future(architecture):
    model = tiny_model(architecture)
    params = jax.jit(model.init)(jax.random.key(0))
    batch = random_batch(architecture, length=10)
    batch["decoder_target_tokens"] = np.maximum(batch["decoder_target_tokens"], 2)
    batch["decoder_input_tokens"] = np.pad(batch["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]
    changed = {**batch, "decoder_input_tokens": batch["decoder_input_tokens"].copy()}
    changed["decoder_input_tokens"][:, 7:] = 3
    logits = jax.jit(model.logits)
    before, after = logits(params, batch), logits(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize(
    "name, changes",
    [
        ("prefix_decoder", {}),
        ("lstm", {}),
        *(
            pytest.param(name, changes, marks=pytest.mark.slow)
            for name, changes in [
                *((name, {"relative_bias": "per_layer"}) for name in ARCHITECTURES),
                ("causal_decoder", {}),
                ("encoder_decoder", {}),
                ("prefix_decoder", {"bidirectional_bias": True}),
                *((name, {}) for name in VARIANTS if name != "lstm"),
            ]
        ),
    ],
)
def test_cached_decoding_equals_running_the_whole_sequence_again(name, changes):
    model, architecture = tiny_model(name, **changes), architecture_of(name)
    params = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    lengths = np.array([5, 1, 8, 3])
    prompts = np.where(np.arange(8) < lengths[:, None], rng.integers(2, 64, (4, 8)), 0).astype(np.int32)

    tokens, log_probs = jax.jit(lambda params, x: complete(model, params, x, 0, 7, SamplingConfig(), 1))(params, prompts)
    logits_of = jax.jit(model.logits)
    padded = lambda ids: np.pad(np.array(ids, np.int32), (0, 16 - len(ids)))[None]  # one shape, one program
    for row in range(4):
        prompt, written = list(prompts[row, : lengths[row]]), []
        for i in range(7):
            before = written if architecture == "encoder_decoder" else prompt + written
            batch = {"decoder_input_tokens": padded([0, *before])}
            if architecture == "encoder_decoder":
                batch["encoder_input_tokens"] = padded(prompt)
            else:
                batch["decoder_causal_attention"] = (np.arange(16) <= len(prompt)).astype(np.int32)[None]
            last = logits_of(params, batch)[0, len(before)]
            token = int(jnp.argmax(last))
            assert int(tokens[row, i]) == token
            np.testing.assert_allclose(log_probs[row, i], jax.nn.log_softmax(last)[token], atol=2e-5)
            written.append(token)
            if token == 1:
                assert not tokens[row, i + 1 :].any()
                break


def test_a_row_stops_at_its_end_token_while_others_go_on():
    """A made-up step: row r writes 5, 6, 7, … and the end token after r tokens."""

    def step(state, token):
        i = state + 1
        nxt = jnp.where(i >= jnp.arange(3), 1, 5 + i)
        return jax.nn.one_hot(nxt, 16) * 10, i

    first = jnp.where(jnp.arange(3) == 0, 1, 5)
    slots = start(jax.nn.one_hot(first, 16) * 10, jnp.int32(0), jnp.full((3,), 5), jnp.arange(3), max_tokens=5)
    slots = generate(step, slots, config=SamplingConfig(), eos_id=1, seed=0, max_steps=5, until=3)
    np.testing.assert_array_equal(slots.tokens, [[1, 0, 0, 0, 0], [5, 1, 0, 0, 0], [5, 6, 1, 0, 0]])
    assert (np.asarray(slots.log_probs) == 0).sum() == 4 + 3 + 2


@pytest.mark.parametrize(
    "config, kept",
    [(SamplingConfig(1.0, top_k=2), {0, 1}), (SamplingConfig(1.0, top_p=0.75), {0, 1}), (SamplingConfig(1.0), {0, 1, 2, 3})],
)
def test_sampling_draws_from_the_right_tokens_in_the_right_shares(config, kept):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(probabilities), (20_000, 4))
    drawn = np.bincount(choose(logits, config, jax.random.split(jax.random.key(0), 20_000)), minlength=4) / 20_000
    expected = np.where([i in kept for i in range(4)], probabilities, 0)
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.012)
    hot = choose(logits, SamplingConfig(0.5), jax.random.split(jax.random.key(1), 20_000))
    squared = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(np.bincount(hot, minlength=4) / 20_000, squared, atol=0.012)


def test_decoder_mask_of_a_prefix_example_written_by_hand():
    """Prefix of 3 tokens, targets of 3, one of padding: inputs are shifted, so position 3 still belongs to the prefix."""
    batch = {
        "decoder_target_tokens": np.array([[9, 4, 6, 3, 9, 5, 0]]),
        "decoder_input_tokens": np.array([[0, 9, 4, 6, 3, 9, 5]]),
        "decoder_causal_attention": np.array([[1, 1, 1, 1, 0, 0, 0]]),
    }
    model = tiny_model("prefix_decoder")
    network = model.network(jax.jit(model.init)(jax.random.key(0)))
    mask, _ = network.decoder_masks({name: jnp.asarray(x) for name, x in batch.items()})
    expected = [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(expand_mask(mask, 7, 7)[0].astype(int), expected)


def test_dtypes_of_activations_and_logits():
    model = tiny_model("encoder_decoder", dtype="bfloat16")
    params = jax.jit(model.init)(jax.random.key(0))
    batch = random_batch("encoder_decoder")
    assert jax.eval_shape(model.logits, params, batch).dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    exact = Model(ModelConfig(tiny_config("encoder_decoder")))
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch).loss, jax.jit(exact.loss)(params, batch).loss, rtol=0.02)


def test_initialisation_has_t5s_scales():
    config = dataclasses.replace(
        tiny_config("encoder_decoder"), emb_dim=256, head_dim=64, num_heads=8, mlp_dim=512, vocab_size=512
    )
    params = jax.jit(Model(ModelConfig(config)).init)(jax.random.key(0))
    layers = params["decoder"]["layers"]
    deviation = lambda x: float(jnp.std(x))
    assert deviation(params["token_embedder"]["embedding"]) == pytest.approx(1.0, rel=0.02)
    assert deviation(layers["self_attention"]["query"]["kernel"]) == pytest.approx((256 * 64) ** -0.5, rel=0.02)
    assert deviation(layers["self_attention"]["key"]["kernel"]) == pytest.approx(256**-0.5, rel=0.02)
    assert deviation(layers["self_attention"]["out"]["kernel"]) == pytest.approx(512**-0.5, rel=0.02)
    assert deviation(layers["mlp"]["wo"]["kernel"]) == pytest.approx(512**-0.5, rel=0.02)
    assert deviation(params["logits_dense"]["kernel"]) == pytest.approx(256**-0.5, rel=0.02)
    first, second = layers["mlp"]["wo"]["kernel"][:2]
    assert not np.allclose(first, second)


def test_contradictions_are_sentences():
    with pytest.raises(UserError, match="needs at least 1"):
        tiny_config("encoder_decoder", num_encoder_layers=0)
    with pytest.raises(UserError, match="option of a prefix decoder"):
        tiny_config("causal_decoder", bidirectional_bias=True)
