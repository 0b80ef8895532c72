"""Networks beyond T5 against slow versions of their papers' formulas, in NumPy and float64."""

import jax
import numpy as np
import pytest
from helpers import compiled, random_batch, random_params, tiny_config, tiny_model

from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks import layers, stack
from t5x_lab.networks.layers import make_norm
from t5x_lab.networks.positions import sinusoidal
from t5x_lab.networks.rotary import Rotation, angular_rates
from t5x_lab.networks.transformer import TransformerConfig
from t5x_lab.ops import blocked_attention

TOKENS = np.array([[5, 9, 3, 3, 17, 40, 2], [7, 7, 7, 8, 1, 30, 62]], np.int32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, p, epsilon=1e-6):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def rms_norm(x, p, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p["scale"]


def layers_of(params, stack="decoder"):
    layers = jax.tree.map(lambda x: np.asarray(x, np.float64), params[stack]["layers"])
    return [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(len(jax.tree.leaves(layers)[0]))]


def causal_attention(q, k, v):
    """One head after the other, one query after the other; [T, N, H]."""
    out = np.zeros_like(q)
    for head in range(q.shape[1]):
        for t in range(q.shape[0]):
            weights = softmax(k[: t + 1, head] @ q[t, head] / np.sqrt(q.shape[-1]))
            out[t, head] = weights @ v[: t + 1, head]
    return out


def test_gpt1_is_the_papers_equations():
    """h0 = U We + Wp; n = LN(x + attention(x)); h = LN(n + MLP(n)); softmax(h We^T); no norm at the end."""
    model = tiny_model("gpt1")
    params = random_params(model)
    embedding = np.asarray(params["token_embedder"]["embedding"], np.float64)
    for row, got in zip(TOKENS, compiled(model.logits)(params, {"decoder_input_tokens": TOKENS}), strict=True):
        x = embedding[row] + params["position_embedder"]["embedding"][: len(row)]
        for p in layers_of(params):
            project = lambda name: np.einsum("td,dnh->tnh", x, a[name]["kernel"]) + a[name]["bias"]
            a = p["self_attention"]
            attended = causal_attention(project("query"), project("key"), project("value"))
            y = np.einsum("tnh,nhd->td", attended, a["out"]["kernel"]) + a["out"]["bias"]
            x = layer_norm(x + y, p["self_attention_norm"])
            hidden = x @ p["mlp"]["wi"]["kernel"] + p["mlp"]["wi"]["bias"]
            hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
            x = layer_norm(x + hidden @ p["mlp"]["wo"]["kernel"] + p["mlp"]["wo"]["bias"], p["mlp_norm"])
        np.testing.assert_allclose(got, x @ embedding.T, rtol=1e-4, atol=1e-4)
    assert "final_norm" not in params["decoder"]


def turned(x):
    """Each pair (h, h + H/2) as a complex number, times exp(i t / 10000**(2h/H))."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half))[:, None]
    y = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([y.real, y.imag], -1)


def test_a_rotary_decoder_with_grouped_queries():
    model = tiny_model("rotary")
    params = random_params(model)
    assert params["decoder"]["layers"]["self_attention"]["key"]["kernel"].shape == (3, 16, 2, 4)
    embedding = np.asarray(params["token_embedder"]["embedding"], np.float64)
    for row, got in zip(TOKENS, compiled(model.logits)(params, {"decoder_input_tokens": TOKENS}), strict=True):
        x = embedding[row]
        for p in layers_of(params):
            y = rms_norm(x, p["self_attention_norm"])
            a = p["self_attention"]
            q, k, v = (np.einsum("td,dnh->tnh", y, a[name]["kernel"]) for name in ("query", "key", "value"))
            attended = causal_attention(turned(q), np.repeat(turned(k), 2, axis=1), np.repeat(v, 2, axis=1))
            x = x + np.einsum("tnh,nhd->td", attended, a["out"]["kernel"])
            y = rms_norm(x, p["mlp_norm"])
            gate = y @ p["mlp"]["wi_0"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ p["mlp"]["wi_1"]["kernel"])) @ p["mlp"]["wo"]["kernel"]
        expected = rms_norm(x, params["decoder"]["final_norm"]) @ params["logits_dense"]["kernel"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_rotated_queries_and_keys_know_their_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    rate = angular_rates(8)
    rotated = lambda x, position: Rotation(np.array([[position]]), rate)(x)
    product = lambda t, s: float((rotated(q, t) * rotated(k, s)).sum())
    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_sinusoids_by_the_formula():
    got = np.asarray(sinusoidal(np.array([[0, 1, 77]]), 6))[0]
    for t, row in zip((0, 1, 77), got, strict=True):
        for i in range(3):
            angle = t / 10_000 ** (2 * i / 6)
            np.testing.assert_allclose(row[2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-5)


def test_an_lstm_step_by_step():
    model = tiny_model("lstm")
    params = random_params(model)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    for row, got in zip(TOKENS, compiled(model.logits)(params, {"decoder_input_tokens": TOKENS}), strict=True):
        cell = output = np.zeros(24)
        for token, logits in zip(row, got, strict=True):
            x = p["token_embedder"]["embedding"][token]
            i, f, g, o = (
                x @ p["inputs"]["kernel"][:, gate] + p["inputs"]["bias"][gate] + output @ p["recurrent"]["kernel"][:, gate]
                for gate in range(4)
            )
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            output = sigmoid(o) * np.tanh(cell)
            expected = p["token_embedder"]["embedding"] @ (output @ p["out"]["kernel"]) / 4
            np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    fresh = jax.jit(model.init)(jax.random.key(0))
    np.testing.assert_array_equal(fresh["inputs"]["bias"], np.eye(4)[1][:, None] * np.ones(24))


def test_shared_stacks_are_two_stacks_with_equal_parameters():
    shared, apart = (tiny_model("shared_stacks", share_stacks=share) for share in (True, False))
    assert set(shared.abstract_params) == {"token_embedder", "decoder", "logits_dense"}
    params = random_params(shared)
    layers = params["decoder"]["layers"]
    own = {name: x for name, x in layers.items() if "cross" not in name}
    copied = {**params, "encoder": {**params["decoder"], "layers": own}}
    batch = random_batch("encoder_decoder")
    got, expected = compiled(shared.logits)(params, batch), compiled(apart.logits)(copied, batch)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_scaled_attention_logits_are_those_of_smaller_queries():
    """T5X's networks for GPUs divide queries by sqrt(head_dim), here 2, also where their initialization is that of T5."""
    scaled, plain = (tiny_model("encoder_decoder", head_dim=4, scale_attn_logits=flag) for flag in (True, False))
    params, batch = random_params(plain), random_batch("encoder_decoder")
    smaller = jax.tree.map_with_path(lambda path, x: x / 2 if "query" in jax.tree_util.keystr(path) else x, params)
    got, expected, unscaled = (
        compiled(model.logits)(p, batch) for model, p in ((scaled, params), (plain, smaller), (plain, params))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(got - unscaled)) > 1e-3


def test_without_positions_an_encoder_does_not_know_the_order():
    shuffled = TOKENS[:, [3, 0, 6, 2, 5, 1, 4]]
    for positions, knows in (("none", False), ("relative", True), ("learned", True), ("rotary", True), ("sinusoidal", True)):
        model = tiny_model("encoder", positions=positions)
        params = random_params(model)
        first, two = (compiled(model.logits)(params, {"encoder_input_tokens": t}) for t in (TOKENS, shuffled))
        assert np.allclose(first[:, [3, 0, 6, 2, 5, 1, 4]], two, atol=1e-4) != knows


def test_an_encoders_loss_is_on_the_marked_targets():
    model = tiny_model("encoder")
    params = random_params(model)
    weights = np.array([[0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0]], np.int32)
    targets = np.full_like(TOKENS, 11)
    batch = {"encoder_input_tokens": TOKENS, "encoder_target_tokens": targets, "encoder_loss_weights": weights}
    sums = jax.jit(model.loss)(params, batch)
    log_probs = jax.nn.log_softmax(compiled(model.logits)(params, batch))[0]
    np.testing.assert_allclose(sums.loss, -(log_probs[1, 11] + log_probs[5, 11]), rtol=1e-5)
    assert float(sums.weights) == 2


def test_gpt1_has_exactly_the_published_number_of_parameters():
    published = TransformerConfig(
        "causal_decoder", vocab_size=40_478, emb_dim=768, num_heads=12, head_dim=64, mlp_dim=3072, num_decoder_layers=12,
        mlp_activations=("gelu",), logits_via_embedding=True, scaling="standard", positions="learned", max_positions=512,
        norm="layer", norm_position="post", use_bias=True,
    )  # fmt: skip
    assert Model(ModelConfig(published)).num_parameters == 116_534_784


def test_a_sequence_longer_than_the_learned_positions_is_a_sentence():
    model = tiny_model("gpt1", max_positions=4)
    with pytest.raises(UserError, match="of 7 tokens exceeds the model"):
        jax.eval_shape(model.logits, model.abstract_params, {"decoder_input_tokens": TOKENS})


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("causal_decoder", {"num_kv_heads": 3}, "but num_heads = 4 is not"),
        ("gpt1", {"scale_attn_logits": True}, "scale_attn_logits has no effect"),
        ("causal_decoder", {"share_stacks": True}, "equal numbers of encoder and decoder layers"),
        ("encoder", {"num_decoder_layers": 2}, 'architecture "encoder" needs 0'),
        ("causal_decoder", {"positions": "rotary", "head_dim": 3}, "must be even"),
        ("causal_decoder", {"positions": "rotery"}, 'Did you mean "rotary"'),
    ],
)
def test_contradictions_are_sentences(name, changes, says):
    with pytest.raises(UserError, match=says):
        tiny_config(name, **changes)


@pytest.mark.parametrize("name, norm", [("prefix_decoder", rms_norm), ("gpt1", layer_norm)])
def test_norms_of_tiny_numbers_know_their_epsilon(name, norm):
    """The variance is as small as epsilon, where only float64 is exact."""
    config = tiny_config(name, norm_epsilon=1e-5)
    x = np.random.default_rng(0).normal(0, 3e-3, (2, 5, 16)).astype(np.float32)
    module = make_norm(config)
    parameters = {"scale": np.ones(16), "bias": np.zeros(16)}
    np.testing.assert_allclose(module(x), norm(x.astype(np.float64), parameters, 1e-5), rtol=1e-5)


def test_dropout_is_where_t5_has_it(monkeypatch):
    """Embeddings, attention weights, what each sub-layer adds, the MLP's hidden units, and the output of the final norm."""
    shapes = []

    def record(x, rate, key, broadcast_axis=-2):
        shapes.append(x.shape if rate and key is not None else None)
        return x

    for module in (stack, layers):
        monkeypatch.setattr(module, "dropout", record)
    monkeypatch.setattr(blocked_attention, "drop", lambda x, keep, rate: record(x, rate, keep))
    model = Model(ModelConfig(tiny_config("causal_decoder", num_decoder_layers=1, dropout_rate=0.5, scan_layers=False)))
    batch = random_batch("causal_decoder")
    shapes.clear()
    jax.eval_shape(lambda p: model.logits(p, batch, jax.random.key(0)), model.abstract_params)
    stream, weights, hidden = (4, 12, 16), (4, 4, 12, 12), (4, 12, 32)
    assert shapes == [stream, weights, stream, hidden, stream, stream]
