"""The step and the loop: meshes, microbatches, normalisers, counters, and what happens when something goes wrong."""

import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import ROOT
from helpers import exhaustive, random_batch, random_params, tiny_config

from t5x_lab.checkpoints.layout import named_leaves
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.loss import weights_and_normalizer
from t5x_lab.optim.optimizers import Adafactor, AdamW, Lion, Muon, Optax, ScheduleFreeAdamW, Sgd
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.training.batches import SyntheticBatches
from t5x_lab.training.loop import Action, Budget, Diverged, Preempted, train
from t5x_lab.training.state import add_to_counter, read_counter

RATE = LearningRate("constant", 0.01)


def run_steps(
    mesh, architecture="encoder_decoder", steps=3, microbatches=1, optimizer=None, factor="NUM_REAL_TARGET_TOKENS", **changes
):
    """Losses and final parameters of a few steps on random batches."""
    sharded = ShardedModel(
        ModelConfig(tiny_config(architecture, **changes), loss_normalizing_factor=factor),
        mesh,
        mesh.first_of(jax.devices()),
    )
    optimizer = optimizer or Adafactor(RATE, min_dim_size_to_factor=8)
    training = assemble(sharded, optimizer, batch_size=8, microbatches=microbatches, seed=0)
    state = training.init_state(jax.device_put(random_params(sharded.model), sharded.param_shardings))
    losses = []
    for step in range(steps):
        state, metrics = training.step(state, sharded.shard_batch(random_batch(architecture, rows=8, seed=step)))
        losses.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return np.array(losses), jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["encoder_decoder", *map(exhaustive, ("prefix_decoder", "local", "merged", "unbalanced"))]
)
def test_every_mesh_trains_like_one_device(architecture):
    losses, state = run_steps(MeshShape(1, 1, 1), architecture, steps=2, num_heads=8)
    presets = [GinConfig([f"meshes/{file.name}"]).mesh() for file in (ROOT / "gin" / "meshes").iterdir()]
    assert len(presets) >= 3
    meshes = (*presets, MeshShape(1, 1, 8), MeshShape(2, 2, 2), MeshShape(1, 2, 2, replica=2), MeshShape(1, 1, 1, sequence=8))
    for mesh in meshes if architecture == "prefix_decoder" else [MeshShape(2, 2, 2)]:
        other_losses, other = run_steps(mesh, architecture, steps=2, num_heads=8)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5, err_msg=str(mesh))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(mesh)), other, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [Lion(RATE), Sgd(RATE, 0.9), Muon(RATE), ScheduleFreeAdamW(RATE)], ids=lambda kind: type(kind).__name__
)
def test_optaxs_optimizers_train_alike_on_a_mesh(optimizer):
    """Their slots are split as the parameters are."""
    single_device = run_steps(MeshShape(1, 1, 1), "causal_decoder", optimizer=optimizer)
    eight = run_steps(MeshShape(2, 2, 2), "causal_decoder", optimizer=optimizer)
    np.testing.assert_allclose(eight[0], single_device[0], rtol=1e-3)
    sharded = ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(2, 2, 2))
    abstract = assemble(sharded, optimizer, batch_size=8, microbatches=1, seed=0).abstract_state
    kernel = abstract.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    slots = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.opt_state) if "wi_0" in str(path)]
    assert slots and all(slot.sharding == kernel.sharding for slot in slots if slot.shape == kernel.shape)


@pytest.mark.slow
def test_the_gradient_of_schedule_free_training_is_at_its_point():
    """Compares with optax's own, whose parameters are that point: the losses, and the average that it evaluates."""
    plain = optax.contrib.schedule_free(optax.adamw(RATE, 0.0, weight_decay=0.0), RATE, b1=0.9)
    options = dict(weight_decay=0.0, clip_global_norm=None)
    run = lambda optimizer: run_steps(MeshShape(1, 1, 1), "causal_decoder", optimizer=optimizer)
    (losses, state), (expected_losses, point) = run(ScheduleFreeAdamW(RATE, **options)), run(Optax(plain, RATE))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    expected = optax.contrib.schedule_free_eval_params(point.opt_state, point.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected)


@pytest.mark.slow
def test_a_mesh_really_splits_parameters_optimizer_and_batch():
    sharded = ShardedModel(ModelConfig(tiny_config("encoder_decoder")), MeshShape(2, 2, 2))
    training = assemble(sharded, Adafactor(RATE, min_dim_size_to_factor=8), batch_size=8, microbatches=1, seed=0)
    state = training.init_state(sharded.init_params(0))
    wi = state.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    assert wi.addressable_shards[0].data.shape == (3, 16 // 2, 32 // 2)
    row = state.opt_state.v_row["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    assert row.shape == (3, 16, 1) and row.addressable_shards[0].data.shape == (3, 8, 1)
    batch = sharded.shard_batch(random_batch("encoder_decoder", rows=8))
    assert batch["encoder_input_tokens"].addressable_shards[0].data.shape[0] == 2
    compiled = training.step.lower(state, batch).compile().as_text()
    assert "all-reduce" in compiled or "reduce-scatter" in compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "mesh"),
    [
        ("NUM_REAL_TARGET_TOKENS", MeshShape(2, 1, 1)),
        ("NUM_REAL_TARGET_TOKENS", MeshShape(1, 1, 2, replica=2)),  # each slice sums its own rows
        ("AVERAGE_PER_SEQUENCE", MeshShape(2, 1, 1)),
        (None, MeshShape(2, 1, 1)),
    ],
    ids=str,
)
def test_loss_and_gradient_do_not_depend_on_the_number_of_microbatches(factor, mesh):
    # A large epsilon: Adam's own would blow rounding up to a whole step where a gradient is zero.
    undivided, four = (
        run_steps(
            mesh,
            "prefix_decoder",
            microbatches=n,
            factor=factor,
            optimizer=AdamW(RATE, epsilon=1e-2, clip_global_norm=None),
        )
        for n in (1, 4)
    )
    np.testing.assert_allclose(undivided[0], four[0], rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), undivided[1].params, four[1].params)


def zipf_batch(architecture: str, rows: int, length: int) -> dict:
    """Text's frequencies: a third of the tokens are one word."""
    rng = np.random.default_rng(0)
    batch = random_batch(architecture, rows, length)
    frequencies = 1 / np.arange(1.0, 64.0)
    for name in batch:
        if name.endswith("target_tokens") or name.startswith("encoder_input"):
            batch[name] = rng.choice(np.arange(1, 64), batch[name].shape, p=frequencies / frequencies.sum()).astype(np.int32)
    return {**batch, "decoder_input_tokens": np.pad(batch["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [exhaustive("encoder_decoder"), "gpt1", "lstm"])
def test_gradients_in_bfloat16_are_within_a_hundredth_of_those_in_float32(name):
    """Parameters' gradients are sums over all tokens; in bfloat16, a row of the table that is met 4,000 times loses a third."""
    batch = zipf_batch(name, rows=128, length=32)

    changes = {"num_decoder_layers": 1} if name == "gpt1" else {}

    def gradients(dtype, mesh=MeshShape(1, 1, 1), microbatches=1):
        sharded = ShardedModel(
            ModelConfig(tiny_config(name, dtype=dtype, **changes)), mesh, jax.devices()[: mesh.data * mesh.fsdp]
        )
        optimizer = Optax(optax.trace(0.0), RATE)  # whose state is the gradient
        training = assemble(sharded, optimizer, batch_size=128, microbatches=microbatches, seed=0)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), random_params(sharded.model))
        state = training.init_state(jax.device_put(params, sharded.param_shardings))
        return named_leaves(jax.device_get(training.step(state, sharded.shard_batch(batch))[0].opt_state.trace))

    exact = gradients("float32")
    on_mesh, in_parts = {"mesh": MeshShape(2, 4, 1)}, {"microbatches": 4}
    for options in ({}, on_mesh, in_parts, {**on_mesh, **in_parts}) if name == "encoder_decoder" else ({},):
        for path, gradient in gradients("bfloat16", **options).items():
            if path.endswith("key/bias"):
                continue  # it moves all logits of a query alike: the gradient is zero
            error = np.linalg.norm(gradient - exact[path]) / np.linalg.norm(exact[path])
            assert error < 0.01, f"{path} {options}: {error:.4f}"


def test_normalisers():
    batch = {
        "decoder_target_tokens": jnp.array([[5, 6, 7, 8], [9, 9, 0, 0]]),
        "decoder_segment_ids": jnp.array([[1, 1, 1, 2], [1, 1, 0, 0]]),
    }
    assert weights_and_normalizer(batch, None)[1] == 1
    assert weights_and_normalizer(batch, "NUM_REAL_TARGET_TOKENS")[1] == 6
    assert weights_and_normalizer(batch, "NUM_TOTAL_TARGET_TOKENS")[1] == 8
    assert weights_and_normalizer(batch, 233472)[1] == 233472
    weights, factor = weights_and_normalizer(batch, "AVERAGE_PER_SEQUENCE")
    np.testing.assert_allclose(weights, [[1 / 3, 1 / 3, 1 / 3, 1], [0.5, 0.5, 0, 0]], rtol=1e-6)
    assert factor == 3
    tokens, weights = jnp.array([[5, 6, 7, 8, 0]]), jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    batch = {"decoder_target_tokens": tokens, "decoder_loss_weights": weights}
    assert weights_and_normalizer(batch, "NUM_REAL_TARGET_TOKENS")[1] == 15  # the sum of the weights, as in T5X
    packed = {**batch, "decoder_segment_ids": jnp.array([[1, 2, 2, 3, 0]])}
    weights, factor = weights_and_normalizer(packed, "AVERAGE_PER_SEQUENCE")
    np.testing.assert_allclose(weights, [[1, 0.4, 0.6, 1, 0]], rtol=1e-6)
    assert factor == 3
    numbered = {**batch, "decoder_segment_ids": jnp.array([[7, 900, 900, 2, 0]])}  # as somebody else's converter may
    np.testing.assert_array_equal(weights_and_normalizer(numbered, "AVERAGE_PER_SEQUENCE")[0], weights)
    weights, factor = weights_and_normalizer(batch, "AVERAGE_PER_SEQUENCE")
    np.testing.assert_allclose(weights, [[0.1, 0.2, 0.3, 0.4, 0]], rtol=1e-6)
    assert factor == 1
    program = jax.make_jaxpr(lambda batch: weights_and_normalizer(batch, "AVERAGE_PER_SEQUENCE"))(packed)
    assert "[1,5,5]" not in str(program)


@pytest.mark.slow
def test_dropout_follows_the_seed_and_the_step_and_not_the_mesh():
    run = lambda mesh, **changes: run_steps(mesh, "prefix_decoder", steps=2, **changes)[0]
    once, again = (run(MeshShape(1, 1, 1), dropout_rate=0.2) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    np.testing.assert_allclose(run(MeshShape(2, 2, 2), dropout_rate=0.2), once, rtol=1e-5)
    slices = run(MeshShape(1, 2, 2, replica=2), dropout_rate=0.2)  # each draws its own
    assert not np.allclose(slices, once, rtol=1e-5) and np.allclose(slices[:, 0], once[:, 0], rtol=0.05)
    assert not np.allclose(run(MeshShape(1, 1, 1)), once)


@pytest.mark.slow
def test_microbatches_drop_different_activations():
    """Two equal rows, one a microbatch: with one mask for both their loss would be the one row's."""
    sharded = ShardedModel(ModelConfig(tiny_config("causal_decoder", dropout_rate=0.3)), MeshShape(1, 1, 1), jax.devices()[:1])
    losses = []
    for rows in (1, 2):
        training = assemble(sharded, AdamW(RATE), batch_size=rows, microbatches=rows, seed=0)
        state = training.init_state(jax.device_put(random_params(sharded.model), sharded.param_shardings))
        batch = {name: np.repeat(x, rows, 0) for name, x in random_batch("causal_decoder", rows=1).items()}
        losses.append(training.step(state, sharded.shard_batch(batch))[1]["loss"].item())
    assert abs(losses[0] - losses[1]) > 1e-3


def test_counters_carry_beyond_32_bits():
    counter = jnp.array([0, 2**32 - 3], jnp.uint32)
    counter = add_to_counter(add_to_counter(counter, jnp.int32(10)), jnp.int32(1))
    assert read_counter(counter) == 2**32 + 8


@pytest.mark.slow
def test_token_counts_leave_padding_out():
    _, state = run_steps(MeshShape(1, 1, 1), steps=2)
    batches = [random_batch("encoder_decoder", rows=8, seed=s) for s in range(2)]
    processed = sum(int((b["encoder_input_tokens"] > 0).sum() + (b["decoder_target_tokens"] > 0).sum()) for b in batches)
    assert read_counter(state.counters["tokens_processed"]) == processed
    assert read_counter(state.counters["tokens_with_loss"]) == sum(int(b["decoder_loss_weights"].sum()) for b in batches)


class Recorder:
    """A loop with a tiny causal decoder on synthetic batches."""

    def __init__(self, optimizer=None, **options):
        sharded = ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(1, 1, 1), jax.devices()[:1])
        self.training = assemble(sharded, optimizer or Adafactor(RATE), batch_size=4, microbatches=1, seed=0, **options)
        self.state = self.training.init_state(sharded.init_params(0))
        self.lines, self.saved = [], []
        self.batches = SyntheticBatches({"targets": 8}, 4, 64)

    def run(self, total, actions=(), step=None, period=4, **options):
        save = Action(
            lambda n, state: self.saved.append((n, int(state.step), jax.device_get(state.params))),
            lambda step: step % period == 0,
            at_stop=True,
        )
        return train(
            self.state, self.batches, step or self.training.step, shard_batch=self.training.sharded.shard_batch, budget=Budget(total),
            record=lambda n, metrics: self.lines.append((n, metrics)), actions=[save, *actions], **options,
        )  # fmt: skip


@pytest.mark.slow
def test_the_loop_records_every_step_once_and_saves_when_due_and_at_the_end():
    recorder = Recorder()
    state = recorder.run(10)
    assert [n for n, _ in recorder.lines] == list(range(1, 11))
    assert [n for n, *_ in recorder.saved] == [4, 8, 10] and int(state.step) == 10
    assert all(n == step for n, step, _ in recorder.saved)
    assert {
        "loss",
        "accuracy",
        "learning_rate",
        "grad_norm",
        "seconds_per_step",
        "tokens_per_second",
        "data_wait_fraction",
    } <= set(recorder.lines[0][1])


@pytest.mark.parametrize("period", [4, 5, 6])
def test_a_step_that_is_not_finite_keeps_the_last_good_state(period):
    """Whether or not the step before it is saved already, or it is one that is saved itself: its batch is not read again."""
    recorder = Recorder()
    before = []

    def poisoned(state, batch):
        if int(state.step) == 5:
            before.append(jax.device_get(state.params))
            state = jax.tree.map(lambda x: x, state)
            batch = {**batch, "decoder_loss_weights": batch["decoder_loss_weights"] * jnp.nan}
        return recorder.training.step(state, batch)

    with pytest.raises(Diverged, match="step 6 had loss nan"):
        recorder.run(20, step=poisoned, period=period)
    step, state_step, params = recorder.saved[-1]
    assert step == state_step == recorder.batches.position == (6 if period == 6 else 7)
    jax.tree.map(np.testing.assert_array_equal, params, before[0])


def test_the_parts_of_the_time_to_the_first_step_are_logged():
    messages = []
    Recorder().run(2, log=messages.append)
    (line,) = [message for message in messages if message.startswith("The first step was done after")]
    total, *parts = map(float, re.findall(r"([\d.]+) s\b", line))
    assert abs(total - sum(parts)) <= 0.05 * (1 + len(parts)) + 1e-9
    assert re.findall(r"(?:: |, )([a-z ]+) [\d.]+ s", line) == ["hooks", "first batch", "compilation", "step"]


@pytest.mark.parametrize("poisoned", [[3, 4, 7], [3, 4, 5]], ids=["two in a row", "three in a row"])
def test_bad_steps_are_skipped_up_to_a_number_in_a_row(poisoned):
    recorder = Recorder(skip_bad_steps=True)
    messages, after = [], {}

    def step(state, batch):
        number = int(state.step) + 1
        if number in poisoned:
            batch = {**batch, "decoder_loss_weights": batch["decoder_loss_weights"] * jnp.nan}
        state, metrics = recorder.training.step(state, batch)
        after[number] = jax.device_get((state.params, state.opt_state, read_counter(state.counters["tokens_processed"])))
        return state, metrics

    if len(poisoned) == 3 and poisoned[-1] == 5:
        with pytest.raises(Diverged, match="step 5 had loss nan .* it is the last of 3 in a row"):
            recorder.run(8, step=step, bad_steps=2, log=messages.append)
        assert recorder.saved[-1][0] == recorder.saved[-1][1] >= 5  # its step is that of its state
    else:
        state = recorder.run(8, step=step, bad_steps=2, log=messages.append)
        assert (
            int(state.step) == 8 and np.isfinite([metrics["loss"] for n, metrics in recorder.lines if n not in poisoned]).all()
        )
        assert after[7][2] > after[6][2]  # its tokens were read
        assert not np.array_equal(*(jax.tree.leaves(after[n][0])[0] for n in (4, 5)))
    np.testing.assert_equal(*(jax.device_get(after[n][0]) for n in (4, 2)))
    slots = [[x for x in jax.tree.leaves(after[n][1]) if x.dtype == np.float32] for n in (4, 2)]
    np.testing.assert_equal(*slots)
    counts = [[int(x) for x in jax.tree.leaves(after[n][1]) if x.dtype == np.int32] for n in (4, 2)]
    assert counts == [[4], [2]]  # the schedule goes on
    skipped = [line for line in messages if "It is skipped" in line]
    assert len(skipped) == (3 if poisoned[-1] == 7 else 2)
    assert "bad step 1 of at most 2 in a row" in skipped[0] and "bad step 2 of at most 2 in a row" in skipped[1]


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_an_update_that_is_not_finite_is_not_applied(optimizer):
    rate = lambda step: jnp.where(step == 2, jnp.inf, 0.01)
    recorder = Recorder(Optax(optax.sgd(rate), rate) if optimizer == "sgd" else Adafactor(rate))
    with pytest.raises(Diverged, match="step 3 had loss [0-9.]+ and gradient norm [0-9.]+, but an update that is not finite"):
        recorder.run(8)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(recorder.saved[-1][2]))


def test_a_skipped_step_advances_schedules_but_no_moments():
    """Adam's bias correction counts the gradients that its moments have averaged."""
    recorder = Recorder(AdamW(RATE), skip_bad_steps=True)

    def step(state, batch):
        if int(state.step) in (2, 3):
            batch = {**batch, "decoder_loss_weights": batch["decoder_loss_weights"] * jnp.nan}
        return recorder.training.step(state, batch)

    state = recorder.run(6, step=step, bad_steps=2, log=lambda message: None)
    is_part = lambda part: isinstance(part, optax.ScaleByAdamState | optax.ScaleByScheduleState)
    parts = [part for part in jax.tree.leaves(state.opt_state, is_leaf=is_part) if is_part(part)]
    assert {type(part).__name__: int(part.count) for part in parts} == {"ScaleByAdamState": 4, "ScaleByScheduleState": 6}


def test_sigterm_between_two_steps_finishes_the_next_saves_and_raises():
    recorder = Recorder()
    kill = Action(lambda n, state: os.kill(os.getpid(), signal.SIGTERM) if n == 3 else None, lambda step: True)
    with pytest.raises(Preempted, match="SIGTERM after step 4"):
        recorder.run(20, actions=[kill])
    assert recorder.saved[-1][0] == 4
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_end_of_a_time_limit_is_a_request_to_stop():
    """At least one step is done, so that a run goes on whose start takes as long as its limit."""
    recorder = Recorder()
    with pytest.raises(Preempted, match="stopped by MAX_MINUTES after step 1;"):
        recorder.run(10, max_minutes=1e-9)
    assert recorder.saved[-1][0] == 1
    assert int(Recorder().run(3, max_minutes=60.0).step) == 3


def test_a_mesh_that_does_not_fit_is_a_sentence():
    with pytest.raises(UserError, match="which needs 3 devices, but there are 8"):
        MeshShape.parse("data=3").resolve(8)
    with pytest.raises(UserError, match='Did you mean "tensor"'):
        MeshShape.parse("tensr=2")
    with pytest.raises(UserError, match='Write it as "data=2'):
        MeshShape.parse("2x4")
    with pytest.raises(UserError, match="Only one axis may be -1"):
        MeshShape.parse("data=-1,fsdp=-1").resolve(8)
    with pytest.raises(UserError, match="one of them must be 1"):
        MeshShape.parse("sequence=2,tensor=4").resolve(8)
    with pytest.raises(UserError, match="num_heads = 4 over tensor=8"):
        ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(1, 1, 8))
    with pytest.raises(UserError, match="Choose a size of sequence that divides 4"):
        ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(1, 1, 1, sequence=8))
    with pytest.raises(UserError, match="cannot be split over replica \\* data \\* fsdp = 8"):
        assemble(
            ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(8, 1, 1)),
            Adafactor(),
            batch_size=4,
            microbatches=1,
            seed=0,
        )
    assert MeshShape.parse("fsdp=-1").resolve(8) == (1, 1, 8, 1, 1)
    assert MeshShape.parse({"tensor": 2}).resolve(8) == (1, 4, 1, 1, 2)
