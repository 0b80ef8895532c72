"""Scanned = unrolled, remat changes nothing, packed = unpacked, cached = uncached, causal and prefix share parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ARCHITECTURES,
    VARIANTS,
    architecture_of,
    compiled,
    exhaustive,
    pack_rows,
    random_batch,
    random_params,
    tiny_config,
    tiny_model,
)

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.generation import complete, generate, start
from t5x_lab.decoding.sampling import SamplingConfig, choose
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.layer_kinds import LayerKind
from t5x_lab.networks.positions import positions_from_end
from t5x_lab.ops.masks import Mask, expand_mask


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, relative_bias",
    [("causal_decoder", "per_layer"), exhaustive("encoder_decoder", "shared"), exhaustive("local_relative", "shared")],
)
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
        objective = lambda p: model.loss(p, batch, dropout_key=jax.random.key(1)).objective
        result = jax.jit(jax.value_and_grad(objective))(random_params(model))
        reference = reference or result
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), result, reference)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *VARIANTS])
def test_packed_examples_have_the_logits_they_have_alone(architecture):
    model = tiny_model(architecture)
    params, logits = random_params(model), compiled(model.logits)
    batch = random_batch(architecture)
    alone = logits(params, batch)
    packed = pack_rows(batch, 1, 2, architecture)
    together, segments = logits(params, packed)[0], packed["decoder_segment_ids"][0]
    for segment, row in ((1, 1), (2, 2)):
        length = int((segments == segment).sum())
        np.testing.assert_allclose(together[segments == segment], alone[row, :length], rtol=1e-4, atol=1e-5)


def test_a_prefix_decoder_is_a_causal_decoder_with_one_flag():
    causal, prefix = tiny_model("causal_decoder"), tiny_model("prefix_decoder")
    assert jax.tree.structure(causal.abstract_params) == jax.tree.structure(prefix.abstract_params)
    params, batch = random_params(causal), random_batch("prefix_decoder")
    plain = compiled(causal.logits)(params, batch)
    assert not np.allclose(plain, compiled(prefix.logits)(params, batch))
    no_prefix = {**batch, "decoder_causal_attention": np.zeros_like(batch["decoder_causal_attention"])}
    np.testing.assert_array_equal(plain, compiled(prefix.logits)(params, no_prefix))


def test_a_bidirectional_bias_tells_right_from_left():
    batch = random_batch("prefix_decoder")
    causal_bias, two = tiny_model("prefix_decoder"), tiny_model("prefix_decoder", bidirectional_bias=True)
    params = random_params(causal_bias)
    assert not np.allclose(compiled(causal_bias.logits)(params, batch), compiled(two.logits)(params, batch))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *VARIANTS])
def test_no_target_sees_its_future(architecture):
    model = tiny_model(architecture)
    params, logits = random_params(model), compiled(model.logits)
    batch = random_batch(architecture)
    batch["decoder_target_tokens"] = np.maximum(batch["decoder_target_tokens"], 2)
    batch["decoder_input_tokens"] = np.pad(batch["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]
    changed = {**batch, "decoder_input_tokens": batch["decoder_input_tokens"].copy()}
    changed["decoder_input_tokens"][:, 7:] = 3
    before, after = logits(params, batch), logits(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_rotary_positions_go_on_from_the_encoder_to_the_decoder():
    """Compares a layer with merged attention with a decoder's layer that reads both parts as one sequence."""
    settings = dict(positions="rotary", scaling="standard", rotary_theta=100.0, layer_pattern=(LayerKind(rotary_theta=50.0),))
    decoder = tiny_model("causal_decoder", num_decoder_layers=1, **settings)
    merged = tiny_model("encoder_decoder", num_decoder_layers=1, merged_attention=True, rotary_cross_attention=True, **settings)
    params = random_params(decoder)
    stack, with_memory = (model.network({**random_params(model), **params}).decoder for model in (decoder, merged))
    x, positions = jax.random.normal(jax.random.key(0), (2, 9, 16)), jnp.arange(9)[None]
    whole, _ = stack(x, mask=Mask(True), positions=positions)
    segments = jnp.ones((2, 5), int)
    second_part, _ = with_memory(
        x[:, 5:],
        mask=Mask(True),
        positions=positions[:, :4],
        cross_mask=Mask(False, key_segments=segments),
        encoded=stack.unstack()[0].self_attention_norm(x[:, :5]),
    )
    np.testing.assert_allclose(second_part, whole[:, 5:], rtol=1e-5, atol=1e-5)


def test_positions_from_the_end_of_a_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    assert positions_from_end(segments).tolist() == [[-3, -2, -1, -2, -1, -2, -1], [-7, -6, -5, -4, -3, -2, -1]]


@pytest.mark.parametrize("kind, reads", [(LayerKind(window=3), (-2, 2)), (LayerKind(window=3, encoder_window=(1, 2)), (-1, 2))])
def test_an_encoder_alone_reads_its_windows(kind, reads):
    """Checks which positions a token changes through two layers."""
    model = tiny_model("encoder", layer_pattern=(kind,), num_encoder_layers=2)
    tokens = np.arange(2, 18)[None]
    changed = np.where(np.arange(16) == 7, 40, tokens)
    batch = {"encoder_input_tokens": tokens, "encoder_target_tokens": tokens}
    logits, params = compiled(model.logits), random_params(model)
    differs = np.any(logits(params, batch) != logits(params, {**batch, "encoder_input_tokens": changed}), axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(differs), np.arange(7 - 2 * reads[1], 7 - 2 * reads[0] + 1))


@pytest.mark.parametrize(
    "name, changes",
    [
        ("prefix_decoder", {}),
        ("lstm", {}),
        *(
            pytest.param(name, changes, marks=pytest.mark.slow)
            for name, changes in [
                ("encoder_decoder", {}),
                ("causal_decoder", {"relative_bias": "per_layer"}),
                ("prefix_decoder", {"bidirectional_bias": True}),
                ("encoder_decoder", {"norm_position": "both", "attention_logit_cap": 1.0, "scale_embeddings": True}),
                *((name, {}) for name in VARIANTS if name not in ("lstm", "local_relative")),
            ]
        ),
        exhaustive("local_relative", {}),
    ],
)
def test_cached_decoding_equals_running_the_whole_sequence_again(name, changes):
    model, architecture = tiny_model(name, **changes), architecture_of(name)
    params = random_params(model)
    rng = np.random.default_rng(0)
    lengths = np.array([5, 1, 4, 3])
    prompts = np.where(np.arange(5) < lengths[:, None], rng.integers(2, 64, (4, 5)), 0).astype(np.int32)

    tokens, log_probs = jax.jit(lambda params, x: complete(model, params, x, 0, 7, SamplingConfig(), 1))(params, prompts)
    logits_of = compiled(model.logits)
    for i in range(7):  # all rows at once, in the shape of `random_batch`
        batch = {"decoder_input_tokens": np.zeros((4, 12), np.int32)}
        if architecture == "encoder_decoder":
            batch["encoder_input_tokens"] = np.pad(prompts, ((0, 0), (0, 11)))
        else:
            batch["decoder_causal_attention"] = (np.arange(12) <= lengths[:, None]).astype(np.int32)
        before = [
            [*([] if architecture == "encoder_decoder" else prompts[row, :n]), *tokens[row, :i]]
            for row, n in enumerate(lengths)
        ]
        for row, ids in enumerate(before):
            batch["decoder_input_tokens"][row, 1 : len(ids) + 1] = ids
        logits = logits_of(params, batch)
        for row, ids in enumerate(before):
            if 1 in tokens[row, :i]:
                assert tokens[row, i] == 0
                continue
            last = logits[row, len(ids)]
            token = int(jnp.argmax(last))
            assert int(tokens[row, i]) == token
            np.testing.assert_allclose(log_probs[row, i], jax.nn.log_softmax(last)[token], atol=1e-4)


@pytest.mark.parametrize("name", ["local", exhaustive("local_relative"), exhaustive("causal_decoder")])
def test_several_tokens_at_a_time_have_the_hidden_states_they_have_one_by_one(name):
    """Local layers of windows 3 to 5 read chunks of 1 to 6 tokens, after prompts of different lengths."""
    model = tiny_model(name)
    network = model.network(random_params(model))
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(np.where(np.arange(7) < [[7], [2]], rng.integers(2, 64, (2, 7)), 0))
    tokens = jnp.asarray(rng.integers(2, 64, (2, 16)))

    def hidden(sizes: list[int]) -> jax.Array:
        _, state = network.prefill(prompts, 16)
        decode, outputs, start = jax.jit(lambda state, x: network.decode(state, x)), [], 0
        for size in sizes:
            output, state = decode(state, tokens[:, start : start + size])
            outputs.append(output)
            start += size
        return jnp.concatenate(outputs, axis=1)

    np.testing.assert_allclose(hidden([6, 1, 2, 6, 1]), hidden([1] * 16), rtol=1e-4, atol=1e-5)


def test_a_local_layers_cache_does_not_grow_with_the_text():
    def sizes(max_tokens: int) -> list[int]:
        model = tiny_model("local")
        prefill = lambda params, prompts: model.network(params).prefill(prompts, max_tokens)[1]
        state = jax.eval_shape(prefill, model.abstract_params, jax.ShapeDtypeStruct((2, 6), jnp.int32))
        return [cache.key.size for cache in state.caches]

    short, long = sizes(20), sizes(2000)
    assert [a == b for a, b in zip(short, long)] == [True, False, True, False, True]
    assert short[0] == 2 * 2 * 4 * 4  # rows, heads, the window of 4, head size


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
    "config, candidates",
    [(SamplingConfig(1.0, top_k=2), {0, 1}), (SamplingConfig(1.0, top_p=0.75), {0, 1}), (SamplingConfig(1.0), {0, 1, 2, 3})],
)
def test_sampling_draws_from_the_right_tokens_in_the_right_shares(config, candidates):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(probabilities), (20_000, 4))
    tokens, log_probs = choose(logits, config, jax.random.split(jax.random.key(0), 20_000))
    expected = np.where([i in candidates for i in range(4)], probabilities, 0)
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20_000, expected, atol=0.012)
    np.testing.assert_allclose(log_probs, np.log(probabilities)[tokens], rtol=1e-5)
    as_t5x = dataclasses.replace(config, rescale_log_probs=True)
    _, rescaled = choose(logits, as_t5x, jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(rescaled, np.log(expected[tokens]), rtol=1e-4)
    hot, _ = choose(logits, SamplingConfig(0.5), jax.random.split(jax.random.key(1), 20_000))
    squared = probabilities**2 / (probabilities**2).sum()
    np.testing.assert_allclose(np.bincount(hot, minlength=4) / 20_000, squared, atol=0.012)


@pytest.mark.parametrize(
    "config, candidates", [(SamplingConfig(1.0, top_p=0.8), {0, 3}), (SamplingConfig(1.0, top_k=3), {0, 1, 3})]
)
def test_neither_rounding_nor_ties_make_the_set_larger(config, candidates):
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.3, 0.1, 0.1, 0.5])), (1000, 4))
    assert set(choose(logits, config, jax.random.split(jax.random.key(0), 1000))[0].tolist()) == candidates


def test_decoder_mask_of_a_prefix_example_written_by_hand():
    """Prefix of 3 tokens, targets of 3, one of padding: inputs are shifted, so position 3 still belongs to the prefix."""
    batch = {
        "decoder_target_tokens": np.array([[9, 4, 6, 3, 9, 5, 0]]),
        "decoder_input_tokens": np.array([[0, 9, 4, 6, 3, 9, 5]]),
        "decoder_causal_attention": np.array([[1, 1, 1, 1, 0, 0, 0]]),
    }
    model = tiny_model("prefix_decoder")
    network = model.network(random_params(model))
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
    params, batch = random_params(model), random_batch("encoder_decoder")
    assert jax.eval_shape(model.logits, params, batch).dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model.abstract_params))
    exact = compiled(tiny_model("encoder_decoder").logits)(params, batch)
    np.testing.assert_allclose(compiled(model.logits)(params, batch), exact, atol=0.05 * float(jnp.abs(exact).max()))


@pytest.mark.slow
def test_initialisation_has_t5s_scales():
    config = dataclasses.replace(
        tiny_config("causal_decoder"), emb_dim=128, head_dim=32, num_heads=8, mlp_dim=256, vocab_size=512
    )
    params = jax.jit(Model(ModelConfig(config)).init)(jax.random.key(0))
    layers = params["decoder"]["layers"]
    for kernel, deviation in (
        (params["token_embedder"]["embedding"], 1.0),
        (layers["self_attention"]["query"]["kernel"], (128 * 32) ** -0.5),
        (layers["self_attention"]["key"]["kernel"], 128**-0.5),
        (layers["self_attention"]["out"]["kernel"], 256**-0.5),
        (layers["mlp"]["wo"]["kernel"], 256**-0.5),
        (params["logits_dense"]["kernel"], 128**-0.5),
    ):
        assert float(np.std(kernel)) == pytest.approx(deviation, rel=0.02)
    first, second = np.asarray(layers["mlp"]["wo"]["kernel"])[:2]
    assert not np.allclose(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel_init",
    ["orthogonal", "glorot_uniform", jax.nn.initializers.normal(0.5)],
    ids=["orthogonal", "glorot_uniform", "own"],
)
def test_matrices_are_drawn_by_the_initializer_as_inputs_by_outputs(kernel_init):
    """Against JAX's own draws of a matrix of that shape: their scale, or their rows' products."""
    config = dataclasses.replace(
        tiny_config("causal_decoder", initializer=kernel_init), emb_dim=64, num_heads=4, head_dim=16, mlp_dim=96
    )
    params = jax.jit(Model(ModelConfig(config)).init)(jax.random.key(0))
    layers = params["decoder"]["layers"]
    function = getattr(jax.nn.initializers, kernel_init)() if isinstance(kernel_init, str) else kernel_init
    for (module, name), inputs, outputs in (
        (("self_attention", "query"), 64, 64),
        (("self_attention", "out"), 64, 64),
        (("mlp", "wi_0"), 64, 96),
        (("mlp", "wo"), 96, 64),
    ):
        matrix = np.asarray(layers[module][name]["kernel"][0]).reshape(inputs, outputs)
        other = np.asarray(function(jax.random.key(1), (inputs, outputs), jnp.float32))
        assert np.std(matrix) == pytest.approx(np.std(other), rel=0.05) and abs(matrix).max() == pytest.approx(
            abs(other).max(), rel=0.3
        )
        if kernel_init == "orthogonal":
            small = min(inputs, outputs)
            product = matrix @ matrix.T if inputs == small else matrix.T @ matrix
            np.testing.assert_allclose(product, np.eye(small), atol=1e-5)
    assert np.std(params["token_embedder"]["embedding"]) == pytest.approx(1.0, rel=0.1)  # tables are not matrices
    for wrong, says in (("xavier", 'TransformerConfig.initializer is "xavier"'), (lambda key, shape, dtype: 0.0, "returns")):
        with pytest.raises(UserError, match=says):
            tiny_config("causal_decoder", initializer=wrong)


def test_contradictions_are_sentences():
    with pytest.raises(UserError, match="needs at least 1"):
        tiny_config("encoder_decoder", num_encoder_layers=0)
    with pytest.raises(UserError, match="only to a prefix decoder"):
        tiny_config("causal_decoder", bidirectional_bias=True)


@pytest.mark.parametrize("name", ["encoder_decoder", "causal_decoder"])
def test_logits_of_a_bfloat16_network_are_computed_in_float32(name):
    """Computes them as T5X: from hidden states in bfloat16 and parameters that are not rounded. So is the loss."""
    model = tiny_model(name, dtype="bfloat16")
    params, batch = random_params(model), random_batch(name)
    network, hidden = model._hidden(params, batch)
    matrix, scale = network.output_matrix()
    assert hidden.dtype == jnp.bfloat16
    expected = np.asarray(hidden, np.float64) @ np.asarray(matrix, np.float64) * scale
    np.testing.assert_allclose(model.logits(params, batch), expected, rtol=1e-4, atol=1e-4)
    weights, targets = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
    log_probs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    loss = -(np.take_along_axis(log_probs, targets[..., None], -1)[..., 0] * weights).sum()
    np.testing.assert_allclose(model.loss(params, batch).loss, loss, rtol=1e-5)
