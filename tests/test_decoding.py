"""Beam search against exhaustive search and a slow reference, over made-up and real step functions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import architecture_of, tiny_model

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.beam_search import BeamConfig, beam_search, search

EOS = 1


def table_model(seed, batch, vocab, max_tokens):
    """A step whose logits are a random function of the tokens written, told by a table over all prefixes."""
    rng = np.random.default_rng(seed)
    rows = sum(vocab**n for n in range(max_tokens + 1))
    return rng.normal(size=(batch, rows, vocab)).astype(np.float32) * 2


def prefix_index(tokens, vocab):
    index = 0
    for token in tokens:
        index = index * vocab + int(token) + 1
    return index


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def sequences(vocab, max_tokens):
    """All texts that end, and those that are cut."""
    others = [token for token in range(vocab) if token != EOS]
    for n in range(max_tokens):
        yield from ((*start, EOS) for start in itertools.product(others, repeat=n))
    yield from itertools.product(others, repeat=max_tokens)


def exhaustive(table, vocab, max_tokens, config):
    """Finished texts with their scores, best first."""
    scored = []
    for tokens in sequences(vocab, max_tokens):
        total = sum(log_softmax(table[prefix_index(tokens[:i], vocab)])[token] for i, token in enumerate(tokens))
        if tokens[-1] == EOS:
            scored.append((total / config.penalty(len(tokens)), tokens))
    return sorted(scored, reverse=True)


def run_beams(tables, vocab, max_tokens, config):
    batch = len(tables)
    groups = jnp.repeat(jnp.arange(batch), config.size)

    def step(state, token):
        state = state * vocab + token + 1
        return jnp.asarray(tables)[groups, state], state

    first = jnp.asarray(tables)[:, 0]
    start = jnp.zeros((batch * config.size,), jnp.int32)
    return beam_search(step, first, start, lambda s, rows: s[rows], max_tokens=max_tokens, eos_id=EOS, config=config)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_what_exhaustive_search_finds(alpha):
    """A vocabulary of six and texts of up to four tokens: beams enough for every candidate."""
    vocab, max_tokens, batch = 6, 4, 3
    config = BeamConfig(size=3 * 5**3, alpha=alpha)
    tables = table_model(0, batch, vocab, max_tokens)
    tokens, scores = jax.jit(lambda: run_beams(tables, vocab, max_tokens, config))()
    for row in range(batch):
        best = exhaustive(tables[row], vocab, max_tokens, config)
        assert len(best) == 1 + 5 + 25 + 125
        np.testing.assert_allclose(scores[row][: len(best)], [score for score, _ in best], rtol=1e-4)
        found = [tuple(t[: list(t).index(EOS) + 1]) for t in np.asarray(tokens[row][: len(best)])]
        assert found == [text for _, text in best]


def slow_beams(table, vocab, max_tokens, config):
    """Beam search as a person would write it down."""
    live, done = [(0.0, ())], []
    for n in range(1, max_tokens + 1):
        candidates = [
            (score + log_softmax(table[prefix_index(text, vocab)])[token], (*text, token))
            for score, text in live
            for token in range(vocab)
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * config.size]
        done += [(score / config.penalty(n), text) for score, text in candidates if text[-1] == EOS]
        done = sorted(done, reverse=True)[: config.size]
        live = [(score, text) for score, text in candidates if text[-1] != EOS][: config.size]
        if len(done) == config.size and live[0][0] / config.penalty(max_tokens) <= done[-1][0]:
            break
    return done + [(score / config.penalty(max_tokens), text) for score, text in live][: config.size - len(done)]


@pytest.mark.parametrize("size, alpha, seed", [(1, 0.6, 0), (2, 0.6, 1), (3, 0.0, 2), (4, 1.0, 3)])
def test_a_narrow_beam_equals_the_slow_reference(size, alpha, seed):
    vocab, max_tokens, batch = 6, 5, 4
    config = BeamConfig(size, alpha)
    tables = table_model(seed, batch, vocab, max_tokens)
    tables[-1, :, EOS] = -50.0  # one that never ends by itself
    tokens, scores = jax.jit(lambda: run_beams(tables, vocab, max_tokens, config))()
    for row in range(batch):
        expected = slow_beams(tables[row], vocab, max_tokens, config)[:size]
        np.testing.assert_allclose(scores[row][: len(expected)], [score for score, _ in expected], rtol=1e-4)
        for text, (_, wanted) in zip(np.asarray(tokens[row]), expected, strict=False):
            assert tuple(text[: len(wanted)]) == wanted and not text[len(wanted) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder_decoder", "prefix_decoder", "causal_decoder", "lstm"])
def test_beams_of_a_model_score_what_the_model_gives_them(name):
    """Sums of teacher-forced log-probabilities, padded prompts in one batch; the caches follow their hypotheses."""
    model, architecture = tiny_model(name), architecture_of(name)
    params = jax.tree.map(lambda x: x * 3, jax.jit(model.init)(jax.random.key(0)))
    rng = np.random.default_rng(0)
    lengths = np.array([5, 1, 8])
    prompts = np.where(np.arange(8) < lengths[:, None], rng.integers(2, 64, (3, 8)), 0).astype(np.int32)
    config = BeamConfig(size=3)
    tokens, scores = jax.jit(lambda p, x: search(model, p, x, 6, config, EOS))(params, prompts)
    logits_of = jax.jit(model.logits)
    for row, beam in itertools.product(range(3), range(3)):
        text = np.asarray(tokens[row, beam])
        text = list(text[: list(text).index(EOS) + 1]) if EOS in text else list(text)
        prompt = list(prompts[row, : lengths[row]])
        before = text if architecture == "encoder_decoder" else prompt + text
        batch = {"decoder_input_tokens": np.array([[0, *before[:-1]]], np.int32)}
        if architecture == "encoder_decoder":
            batch["encoder_input_tokens"] = np.array([prompt], np.int32)
        else:
            batch["decoder_causal_attention"] = (np.arange(len(before)) <= len(prompt)).astype(np.int32)[None]
        logits = np.asarray(logits_of(params, batch))[0][-len(text) :]
        total = log_softmax(logits)[np.arange(len(text)), text].sum()
        np.testing.assert_allclose(scores[row, beam], total / config.penalty(len(text)), rtol=1e-3, atol=1e-4)


def test_impossible_beams_are_sentences():
    for options in ({"size": 0}, {"alpha": -1.0}):
        with pytest.raises(UserError, match="beam_"):
            BeamConfig(**options)
