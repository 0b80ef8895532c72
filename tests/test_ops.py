"""Attention masks and biases, dropout and cross-entropy against loops and float64."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from t5x_lab import ops
from t5x_lab.networks.flops import traced_flops
from t5x_lab.networks.global_tokens import make_token_blocks
from t5x_lab.networks.positions import relative_position_bucket
from t5x_lab.ops.attention import dot_product_attention, merged_attention
from t5x_lab.ops.biases import DiagonalBias, expand_bias
from t5x_lab.ops.cross_entropy import CrossEntropy, TokenLosses, compute_logits, cross_entropy, cross_entropy_of_logits
from t5x_lab.ops.dropout import dropout
from t5x_lab.ops.kernels import gpu, tpu
from t5x_lab.ops.masks import Mask, Window, expand_mask
from t5x_lab.ops.platform import Target, tracing_for
from t5x_lab.partitioning.mesh import MeshShape, make_mesh
from t5x_lab.partitioning.partitioner import Partitioner


def test_mask_of_the_worked_example():
    segments = jnp.array([[1, 1, 1, 2, 2]])
    prefix = jnp.array([[1, 1, 0, 0, 0]]) > 0
    mask = expand_mask(Mask(True, segments, segments, prefix, prefix), 5, 5)
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(mask[0].astype(int), expected)


WINDOWS = st.none() | st.builds(Window, st.integers(0, 9), st.integers(0, 9))


def draw_mask(seed: int, T: int, causal: bool, with_segments: bool, with_prefix: bool, window: Window | None) -> Mask:
    """Returns a mask of two rows."""
    rng = np.random.default_rng(seed)
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, T)))[:, ::-1].copy()) if with_segments else None
    prefix = jnp.asarray(rng.integers(0, 2, (2, T)).astype(bool)) if with_prefix and causal else None
    return Mask(causal, segments, segments, prefix, prefix, windows=(window,))


def allowed_by_loops(mask: Mask, T: int) -> np.ndarray:
    """Returns bool [2, T, T] by the rule for one query and key."""
    (window,) = mask.windows
    segments, prefix = (None if x is None else np.asarray(x) for x in (mask.query_segments, mask.query_prefix))
    allowed = np.zeros((2, T, T), bool)
    for row, query, key in np.ndindex(allowed.shape):
        is_allowed = key <= query or not mask.causal or (prefix is not None and prefix[row, query] and prefix[row, key])
        if window is not None:
            is_allowed = is_allowed and -window.before <= key - query <= window.after
        if segments is not None:
            is_allowed = is_allowed and segments[row, query] == segments[row, key] != 0
        allowed[row, query, key] = is_allowed
    return allowed


@cases(40)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans(), WINDOWS)
def test_mask_equals_the_rule_written_as_loops(seed, causal, with_segments, with_prefix, window):
    T = 8
    mask = draw_mask(seed, T, causal, with_segments, with_prefix, window)
    expected = allowed_by_loops(mask, T)
    whole = expand_mask(mask, T, T)
    np.testing.assert_array_equal(np.broadcast_to(True if whole is None else whole, expected.shape), expected)
    queries, keys = slice(3, 7), slice(2, 6)
    part = expand_mask(mask.part(3, 4, 2, 4), 4, 4, first_query=3, first_key=2)
    np.testing.assert_array_equal(np.broadcast_to(True if part is None else part, (2, 4, 4)), expected[:, queries, keys])


@cases(20)
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 3))
def test_mask_and_bias_follow_the_positions_of_a_cache(seed, reach, T):
    """Keys lie in any order, some slots are empty, and queries start at another position in each row."""
    rng = np.random.default_rng(seed)
    S = 6
    positions = rng.integers(-1, 12, (2, S))
    offsets = rng.integers(0, 12, 2)
    mask = Mask(True, query_offset=jnp.asarray(offsets), key_positions=jnp.asarray(positions), windows=(Window(reach, reach),))
    bias = DiagonalBias(jnp.asarray(rng.normal(size=(3, 31)).astype(np.float32)), 16)
    allowed = np.asarray(expand_mask(mask, T, S))
    values = np.asarray(expand_bias(bias, T, S, query_offset=mask.query_offset, key_positions=mask.key_positions))
    for row, t, s in np.ndindex(2, T, S):
        distance = positions[row, s] - (offsets[row] + t)
        assert allowed[row, t, s] == (positions[row, s] >= 0 and -reach <= distance <= 0)
        np.testing.assert_array_equal(values[row, :, t, s], bias.values[:, distance + 15])


@pytest.mark.parametrize("T, S", [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_bias_of_diagonals_equals_one_lookup_per_pair(T, S):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, T + S - 1)).astype(np.float32))
    bias = np.asarray(expand_bias(DiagonalBias(values, T), T, S))
    for t in range(T):
        for s in range(S):
            np.testing.assert_array_equal(bias[0, :, t, s], values[:, s - t + T - 1])


def test_bias_with_offsets_continues_the_same_diagonals():
    slots = 8
    bias = DiagonalBias(jnp.asarray(np.random.default_rng(1).normal(size=(2, 2 * slots - 1)).astype(np.float32)), slots)
    whole = np.asarray(expand_bias(bias, slots, slots)[0])
    offsets = jnp.array([0, 3, 6])
    some = expand_bias(bias, 2, slots, query_offset=offsets)
    for row, offset in enumerate(offsets.tolist()):
        np.testing.assert_array_equal(some[row], whole[:, offset : offset + 2])


def test_attention_equals_a_plain_numpy_softmax():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(2, n, 3, 4)).astype(np.float32) for n in (5, 6, 6))
    segments = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    values = rng.normal(size=(3, 10)).astype(np.float32)
    mask, bias = Mask(False, key_segments=jnp.asarray(segments)), DiagonalBias(jnp.asarray(values), 5)
    got = jax.jit(dot_product_attention)(q, k, v, mask=mask, bias=bias)
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


@pytest.mark.parametrize(
    "smoothing, z_loss, shards, chunk, cap",
    [(0.0, 0.0, 1, 10_000, None), (0.1, 1e-2, 2, 3, None), (0.1, 1e-2, 1, 8, 2.0), (0.0, 1e-2, 4, 3, None)],
)
def test_cross_entropy_and_its_gradient_equal_float64(smoothing, z_loss, shards, chunk, cap):
    """Against the definition, all logits at once, differentiated by JAX, both in float64."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        hidden, matrix = jnp.asarray(rng.normal(size=(4, 7, 6))), jnp.asarray(rng.normal(size=(6, 11)) * 2)
        targets, weights = jnp.asarray(rng.integers(0, 11, (4, 7))), jnp.asarray(rng.uniform(0, 2, (4, 7)))

        def plain(hidden, matrix, weights=weights):
            logits = 0.5 * hidden @ matrix
            logits = logits if cap is None else cap * jnp.tanh(logits / cap)
            log_z = jax.nn.logsumexp(logits, axis=-1)
            probability = jax.nn.one_hot(targets, 11) * (1 - smoothing - smoothing / 10) + smoothing / 10
            loss = jnp.sum(probability * (log_z[..., None] - logits), axis=-1)
            if smoothing:
                loss += jnp.sum(probability * jnp.log(probability), axis=-1)
            return jnp.sum((loss + z_loss * log_z**2) * weights), TokenLosses(loss, log_z, jnp.argmax(logits, -1) == targets)

        def fused(hidden, matrix, weights=weights):
            config = CrossEntropy(z_loss, smoothing, scale=0.5, cap=cap, shards=shards, chunk=chunk)
            return cross_entropy(hidden, matrix, targets, weights, config)

        expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(hidden, matrix)
        got = jax.jit(jax.value_and_grad(fused, argnums=(0, 1), has_aux=True))(hidden, matrix)
        assert got[1][0].dtype == jnp.float64
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, expected)
        np.testing.assert_allclose(jax.jit(fused)(hidden, matrix)[0], expected[0][0], rtol=1e-12)
        if chunk == 8:  # of a network without an output matrix
            logits = compute_logits(hidden, matrix, 0.5, cap)
            whole, tokens = cross_entropy_of_logits(logits, targets, weights, CrossEntropy(z_loss, smoothing))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), (whole, tokens), expected[0])

        # Every number that comes out may be differentiated, by every number that goes in.
        mixes = {
            "one token's loss": lambda objective, tokens: tokens.loss[1, 2],
            "losses": lambda objective, tokens: jnp.sum(tokens.loss**2),
            "log Z": lambda objective, tokens: jnp.sum(tokens.log_z**3),
            "all": lambda objective, tokens: objective * jnp.sum(tokens.loss * tokens.log_z),
        }
        for name, mix in mixes.items():
            expected, got = (
                jax.jit(jax.grad(lambda h, m, w, f=f, mix=mix: mix(*f(h, m, w)), argnums=(0, 1, 2)))(hidden, matrix, weights)
                for f in (plain, fused)
            )
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11, err_msg=name), got, expected)


def plain_attention(q, k, v, bias: DiagonalBias, allowed, cap):
    """Attention with all weights at once."""
    T, S, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logits += bias.values[None][:, :, np.arange(S)[None] - np.arange(T)[:, None] + bias.span - 1]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(allowed[:, None], logits, -1e10)), v)


TPU, GPU = Target("tpu", "TPU v4"), Target("gpu", "NVIDIA H100 80GB HBM3")


@contextlib.contextmanager
def fused_kernels(target: Target, mesh: MeshShape = MeshShape(1, 1, 1)):
    """Attention by the kernels for a target, in tiles of 8, without it. The value is the sharding on a mesh."""
    kernels = tpu if target == TPU else gpu
    with pytest.MonkeyPatch.context() as patch, tracing_for(target):
        patch.setattr(kernels, "INTERPRET", True)
        patch.setattr(kernels, "SIZES", (8,))
        yield Partitioner(make_mesh(mesh, mesh.first_of(jax.devices()))).constrain


def check_attention(rng, mask: Mask, allowed, T: int, S: int, cap, shards=None) -> None:
    """Compares attention and its gradients, of the biases too, with those of plain attention."""
    q, wanted = (jnp.asarray(rng.normal(size=(2, T, 4, 16)), jnp.float32) for _ in range(2))
    q *= 0.25
    wanted *= jnp.any(allowed, axis=-1)[:, :, None, None]  # padding attends to nothing, and its output is not used
    k, v = (jnp.asarray(rng.normal(size=(2, S, 2, 16)), jnp.float32) for _ in range(2))
    values = jnp.asarray(rng.normal(size=(4, T + S - 1)), jnp.float32)

    def run(q, k, v, values, mask):
        bias = DiagonalBias(values, T)
        return jnp.sum(dot_product_attention(q, k, v, mask=mask, bias=bias, logit_cap=cap, shards=shards) * wanted)

    def plain(q, k, v, values, mask):
        return jnp.sum(plain_attention(q, k, v, DiagonalBias(values, T), allowed, cap) * wanted)

    expected, got = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2, 3)))(q, k, v, values, mask) for function in (plain, run)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("block", [64, 4])
@pytest.mark.parametrize("causal, cap", [(False, None), (True, 1.5)])
def test_attention_in_blocks_equals_a_plain_softmax(monkeypatch, causal, cap, block):
    """Blocks do not divide the length."""
    monkeypatch.setattr(ops.blocks, "BLOCK", block)
    rng = np.random.default_rng(4)
    T, S = 11, 11 if causal else 13
    segments = [jnp.asarray(np.sort(rng.integers(1, 3, (2, n)), axis=1)) for n in (T, S)]
    mask = Mask(causal, *(segments if not causal else [segments[0]] * 2))
    check_attention(rng, mask, expand_mask(mask, T, S), T, S, cap)


@cases(5, shrink=False)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans(), WINDOWS, st.sampled_from([3, 4, 64]))
def test_attention_in_windows_equals_a_plain_softmax(seed, causal, with_segments, with_prefix, window, block):
    """The layer's kind is a number of its own, or computed."""
    T = 14
    rng = np.random.default_rng(seed)
    mask = draw_mask(seed, T, causal, with_segments, with_prefix, window)
    allowed = allowed_by_loops(mask, T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.blocks, "BLOCK", block)
        check_attention(rng, mask, allowed, T, T, None)
        kinds = dataclasses.replace(mask, windows=(Window(2, 1), window, None), kind=jnp.asarray(1))
        check_attention(rng, kinds, allowed, T, T, None)


@pytest.mark.parametrize("target", [TPU, GPU], ids=["tpu", "gpu"])
@cases(4, shrink=False)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans(), WINDOWS, st.sampled_from([None, 1.5]))
def test_fused_attention_equals_a_plain_softmax(target, seed, causal, with_segments, with_prefix, window, cap):
    """Tiles do not divide the length. The layer's kind is a number of its own, or computed."""
    T = 21
    mask = draw_mask(seed, T, causal, with_segments, with_prefix, window)
    allowed, rng = allowed_by_loops(mask, T), np.random.default_rng(seed)
    with fused_kernels(target) as shards:
        check_attention(rng, mask, allowed, T, T, cap, shards)
        kinds = dataclasses.replace(mask, windows=(window, Window(2, 1)), kind=jnp.asarray(0))
        check_attention(rng, kinds, allowed, T, T, cap, shards)


@pytest.mark.parametrize(
    "target, mesh",
    [(TPU, MeshShape(2, 1, 4)), (TPU, MeshShape(2, 2, 2)), (TPU, MeshShape(2, 1, 1, sequence=4)), (GPU, MeshShape(2, 1, 4))],
)
def test_fused_attention_on_a_mesh_equals_a_plain_softmax(target, mesh):
    """Four query heads on four devices need two heads of keys and values, which are not sharded."""
    rng = np.random.default_rng(8)
    T, S = 11, 19
    segments = [jnp.asarray(np.sort(rng.integers(1, 3, (2, n)), axis=1)) for n in (T, S)]
    with fused_kernels(target, mesh) as shards:
        for mask in (Mask(False, *segments), Mask(False, key_segments=segments[1])):
            check_attention(rng, mask, expand_mask(mask, T, S), T, S, None, shards)


@pytest.mark.parametrize("target", [TPU, GPU], ids=["tpu", "gpu"])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 0.08)])
def test_fused_attention_equals_blocks(target, dtype, tolerance):
    """Compares results and gradients, with dropout, which drops the same weights, and in the dtypes of activations."""
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 21, heads, 16)) / 2, dtype) for heads in (4, 2, 2))
    options = dict(mask=Mask(True), dropout_rate=0.4, dropout_key=jax.random.key(3))
    run = lambda shards: jax.vjp(lambda *x: dot_product_attention(*x, shards=shards, **options), q, k, v)
    results = []
    for context in (contextlib.nullcontext(), fused_kernels(target)):
        with context as shards:
            result, transpose = run(shards)
            results.append((result, transpose(jnp.cos(result))))
    for blocked, fused in zip(*map(jax.tree.leaves, results), strict=True):
        assert blocked.dtype == fused.dtype == dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (blocked, fused)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("target, without, platform, call, kernels", [
    (TPU, Target("tpu", "TPU v3"), "tpu", "tpu_custom_call", 3), (GPU, Target("gpu", "AMD"), "cuda", "xla.gpu.triton", 4),
], ids=["tpu", "gpu"])  # fmt: skip
@pytest.mark.parametrize("length", [300, 4096])
def test_programs_have_kernels_and_no_square_arrays(length, target, without, platform, call, kernels):
    """One kernel in the forward and two or three in the backward pass, also where no such device is."""
    segments, key = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    query, bias = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2 * length - 1), jnp.float32)
    mask = lambda segments: Mask(True, segments, segments, windows=(Window(255, 0),))
    shards = Partitioner(make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])).constrain

    def attend(query, key, value, bias, segments):
        options = dict(mask=mask(segments), bias=DiagonalBias(bias, length), logit_cap=50.0, shards=shards)
        return jnp.sum(dot_product_attention(query, key, value, **options).astype(jnp.float32))

    def lowered(target: Target) -> str:
        function = jax.jit(lambda *operands: jax.grad(attend, argnums=(0, 1, 2, 3))(*operands))
        with tracing_for(target):
            return function.trace(query, key, key, bias, segments).lower(lowering_platforms=(platform,)).as_text()

    text = lowered(target)
    assert text.count(call) == kernels
    assert f"{length}x{length}" not in text
    assert call not in lowered(without)


@pytest.mark.parametrize("block", [64, 4, TPU, GPU], ids=["64", "4", "tpu", "gpu"])
def test_merged_attention_has_one_softmax_over_all_sources(monkeypatch, block):
    """Gradients too; the first source has windows, the second another length, and no keys in one row."""
    is_fused = isinstance(block, Target)
    monkeypatch.setattr(ops.blocks, "BLOCK", 64 if is_fused else block)
    context = fused_kernels(block) if is_fused else contextlib.nullcontext()
    rng = np.random.default_rng(6)
    T, S = 11, 7
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, wanted = draw(2, T, 4, 16) / 4, draw(2, T, 4, 16)
    own, others = (draw(2, T, 2, 16), draw(2, T, 2, 16)), (draw(2, S, 2, 16), draw(2, S, 2, 16))
    segments = jnp.asarray([[1] * 5 + [0] * 2, [0] * 7])
    first, second = Mask(True, windows=(Window(2, 2),)), Mask(False, key_segments=segments)
    bias = DiagonalBias(draw(4, 2 * T - 1), T)
    no_bias = DiagonalBias(jnp.zeros((4, T + S - 1)), T)

    def run(q, own, others, values):
        sources = [(*own, first, DiagonalBias(values, T)), (*others, second, None)]
        return jnp.sum(merged_attention(q, sources, logit_cap=2.0, shards=shards) * wanted)

    def plain(q, own, others, values):
        allowed = [jnp.broadcast_to(expand_mask(mask, T, n), (2, T, n)) for mask, n in ((first, T), (second, S))]
        k, v = (jnp.concatenate(each, axis=1) for each in zip(own, others))
        expand = lambda bias, n: expand_bias(bias, T, n)
        whole_bias = jnp.concatenate([expand(DiagonalBias(values, T), T), expand(no_bias, S)], axis=-1)
        logits = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, axis=2))
        logits = 2.0 * jnp.tanh(logits / 2.0) + whole_bias
        weights = jax.nn.softmax(jnp.where(jnp.concatenate(allowed, axis=-1)[:, None], logits, -1e10))
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, 2, axis=2)) * wanted)

    operands = (q, own, others, bias.values)
    with context as shards:
        expected, got = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*operands) for f in (plain, run))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("causal, window", [(True, Window(511, 511)), (False, Window(512, 512))])
def test_the_cost_of_local_attention_is_linear_in_the_length(causal, window):
    """FLOPs of the forward and backward pass, and temporary memory of the compiled program."""

    def cost(T: int) -> tuple[int, int]:
        mask = Mask(causal, windows=(window,))
        attend = lambda q, k, v: jnp.sum(dot_product_attention(q, k, v, mask=mask))
        function = jax.grad(attend, argnums=(0, 1, 2))
        operands = [jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3
        memory = jax.jit(function).lower(*operands).compile().memory_analysis()
        return traced_flops(function, *operands), memory.temp_size_in_bytes

    short, long = cost(4096), cost(16384)
    assert long[0] == 4 * short[0] and long[1] < 4.1 * short[1]


@pytest.mark.parametrize("target, products", [(Target("cpu", "cpu"), 7), (Target("tpu", "TPU v4"), 9)])
def test_products_of_attention_and_its_gradient_are_counted(target, products):
    """Six of the model, forward and backward, and those that are computed again."""
    T, config = 128, tiny_config("causal_decoder", head_dim=64)
    operands = [jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)] * 3
    shards = Partitioner(make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])).constrain
    attend = lambda *operands: jnp.sum(dot_product_attention(*operands, mask=Mask(causal=True), shards=shards) ** 2)
    with tracing_for(target):
        assert traced_flops(jax.grad(attend, argnums=(0, 1, 2)), *operands) == products * 2 * T * T * 64
        heads = config.num_heads * config.num_decoder_layers
        assert config.recomputed_flops(0, T) == (products - 6) * 2 * T * T * 64 * heads


def test_dropout_shares_its_mask_along_the_length_and_keeps_the_mean():
    x = jnp.ones((64, 10, 200))
    y = dropout(x, 0.3, jax.random.key(0))
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:, :1], y.shape))
    assert abs(float(y.mean()) - 1.0) < 0.02
    assert set(np.unique(y.round(4))) == {0.0, np.float32(1 / 0.7).round(4)}
    assert dropout(x, 0.3, None) is x


@pytest.mark.parametrize("causal", [True, False])
def test_all_queries_of_a_long_text_share_the_dropout_of_attention(causal):
    """Checks that the mask has no axis of queries, as in T5X. Values are one-hot, so that outputs show which weights pass."""
    T = 600
    query, key = 0.05 * jax.random.normal(jax.random.key(0), (2, 1, T, 2, T))
    value = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 2, T))
    options = dict(mask=Mask(causal), dropout_rate=0.5, dropout_key=jax.random.key(1))
    passed = np.asarray(dot_product_attention(query, key, value, **options))[0] > 0  # [T, N, S]
    for head in range(2):
        mask = passed[-1, head]
        assert 0.4 < mask.mean() < 0.6
        for position in range(T):
            visible = position + 1 if causal else T
            assert np.array_equal(passed[position, head, :visible], mask[:visible]), position
    assert not np.array_equal(passed[-1, 0], passed[-1, 1])


@given(texts=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=5), size=st.integers(1, 4))
@cases(40)
def test_blocks_of_tokens_one_token_at_a_time(texts, size):
    """Texts of consecutive tokens, some followed by padding; the rest of a text belongs to its last whole block."""
    T = 30
    segments, blocks, of_text = np.zeros((1, T), np.int32), np.full((1, T), -1), []
    start = 0
    for number, (is_padded, length) in enumerate(texts, 1):
        stop = min(start + length, T)
        segments[0, start:stop] = number
        first, whole = len(of_text), (stop - start) // size
        of_text += [number] * whole
        for t in range(start, stop) if whole else ():
            blocks[0, t] = first + min((t - start) // size, whole - 1)
        start = stop + (2 if is_padded else 0)
    actual = make_token_blocks(jnp.asarray(segments), size)
    np.testing.assert_array_equal(actual.block_BT, blocks)
    np.testing.assert_array_equal(actual.segments_BG[0], of_text + [0] * (T // size - len(of_text)))
    x = np.random.default_rng(0).normal(size=(1, T, 3)).astype(np.float32)
    expected = [x[0, blocks[0] == g].sum(0) for g in range(T // size)]
    np.testing.assert_allclose(actual.sum_tokens(x)[0], np.asarray(expected), atol=1e-5)
