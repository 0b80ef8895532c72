"""Attention masks and biases, dropout and cross-entropy against loops and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_lab.networks.positions import relative_position_bucket
from t5x_lab.ops.attention import DiagonalBias, Mask, dot_product_attention, expand_bias, expand_mask
from t5x_lab.ops.cross_entropy import cross_entropy
from t5x_lab.ops.dropout import dropout


def test_mask_of_the_worked_example():
    segments = jnp.array([[1, 1, 1, 2, 2]])
    prefix = jnp.array([[1, 1, 0, 0, 0]]) > 0
    mask = expand_mask(Mask(True, segments, segments, prefix, prefix), 5, 5)
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(mask[0].astype(int), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
def test_mask_equals_the_rule_written_as_loops(seed, causal, with_segments, with_prefix):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(1, 9))
    segments = np.sort(rng.integers(0, 4, T))[::-1].copy() if with_segments else None
    prefix = rng.integers(0, 2, T).astype(bool) if with_prefix and causal else None
    as_row = lambda x: None if x is None else jnp.asarray(x)[None]
    mask = expand_mask(Mask(causal, as_row(segments), as_row(segments), as_row(prefix), as_row(prefix)), T, T)
    for q in range(T):
        for k in range(T):
            allowed = k <= q or not causal or (prefix is not None and prefix[q] and prefix[k])
            if segments is not None:
                allowed = allowed and segments[q] == segments[k] and segments[k] != 0
            assert (True if mask is None else bool(mask[0, q, k])) == bool(allowed), (q, k)


@pytest.mark.parametrize("T, S", [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_bias_of_diagonals_equals_one_lookup_per_pair(T, S):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, T + S - 1)).astype(np.float32))
    bias = expand_bias(DiagonalBias(values, T), T, S)
    for t in range(T):
        for s in range(S):
            np.testing.assert_array_equal(bias[0, :, t, s], values[:, s - t + T - 1])


def test_bias_with_offsets_continues_the_same_diagonals():
    slots = 8
    bias = DiagonalBias(jnp.asarray(np.random.default_rng(1).normal(size=(2, 2 * slots - 1)).astype(np.float32)), slots)
    whole = expand_bias(bias, slots, slots)[0]
    offsets = jnp.array([0, 3, 6])
    some = expand_bias(bias, 2, slots, offsets)
    for row, offset in enumerate(offsets):
        np.testing.assert_array_equal(some[row], whole[:, offset : offset + 2])


def test_attention_equals_a_plain_numpy_softmax():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(2, n, 3, 4)).astype(np.float32) for n in (5, 6, 6))
    segments = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    values = rng.normal(size=(3, 10)).astype(np.float32)
    got = dot_product_attention(
        q, k, v, mask=Mask(False, key_segments=jnp.asarray(segments)), bias=DiagonalBias(jnp.asarray(values), 5)
    )
    for b in range(2):
        for n in range(3):
            for t in range(5):
                keys = [s for s in range(6) if segments[b, s]]
                logits = np.array([q[b, t, n] @ k[b, s, n] + values[n, s - t + 4] for s in keys], np.float64)
                weights = np.exp(logits - logits.max())
                expected = sum(w * v[b, s, n] for w, s in zip(weights / weights.sum(), keys))
                np.testing.assert_allclose(got[b, t, n], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_follow_the_formula(bidirectional):
    """Exact up to a limit, then floor(limit + log(n / limit) / log(128 / limit) * limit), in exact arithmetic."""
    distance = np.arange(-300, 301)
    buckets = relative_position_bucket(distance, bidirectional)
    for d, bucket in zip(distance, buckets):
        total, offset, n = 32, 0, -int(d)
        if bidirectional:
            total, offset, n = 16, 16 if d > 0 else 0, abs(int(d))
        n = max(n, 0)
        limit = total // 2
        if n < limit:
            expected = n
        else:  # the largest i with limit * (128/limit)**(i/limit) <= n, by integers: n**limit >= limit**limit * (128/limit)**i
            ratio = 128 // limit
            expected = limit + max(i for i in range(limit + 50) if n**limit >= limit**limit * ratio**i)
            expected = min(expected, total - 1)
        assert bucket == offset + expected, (d, bucket, offset + expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_float64(smoothing):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 7, 11)).astype(np.float32) * 5
    targets = rng.integers(0, 11, (4, 7))
    loss, log_z = cross_entropy(jnp.asarray(logits), jnp.asarray(targets), smoothing)
    exact = logits.astype(np.float64)
    expected_z = np.log(np.exp(exact).sum(-1))
    distribution = np.full((4, 7, 11), smoothing / 10)
    np.put_along_axis(distribution, targets[..., None], 1 - smoothing, -1)
    expected = (distribution * (expected_z[..., None] - exact)).sum(-1)
    if smoothing:
        expected -= -(distribution * np.log(distribution)).sum(-1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_z, expected_z, rtol=1e-6)


def test_dropout_shares_its_mask_along_the_length_and_keeps_the_mean():
    x = jnp.ones((64, 10, 200))
    y = dropout(x, 0.3, jax.random.key(0))
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:, :1], y.shape))
    assert abs(float(y.mean()) - 1.0) < 0.02
    assert set(np.unique(y.round(4))) == {0.0, np.float32(1 / 0.7).round(4)}
    assert dropout(x, 0.3, None) is x
