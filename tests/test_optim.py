"""Adafactor against its published formulas, layer by layer; schedules against theirs; AdamW's decay mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import random_params, tiny_model
from optax import contrib

from t5x_lab.config.errors import UserError
from t5x_lab.optim.adafactor import factoring
from t5x_lab.optim.counts import start_count_at, updates
from t5x_lab.optim.groups import Groups, current_rates, flat_names
from t5x_lab.optim.optimizers import Adafactor, AdamW, Lion, Muon, Optax, ScheduleFreeAdamW, Sgd, gradient_point
from t5x_lab.optim.schedules import CosineDecay, LearningRate, LinearDecay, WarmupStableDecay
from t5x_lab.optim.unfreezing import GradualUnfreezing

AXES = {
    "matrix": ("layers", "embed", "mlp"),
    "heads": ("layers", "embed", "heads", "kv"),
    "out": ("layers", "heads", "kv", "embed"),
    "table": ("vocab", "embed"),
    "scale": ("layers", "embed"),
    "relpos": ("layers", "heads", "relpos_buckets"),
    "small": ("layers", "embed", "mlp"),
}
SHAPES = {
    "matrix": (3, 16, 24), "heads": (3, 16, 4, 5), "out": (3, 4, 5, 16), "table": (40, 16),
    "scale": (3, 16), "relpos": (3, 4, 32), "small": (3, 16, 8),
}  # fmt: skip


def reference_step(x, g, state, t, rate, min_dim, rows, columns):
    """One Adafactor step of one layer in float64, from algorithms 4 to 6 of Shazeer & Stern (2018); state is (R, C) or V."""
    beta = 1 - t**-0.8
    square = g**2 + 1e-30
    if rows is not None:
        g2 = np.transpose(square, rows + columns).reshape(np.prod([x.shape[i] for i in rows]), -1)
        R = beta * state[0] + (1 - beta) * g2.sum(1)
        C = beta * state[1] + (1 - beta) * g2.sum(0)
        V = np.outer(R, C) / R.sum()
        V = np.transpose(V.reshape([x.shape[i] for i in rows + columns]), np.argsort(rows + columns))
        state = (R, C)
    else:
        V = state = beta * state + (1 - beta) * square
    u = g / np.sqrt(V)
    u /= max(1.0, np.sqrt(np.mean(u**2)) / 1.0)
    return x - rate * max(1e-3, np.sqrt(np.mean(x**2))) * u, state


def test_stacked_adafactor_equals_the_published_formulas_layer_by_layer_for_50_steps():
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in SHAPES.items()}
    factored = {"matrix": ((0,), (1,)), "heads": ((0,), (1, 2)), "out": ((2,), (0, 1)), "table": ((1,), (0,))}
    stacked = {name: jnp.asarray(x) for name, x in params.items()}
    reference, states = {}, {}
    for name, x in params.items():
        for layer, part in enumerate(x if AXES[name][0] == "layers" else [x]):
            reference[name, layer] = part.astype(np.float64)
            if name in factored:
                rows, columns = factored[name]
                states[name, layer] = tuple(np.zeros(int(np.prod([part.shape[i] for i in dims]))) for dims in (rows, columns))
            else:
                states[name, layer] = np.zeros(part.shape)
    rate = LearningRate("constant * rsqrt_decay", 1.0, warmup_steps=10)
    optimizer = Adafactor(rate, min_dim_size_to_factor=12).make(AXES)
    state = optimizer.init(stacked)
    update = jax.jit(optimizer.update)
    for t in range(1, 51):
        grads = {name: (rng.normal(size=shape) * rng.uniform(0.1, 10)).astype(np.float32) for name, shape in SHAPES.items()}
        updates, state = update(grads, state, stacked)
        stacked = optax.apply_updates(stacked, updates)
        for (name, layer), x in reference.items():
            g = grads[name][layer] if AXES[name][0] == "layers" else grads[name]
            rows, columns = factored.get(name, (None, None))
            reference[name, layer], states[name, layer] = reference_step(
                x, g.astype(np.float64), states[name, layer], float(t), 1 / np.sqrt(max(t - 1, 10)), 12, rows, columns
            )
    for (name, layer), x in reference.items():
        got = stacked[name][layer] if AXES[name][0] == "layers" else stacked[name]
        np.testing.assert_allclose(got, x, rtol=2e-4, atol=2e-5, err_msg=f"{name} {layer}")


def test_adafactor_clips_the_gradient_and_decays_by_a_power_of_the_rate():
    """Weight decay of T5X's is no part of the step that the rate multiplies; its exponent multiplies it by rate**exponent."""
    rng, shapes = np.random.default_rng(3), {name: SHAPES[name] for name in ("matrix", "small")}
    params, grads = (
        {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()} for _ in range(2)
    )
    rate = LearningRate("constant", 0.5)

    def step(scale=1.0, **settings):
        optimizer = Adafactor(rate, clipping_threshold=None, min_dim_size_to_factor=12, **settings).make(
            {name: AXES[name] for name in shapes}
        )
        first = optimizer.update(jax.tree.map(lambda g: g * 0.01, grads), optimizer.init(params), params)
        return optimizer.update(jax.tree.map(lambda g: g * scale, grads), first[1], params)[0]

    norm = float(optax.tree.norm(grads))
    close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))
    close(step(clip_global_norm=norm / 4), step(scale=0.25))
    close(step(clip_global_norm=norm * 4), step())
    plain = step()
    for settings, decay in (
        (dict(weight_decay_lr_exponent=2.0), 0.25),
        (dict(weight_decay=0.1, weight_decay_lr_exponent=1.0), 0.05),
    ):
        close(step(**settings), jax.tree.map(lambda u, p: u - decay * p, plain, params))


def test_adafactors_step_offset_is_t5xs():
    """T5X subtracts it from the step in the decay of the second moment; its schedule does not know it."""
    params, base = {"small": jnp.ones((1, 2, 3))}, jnp.arange(1.0, 7.0).reshape(1, 2, 3)
    rate = lambda step: jax.lax.rsqrt(jnp.maximum(step, 10_000).astype(jnp.float32))
    changes = {}
    for first, offset in ((0, 0), (1_000_000, 1_000_000), (1_000_000, 0)):
        transformation = Adafactor(rate, step_offset=offset).make({"small": AXES["small"]})
        state = start_count_at(transformation.init(params), jnp.int32(first))
        for power in (-1, 2, 1):
            updates_, state = transformation.update({"small": base**power}, state, params)
        changes[first, offset] = np.asarray(updates_["small"]) / float(rate(jnp.int32(first + 2)))
    np.testing.assert_allclose(changes[1_000_000, 1_000_000], changes[0, 0], rtol=1e-5)
    assert not np.allclose(changes[1_000_000, 0], changes[0, 0], rtol=1e-2)
    assert float(rate(jnp.int32(1_000_000))) == pytest.approx(0.001)


def test_what_is_factored():
    assert factoring(("layers", "embed", "heads", "kv"), (2, 128, 2, 64), 128).columns == (2, 3)
    assert factoring(("layers", "embed", "heads", "kv"), (2, 128, 1, 64), 128).columns == ()
    assert factoring(("layers", "heads", "relpos_buckets"), (2, 128, 128), 1).rows == ()
    assert factoring(("layers", "embed"), (2, 128), 1).averaged == (1,)
    for axes in (("layers", "wings", None, "tails"), ("layers", None, None, None)):  # a user's own names, or none
        assert factoring(axes, (2, 8, 2, 4), 8) == factoring(("layers", "embed", "heads", "kv"), (2, 8, 2, 4), 8)
    assert factoring((None,), (300,), 1).rows == ()


def test_the_second_moment_of_a_large_matrix_takes_rows_plus_columns():
    params = {"w": jnp.zeros((4, 256, 512))}
    state = Adafactor().make({"w": ("layers", "embed", "mlp")}).init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 4 * (256 + 512) + 10


@pytest.mark.parametrize(
    "factors, expected",
    [
        ("constant * rsqrt_decay", lambda n: 2.0 / np.sqrt(max(n, 100))),
        (
            "constant * linear_warmup * rsqrt_normalized_decay",
            lambda n: 2 * min(1, n / 100) * np.sqrt(100) / np.sqrt(max(n, 100)),
        ),
        ("constant * decay_every", lambda n: 2 * 0.5 ** (n // 300)),
        ("constant * cosine_decay", lambda n: max(1e-8, 2 * (1 + np.cos(np.pi * (max(0, (n - 100) / 1000) % 1))) / 2)),
        ("linear_decay", lambda n: max(1e-8, 2 * min(n / 100, 1 + 0.5 * (100 - n)))),
    ],
)
def test_schedules_follow_their_formulas(factors, expected):
    schedule = LearningRate(factors, 2.0, 100, decay_factor=0.5, steps_per_decay=300, steps_per_cycle=1000)
    for n in (0, 1, 50, 99, 100, 101, 500, 1000, 5000):
        assert float(schedule(n)) == pytest.approx(max(expected(n), 1e-8), rel=1e-5, abs=1e-8)
        assert float(dataclasses.replace(schedule, step_offset=70)(n + 70)) == float(schedule(n))
    assert float(dataclasses.replace(schedule, step_offset=70)(60)) == float(schedule(0)), "and before it, as at it"


def test_t5s_pretraining_rate():
    schedule = LearningRate()
    assert float(schedule(0)) == pytest.approx(0.01)
    assert float(schedule(131_072)) == pytest.approx(0.00276, abs=5e-6)  # Wang et al. (2022), Table 2


@pytest.mark.parametrize(
    "network, kind", [("gpt1", AdamW), ("lstm", AdamW), ("gpt1", Lion), ("gpt1", Muon), ("gpt1", ScheduleFreeAdamW)]
)
def test_biases_do_not_decay_however_many_axes_they_have(network, kind):
    model = tiny_model(network)
    optimizer = kind(LearningRate("constant", 0.1), weight_decay=0.5).make(model.axes)
    params = jax.tree.map(jnp.ones_like, random_params(model))
    step = jax.jit(lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0])
    for name, update in flat_names(step(params)).items():
        by_adam = kind is Muon and ("embed" in name or "logits" in name)  # which decays nothing there
        expected = 0.0 if name.endswith(("bias", "scale")) or by_adam else -0.05
        np.testing.assert_allclose(update, expected, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", [AdamW, Adafactor, Lion, Muon, ScheduleFreeAdamW, Sgd])
def test_rates_are_told_of_the_optimizers_own_step(kind):
    """The optimizer's step differs from the run's if its state comes from another run."""
    rate = LinearDecay(1.0, 100)
    params, axes = {"a": jnp.ones((3, 4)), "b": jnp.ones((3,))}, {"a": ("embed", "mlp"), "b": ("embed",)}
    groups = Groups((("a", kind(rate)), ("b", kind(LinearDecay(2.0, 100)))))
    for optimizer, expected in ((kind(rate), [0.97]), (groups, [0.97, 0.97, 1.94])):
        transformation = optimizer.make(axes)
        state = transformation.init(params)
        for _ in range(3):
            _, state = transformation.update(params, state, params)
        np.testing.assert_allclose(list(current_rates(optimizer, state, jnp.int32(0)).values()), expected, rtol=1e-6)


def test_the_schedule_of_injected_hyperparameters_goes_on_where_the_step_is_carried():
    transformation = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 100))
    params = {"a": jnp.ones(3)}
    state = start_count_at(transformation.init(params), jnp.int32(60))
    assert updates(state, jnp.int32(0)) == 60
    moved, state = transformation.update(params, state, params)
    np.testing.assert_allclose(moved["a"], [-0.4] * 3, rtol=1e-6)
    assert updates(state, jnp.int32(0)) == 61


N, W, END, DECAY = 1000, 100, 0.1, 200  # total steps, warm-up, floor, decay


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (LinearDecay(2.0, N, W), lambda n: max(0.0, 2 * (N - n) / (N - W))),
        (LinearDecay(2.0, N, W, END), lambda n: max(END, END + (2 - END) * (N - n) / (N - W))),
        (CosineDecay(2.0, N, W, END), lambda n: END + (2 - END) * (1 + np.cos(np.pi * min(1, (n - W) / (N - W)))) / 2),
        (WarmupStableDecay(2.0, N, W, END, decay_steps=DECAY), lambda n: END + (2 - END) * np.clip((N - n) / DECAY, 0, 1)),
        (
            WarmupStableDecay(2.0, N, W, decay_steps=DECAY, decay="sqrt"),
            lambda n: 2 * (1 - np.sqrt(np.clip((n - N + DECAY) / DECAY, 0, 1))),
        ),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) or hasattr(value, "peak") else "",
)
def test_shapes_over_a_known_length(schedule, expected):
    """At the ends, in the middle, and long after the end, where a cosine does not rise again."""
    for n in (0, 1, 50, 99, 100, 101, 550, 799, 800, 801, 900, 999, 1000, 1001, 1900, 5000):
        right = 2 * n / W if n < W else expected(n)
        assert float(schedule(n)) == pytest.approx(right, rel=1e-5, abs=1e-6), n
        assert float(dataclasses.replace(schedule, step_offset=70)(n + 70)) == float(schedule(n))
    assert float(dataclasses.replace(schedule, warmup_steps=0)(0)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: LinearDecay(1.0, 10, 10), "LinearDecay.warmup_steps is 10. It must be at least 0 and below total_steps"),
        (lambda: CosineDecay(1.0, 10, floor=-1.0), "CosineDecay.floor is -1.0"),
        (lambda: WarmupStableDecay(1.0, 10, 5, decay_steps=6), "are 5 and 6. Their sum must not exceed total_steps"),
        (lambda: WarmupStableDecay(1.0, 10, decay_steps=5, decay="cosin"), "Choose one of: linear, sqrt"),
    ],
)
def test_schedules_that_cannot_be(make, says):
    with pytest.raises(UserError, match=says):
        make()


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in SHAPES.items()}


def updated(transformation, params, steps=4):
    """Parameters after a few steps with random gradients."""
    state = transformation.init(params)
    for step in range(steps):
        updates, state = jax.jit(transformation.update)(random_tree(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


MATRICES = {name: len(set(axes) - {"layers"}) > 1 for name, axes in AXES.items()}
RATE = LinearDecay(0.1, 10, 2)


@pytest.mark.parametrize(
    "optimizer, optax_optimizer",
    [
        (Lion(RATE, clip_global_norm=None), optax.lion(RATE, mask=MATRICES)),
        (Lion(RATE, 0.8, 0.9, 0.5), optax.chain(optax.clip_by_global_norm(1.0), optax.lion(RATE, 0.8, 0.9, weight_decay=0.5, mask=MATRICES))),
        (Sgd(RATE), optax.sgd(RATE)),
        (Sgd(RATE, 0.9, True, 2.0), optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(RATE, 0.9, True))),
        (Sgd(RATE, clip_value=0.1), optax.chain(optax.clip(0.1), optax.sgd(RATE))),
        (AdamW(RATE, clip_global_norm=None), optax.adamw(RATE, weight_decay=0.01, mask=MATRICES)),
        (Optax(optax.rmsprop(0.1), RATE), optax.rmsprop(0.1)),
    ],
    ids=["lion", "lion_clipped", "sgd", "sgd_momentum", "sgd_clipped", "adamw", "any"],
)  # fmt: skip
def test_optaxs_own_updates(optimizer, optax_optimizer):
    params = random_tree(0)
    jax.tree.map(np.testing.assert_array_equal, updated(optimizer.make(AXES), params), updated(optax_optimizer, params))


@pytest.mark.slow
def test_muon_orthogonalises_each_layers_matrix_as_if_it_stood_alone():
    """Against optax's Muon on every layer's matrix by itself, two-dimensional, heads joined; all else against its Adam."""
    as_matrix = {"matrix": (16, 24), "heads": (16, 20), "out": (20, 16), "small": (16, 8)}
    got = updated(Muon(RATE, weight_decay=0.1, clip_global_norm=None).make(AXES), random_tree(0))
    plain = contrib.muon(RATE, weight_decay=0.1, consistent_rms=0.2)
    for name, shape in SHAPES.items():
        part = lambda x, layer, shape=as_matrix.get(name): x[layer].reshape(shape) if shape else x
        for layer in range(shape[0]) if name in as_matrix else [0]:
            x = part(random_tree(0)[name], layer)
            transformation = plain if name in as_matrix else optax.adamw(RATE, nesterov=True, weight_decay=0.0)
            state = transformation.init(x)
            for step in range(4):
                updates, state = transformation.update(part(random_tree(step + 1)[name], layer), state, x)
                x = x + updates
            np.testing.assert_allclose(part(got[name], layer), x, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("optimizer", [Adafactor(momentum=0.9), AdamW(), Lion(RATE)], ids=lambda kind: type(kind).__name__)
def test_a_momentum_in_half_the_memory_moves_parameters_alike(optimizer):
    def run(optimizer):
        transformation, params = optimizer.make(AXES), random_tree(0)
        state = transformation.init(params)
        for step in range(4):
            updates, state = transformation.update(random_tree(step + 1), state, params)
        return updates, state

    updates, state = run(optimizer)
    halved, small = run(dataclasses.replace(optimizer, momentum_dtype="bfloat16"))
    is_close = lambda a, b: np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)
    if not isinstance(optimizer, Lion):  # whose updates are signs
        assert all(jax.tree.leaves(jax.tree.map(is_close, updates, halved)))
    num_bytes = lambda state: sum(x.nbytes for x in jax.tree.leaves(state))
    assert num_bytes(state) - num_bytes(small) == 2 * sum(x.size for x in random_tree(0).values())
    with pytest.raises(UserError, match="momentum_dtype"):
        dataclasses.replace(optimizer, momentum_dtype="float16")


def test_schedule_free_steps_follow_the_papers_formulas():
    """Defazio et al. 2024, Algorithm 1, in NumPy, alone and as one of two groups."""
    rate, b1, b2, decay = 0.1, 0.8, 0.9, 0.05
    free = ScheduleFreeAdamW(LearningRate("constant", rate), b1, b2, weight_decay=decay, clip_global_norm=None)
    target, axes = np.arange(6.0).reshape(2, 3) - 2.2, {"a": ("embed", "mlp"), "b": ("embed", "mlp")}
    gradient = lambda y: 2 * (y - target)
    x, z, v = np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3))
    for t in range(1, 6):
        y = (1 - b1) * z + b1 * x
        v = b2 * v + (1 - b2) * gradient(y) ** 2
        z = z - rate * (gradient(y) / (np.sqrt(v / (1 - b2**t)) + 1e-8) + decay * y)
        x = (1 - 1 / t) * x + z / t
    for optimizer in (free, Groups((("a", free), ("b", Sgd(LearningRate("constant", 0.1)))))):
        transformation, params = optimizer.make(axes), {name: jnp.ones((2, 3)) for name in axes}
        state = transformation.init(params)
        for _ in range(5):
            gradients = jax.tree.map(gradient, gradient_point(optimizer, state, params))
            updates, state = transformation.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["a"], x, rtol=1e-5)
    with pytest.raises(UserError, match="whose steps are averaged"):
        GradualUnfreezing(free, 10)


def test_mistakes_are_sentences():
    with pytest.raises(UserError, match='Did you mean "rsqrt_decay"'):
        LearningRate("constant * rsqrt_deca")
    with pytest.raises(UserError, match="decay_rate is 2.0"):
        Adafactor(decay_rate=2.0)
