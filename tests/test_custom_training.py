"""Users' own parameter groups, losses and hooks."""

import pathlib
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import documented, exhaustive, random_batch, random_params, tiny_config
from runs_of_text import FULL_LM, PREFIX_LM_ED, flags

import t5x_lab
from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.loss import target_tokens, token_weights
from t5x_lab.models.model import Model
from t5x_lab.networks.flops import traced_flops
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.observe.norms import Norms
from t5x_lab.observe.weights_and_biases import WeightsAndBiases
from t5x_lab.optim.groups import Groups, flat_names
from t5x_lab.optim.optimizers import Adafactor, AdamW, Sgd
from t5x_lab.optim.schedules import LearningRate, LinearDecay
from t5x_lab.optim.unfreezing import GradualUnfreezing, TrainFirst
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.evaluate.checkpoints import evaluate_checkpoints
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.training.hooks import METHODS, Hook, Hooks, RunStart, Statistics, check_hooks
from t5x_lab.training.step import make_eval_step

RATE = LearningRate("constant", 0.01)
MESHES = {"one device": MeshShape(1, 1, 1), "a mesh": MeshShape(2, 2, 2)}


def trained(optimizer, mesh=MESHES["one device"], steps=1, microbatches=1, hooks=(), average_decay=None, **config):
    """(parameters before, the training, states and metrics after each step)."""
    settings = ModelConfig(tiny_config("causal_decoder"), **config)
    sharded = ShardedModel(settings, mesh, mesh.first_of(jax.devices()))
    options = dict(batch_size=8, microbatches=microbatches, seed=0)
    training = assemble(sharded, optimizer, **options, statistics=Statistics(hooks), average_decay=average_decay)
    params = random_params(sharded.model)
    state, after = training.init_state(jax.device_put(params, sharded.param_shardings)), []
    for step in range(steps):
        state, metrics = training.step(state, sharded.shard_batch(random_batch("causal_decoder", rows=8, seed=step)))
        after.append(jax.device_get((state, metrics)))
    return params, training, after


@pytest.mark.slow
@pytest.mark.parametrize("mesh, microbatches", [exhaustive("one device", 1), ("one device", 2), exhaustive("a mesh", 1)])
def test_each_group_is_updated_by_its_own_optimizer_and_a_frozen_one_not_at_all(mesh, microbatches):
    mesh = MESHES[mesh]
    decay = LinearDecay(peak=0.5, total_steps=4)
    groups = Groups(
        ((r"decoder/layers/mlp/.*", Sgd(decay)), (r".*embedding", None), (".*", AdamW(RATE, clip_global_norm=None)))
    )
    before, training, ((state, metrics), (second, metrics_2)) = trained(groups, mesh, steps=2, microbatches=microbatches)

    model = training.sharded.model
    batch = random_batch("causal_decoder", rows=8, seed=0)
    mean = lambda params: (lambda sums: sums.objective / sums.weights)(model.loss(params, batch))
    grads = flat_names(jax.grad(mean)(before))
    all_adamw = AdamW(RATE, clip_global_norm=None).make(model.axes)
    updates, _ = all_adamw.update(jax.grad(mean)(before), all_adamw.init(before), before)
    by_adamw = flat_names(optax.apply_updates(before, updates))
    for name, now in flat_names(state.params).items():
        old = flat_names(before)[name]
        if name.endswith("embedding"):
            np.testing.assert_array_equal(flat_names(second.params)[name], old)
        elif "/mlp/" in name:
            np.testing.assert_allclose(now, old - 0.5 * grads[name], rtol=1e-4, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_allclose(now, by_adamw[name], rtol=1e-3, atol=2e-5, err_msg=name)
    slots = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert not any("embedding" in name for name in slots) and any("'q" in name or "query" in name for name in slots)
    assert not any("'mlp'" in name for name in slots)  # plain gradient descent has none
    rates = [metrics[f"learning_rate/{name}"] for name in (r"decoder/layers/mlp/.*", ".*")]
    np.testing.assert_allclose(rates, [0.5, 0.01])
    np.testing.assert_allclose(metrics["learning_rate"], 0.5)  # the first group's
    np.testing.assert_allclose(metrics_2["learning_rate/decoder/layers/mlp/.*"], 0.375)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [r".*/mlp/.*", "logits_dense/.*"])
def test_what_is_frozen_has_no_gradient_in_the_program(frozen):
    """Its matrix products are fewer by those of the frozen kernels' gradients, and its state smaller by their slots."""
    flops, state_bytes, temporaries = [], [], []
    for patterns in ([(".*", Adafactor(RATE))], [(frozen, None), (".*", Adafactor(RATE))]):
        _, training, _ = trained(Groups(patterns), steps=0)
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in random_batch("causal_decoder", rows=8).items()}
        flops.append(traced_flops(training.step, training.abstract_state, batch))
        state_bytes.append(sum(x.size * 4 for x in jax.tree.leaves(training.abstract_state.opt_state)))
        compiled = training.step.lower(training.abstract_state, batch).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    network = tiny_config("causal_decoder")
    mlps = 3 * network.num_decoder_layers * network.emb_dim * network.mlp_dim  # wi_0, wi_1, wo
    kernels = mlps if "mlp" in frozen else network.emb_dim * network.vocab_size
    tokens = 8 * 12
    assert flops[0] - flops[1] == 2 * tokens * kernels
    assert state_bytes[0] - state_bytes[1] >= 4 * kernels  # too small to be factored: a number each
    assert temporaries[1] < temporaries[0]


GRADUAL = ("--gin_file=optimizers/gradual_unfreezing.gin", "--gin.GradualUnfreezing.steps=2")
CROSS_ATTENTION_FIRST = (
    "--gin.OPTIMIZER=@TrainFirst()", "--gin.TrainFirst.optimizer=@Adafactor()", "--gin.TrainFirst.steps=4",
    "--gin.TrainFirst.parameters='decoder/.*/cross_attention.*'",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture, unfreezing", [("causal_decoder", GRADUAL), ("encoder_decoder", CROSS_ATTENTION_FIRST)])
def test_unfreezing_goes_on_in_the_middle_of_a_stage(architecture, unfreezing, tmp_path):
    """Stages of two steps, or one of four; three steps and three more are six, to the bit."""
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    objective = FULL_LM if architecture == "causal_decoder" else PREFIX_LM_ED
    command = lambda directory, steps: flags(
        architecture, objective, directory, steps, *unfreezing, "--gin.CHECKPOINT_PERIOD=3"
    )
    assert main(command(whole, 6)) == 0
    for steps in (3, 6):
        assert main(command(parts, steps)) == 0
    whole_params, other = (flat_names(t5x_lab.load(directory).params) for directory in (whole, parts))
    early = flat_names(t5x_lab.load(whole, 3).params)
    for name, x in whole_params.items():
        np.testing.assert_array_equal(x, other[name])  # of three steps behind the checkpoint, which its slots decide
        assert not np.array_equal(x, early[name])
    steps = [line["step"] for line in read_metrics(parts) if line["split"] == "train"]
    losses = [[line["loss"] for line in read_metrics(path) if line["split"] == "train"] for path in (whole, parts)]
    assert steps == list(range(1, 7)) and losses[0] == losses[1]


def test_a_block_that_thaws_takes_steps_of_adams_size():
    """Checks that with equal gradients every step of Adam is the learning rate, however late a block begins."""
    gradual = GradualUnfreezing(AdamW(RATE, weight_decay=0.0), 300).make({"w": ("layers", "embed"), "norm": ("embed",)})
    params, grads = ({"w": np.full((3, 4), x, np.float32), "norm": np.full(4, x, np.float32)} for x in (1.0, 1e-3))
    state, update = gradual.init(params), jax.jit(gradual.update)
    for step in range(900):
        updates, state = update(grads, state, params)
        rate = float(RATE(step))
        expected = [rate if layer >= 2 - step // 300 else 0.0 for layer in range(3)]
        np.testing.assert_allclose(-np.asarray(updates["w"])[:, 0], expected, rtol=1e-3)
        np.testing.assert_allclose(-np.asarray(updates["norm"]), rate, rtol=1e-3)


def test_unfreezing_needs_stacked_layers():
    with pytest.raises(UserError, match='stacked on an axis "layers". No parameter of this network has one'):
        GradualUnfreezing(AdamW(RATE), 2).make({"block_0": {"w": ("embed", "mlp")}})


@pytest.mark.slow
def test_some_parameters_are_trained_alone_first_and_then_all():
    optimizer = Adafactor(RATE, min_dim_size_to_factor=4)
    before, _, after = trained(TrainFirst(optimizer, ".*/mlp/.*", 2), steps=3)
    last = before
    for step, (state, _) in enumerate(after):
        for name, now in flat_names(state.params).items():
            moved = not np.array_equal(now, flat_names(last)[name])
            assert moved == (step == 2 or "/mlp/" in name), (step, name)
        last = state.params
    _, _, ((alone, _),) = trained(optimizer, steps=1)
    for name, x in flat_names(after[0][0].params).items():
        if "/mlp/" in name:
            np.testing.assert_allclose(x, flat_names(alone.params)[name], rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(UserError, match="TrainFirst.parameters is .*, which matches none of the parameters. Names are such as"):
        trained(TrainFirst(optimizer, "nothing"), steps=1)
    with pytest.raises(UserError, match="TrainFirst.optimizer is @Groups\\(\\), which is not supported"):
        TrainFirst(Groups(((".*", optimizer),)), ".*")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Adafactor(RATE, min_dim_size_to_factor=4), AdamW(RATE), Sgd(RATE)])
def test_blocks_are_unfrozen_one_after_the_other(optimizer):
    """Two steps a stage, three blocks: which ones moved after each step; then all as without it."""
    before, _, after = trained(GradualUnfreezing(optimizer, 2), steps=6)
    last = before
    for step, (state, _) in enumerate(after):
        first = max(0, 3 - (1 + step // 2))
        for name, now in flat_names(state.params).items():
            old = np.asarray(flat_names(last)[name])
            moved = [not np.array_equal(a, b) for a, b in (zip(now, old, strict=True) if "/layers/" in name else [(now, old)])]
            assert moved == [i >= first for i in range(3)] if "/layers/" in name else all(moved), (step, name)
        last = state.params
    with pytest.raises(UserError, match="GradualUnfreezing.optimizer is @Groups\\(\\), which is not supported"):
        GradualUnfreezing(Groups(((".*", optimizer),)), 2)
    _, _, ((alone, _),) = trained(optimizer, steps=1)
    for name, x in flat_names(after[0][0].params).items():  # the last block's and the others' first step is the optimizer's own
        actual, expected = (
            (x[2], flat_names(alone.params)[name][2]) if "/layers/" in name else (x, flat_names(alone.params)[name])
        )
        if not isinstance(optimizer, AdamW):  # which clips by the norm of all gradients
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "groups, says",
    [
        ([("decoder/.*", Sgd(RATE)), ("encoder/.*", None), (".*", None)], 'No parameter belongs to the group "encoder/.*"'),
        ({".*": Sgd(RATE)}, "Groups.groups is a dictionary, whose order is lost. Use an ordered list of pairs"),
        ([".*"], "Groups.groups has '.*'. Use an ordered list of pairs"),
        ([("decoder/.*", Sgd(RATE))], "No pattern of Groups.groups matches the parameter logits_dense/kernel"),
        ([(".*", None)], "All groups in Groups.groups are frozen. Set an optimizer"),
        ([("(", Sgd(RATE))], "which is not a valid regular expression"),
        ([(".*", Sgd)], "It must be an optimizer, such as @AdamW(), or None for frozen parameters"),
        ([(".*", 0.1)], 'Groups.groups has 0.1 for ".*". It must be an optimizer'),
    ],
)
def test_what_is_said_of_wrong_groups(groups, says):
    with pytest.raises(UserError) as error:
        trained(Groups(groups), steps=0)
    assert says in error.value.sentence


def confidence(model, params, batch, scale):
    log_probs = np.asarray(jax.nn.log_softmax(model.logits(params, batch)))
    return scale * np.sum(np.sum(np.exp(log_probs) * log_probs, -1) * np.asarray(token_weights(batch)))


@pytest.fixture
def documented_loss(monkeypatch):
    """The model configuration of docs/custom/loss.md."""
    monkeypatch.syspath_prepend(".")
    pathlib.Path("my_loss.py").write_text(documented("custom/loss.md", "def confident"))
    model = ["models/causal_decoder/tiny.gin"]
    text = documented("custom/loss.md", "import my_loss")
    return GinConfig(model, [text, "TransformerConfig.vocab_size = 64", 'TransformerConfig.dtype = "float32"'])


@pytest.mark.slow
def test_a_loss_of_ones_own_is_added_measured_and_differentiated(documented_loss):
    config = documented_loss.model()
    again = GinConfig([], [documented_loss.text]).model()
    model, plain = Model(config), Model(ModelConfig(config.network))
    params, batch = random_params(model), random_batch("causal_decoder")
    sums, _ = make_eval_step(Model(again))(params, batch)
    expected = confidence(model, params, batch, 0.05)
    np.testing.assert_allclose(sums.terms["confidence"], expected, rtol=1e-5)
    np.testing.assert_allclose(sums.objective, plain.loss(params, batch).objective + expected, rtol=1e-5)

    def by_hand(params):
        log_probs = jax.nn.log_softmax(plain.logits(params, batch))
        weights = token_weights(batch)
        target = jnp.take_along_axis(log_probs, target_tokens(batch)[..., None], -1)[..., 0]
        log_z = jax.nn.logsumexp(plain.logits(params, batch), axis=-1)
        entropy = jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        return jnp.sum(weights * (-target + 1e-4 * log_z**2 + 0.05 * entropy))

    gradient = jax.grad(lambda params: model.loss(params, batch).objective)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), gradient, jax.grad(by_hand)(params))


@pytest.mark.slow
def test_losses_add_over_microbatches_and_a_mesh_and_may_stand_alone():
    def spread(network, hidden, batch, weights):
        return 0.1 * jnp.sum(weights * jnp.mean(jnp.square(hidden.astype(jnp.float32)), axis=-1))

    runs = [
        trained(Sgd(RATE), mesh, microbatches=microbatches, losses={"spread": spread}, cross_entropy_weight=weight)
        for mesh, microbatches, weight in (
            (MESHES["one device"], 1, 0.0),
            (MESHES["one device"], 4, 0.0),
            (MESHES["a mesh"], 2, 0.0),
            (MESHES["one device"], 1, 1.0),
        )
    ]
    (params, training, [(state, metrics)]), *others = runs
    model, batch = training.sharded.model, random_batch("causal_decoder", rows=8, seed=0)
    _, hidden = model._hidden(params, batch)
    weights = token_weights(batch)
    np.testing.assert_allclose(metrics["spread"], spread(None, hidden, batch, weights) / weights.sum(), rtol=1e-5)
    for _, _, [(_, other_metrics)] in others:
        np.testing.assert_allclose(other_metrics["spread"], metrics["spread"], rtol=1e-4)
        np.testing.assert_allclose(other_metrics["loss"], metrics["loss"], rtol=1e-4)  # the cross-entropy, trained or not
    for _, _, [(other, _)] in others[:2]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), other.params, state.params)
    head = flat_names(state.params)["logits_dense/kernel"]
    np.testing.assert_array_equal(head, flat_names(params)["logits_dense/kernel"])  # no cross-entropy, no gradient
    assert not np.array_equal(flat_names(others[2][2][0][0].params)["logits_dense/kernel"], head)


@pytest.mark.parametrize(
    "losses, says",
    [
        ({"mine": lambda network, hidden, batch, weights: weights}, 'The loss "mine" returns float32 [2, 3]'),
        (
            {"mine": lambda network, hidden, batch, weights: jnp.sum(weights > 0)},
            "It must return a float scalar, the sum over tokens",
        ),
        ({"mine": lambda network, hidden: 0.0}, 'The loss "mine" fails: TypeError: '),
        ({"mine": lambda network, hidden, batch, weights: None}, 'The loss "mine" returns None. It must return a float scalar'),
        ({"mine": 0.1}, "must be a function of (network, hidden, batch, weights)"),
        ({"mfu": lambda network, hidden, batch, weights: jnp.sum(weights)}, 'has the name "mfu", which is a built-in metric'),
    ],
)
def test_what_is_said_of_a_wrong_loss(losses, says):
    with pytest.raises(UserError) as error:
        ModelConfig(tiny_config("causal_decoder"), losses=losses)
    assert says in error.value.sentence


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_norms_are_those_of_each_layer_and_written_when_they_are_due(mesh):
    """Against numpy; the updates are what parameters change by."""
    norms, statistics = Norms(period=2), Statistics([Norms(period=2)])
    before, _, ((first, metrics), (second, due)) = trained(Sgd(RATE), mesh, steps=2, hooks=[norms])
    names = [name for name in due if "_norm/" in name]
    layers = {name.partition("/")[2] for name in names}
    assert {"decoder/layers_0", "decoder/layers_2", "logits_dense", "token_embedder"} <= layers and len(names) == 3 * len(
        layers
    )
    statistics.compute(*(jax.tree.map(jnp.zeros_like, before),) * 3)
    written = [set(statistics.due(step, metrics)) & set(names) for step in (1, 2, 3, 4)]
    assert written == [set(), set(names), set(), set(names)] and "loss" in statistics.due(1, metrics)

    def norm(tree, layer):
        total = 0.0
        for name, leaf in flat_names(tree).items():
            if "/layers/" in name:
                prefix, index = layer.rsplit("_", 1) if "layers_" in layer else ("", "")
                total += np.sum(np.square(leaf[int(index)])) if name.startswith(f"{prefix}/") else 0.0
            elif name.startswith(f"{layer}/"):
                total += np.sum(np.square(leaf))
        return np.sqrt(total)

    updates = jax.tree.map(lambda new, old: new - old, second.params, first.params)
    for layer in layers:
        np.testing.assert_allclose(due[f"parameter_norm/{layer}"], norm(first.params, layer), rtol=1e-5)
        np.testing.assert_allclose(due[f"update_norm/{layer}"], norm(updates, layer), rtol=1e-2, atol=1e-6)
        np.testing.assert_allclose(due[f"update_norm/{layer}"], 0.01 * due[f"gradient_norm/{layer}"], rtol=1e-4)
    whole = np.sqrt(sum(due[f"gradient_norm/{layer}"] ** 2 for layer in layers))
    np.testing.assert_allclose(whole, due["grad_norm"], rtol=1e-5)


class Told:
    """A hook that keeps what it is told, and fails where it is asked to."""

    def __init__(self, fails=()):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)

        def method(*args):
            self.calls.append((name, *args))
            if (name, args[0]) in self.fails:
                raise ValueError("full")

        return method


def test_a_failing_hook_is_told_once_by_its_name_and_stops_nothing():
    messages = []
    failing, other = Told(fails=[("on_step", 2), ("on_step", 3), ("on_step", 5)]), Told()
    hooks = Hooks([failing, object(), other], messages.append)
    with hooks.around(RunStart("run", 0, 6)):
        for step in range(1, 7):
            hooks.step(step, {"loss": 1.0})
        hooks.evaluation(6, "eval/t", {"loss": 2.0})
        hooks.save(6)
    assert failing.calls == other.calls and [call[0] for call in other.calls[:2]] == ["on_start", "on_step"]
    assert other.calls[-3:] == [("on_evaluation", 6, "eval/t", {"loss": 2.0}), ("on_save", 6), ("on_end", None)]
    assert (
        len(messages) == 2
        and "The hook Told failed in on_step of step 2: " in messages[0]
        and "ValueError: full" in messages[0]
    )
    assert "step 5" in messages[1]


def test_what_is_said_of_wrong_hooks():
    class Shapes:
        def statistics(self, params, gradients, updates):
            return {"all": jnp.ones(3)}

    class Taken:
        def statistics(self, params, gradients, updates):
            return {"loss": jnp.ones(())}

    class Early:
        def on_start(self, run):
            raise ValueError("no account")

    class Often:
        period = 0

        def on_step(self, step, metrics):
            pass

    class Alone:
        def statistics(self, params, gradients, updates):
            return jnp.ones(())

    def begun(hooks):
        with Hooks(hooks).around(RunStart("run", 0, 1)):
            pass

    assert METHODS == ["on_start", "on_step", "on_evaluation", "on_media", "on_saving", "on_save", "on_end", "statistics"]
    check_hooks([Hook(), Told(), Norms()])
    wrong = [
        (lambda: check_hooks([Told]), "HOOKS has the class Told. Bind an instance with parentheses: @Told()"),
        (lambda: check_hooks([3]), "HOOKS has 3, which has none of the methods of a hook: on_start, on_step"),
        (lambda: trained(Sgd(RATE), steps=1, hooks=[Shapes()]), "for the statistic 'all'. It must be a scalar"),
        (
            lambda: trained(Sgd(RATE), steps=1, hooks=[Taken()]),
            'A statistic of the hook Taken has the name "loss", which is a built-in metric',
        ),
        (lambda: trained(Sgd(RATE), steps=1, hooks=[Norms(1), Norms(1)]), "which another hook has, too"),
        (lambda: begun([Early()]), "The hook Early fails in on_start: "),
        (lambda: check_hooks([Often()]), "The hook Often has the period 0"),
        (lambda: trained(Sgd(RATE), steps=1, hooks=[Alone()]), "It must return a dict of scalars by name"),
        (lambda: Norms(0), "Norms.period is 0"),
    ]
    for call, says in wrong:
        with pytest.raises(UserError) as error:
            call()
        assert says in error.value.sentence


def records_of(file: pathlib.Path) -> list:
    """Weights & Biases' log: a header of 7 bytes, then LevelDB's blocks of records with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole, payloads = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            payloads.append(Record.FromString(whole))
            whole = b""
    return payloads


@pytest.mark.slow
def test_weights_and_biases_offline_has_every_number(monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pathlib.Path("run").mkdir()
    hooks = Hooks([WeightsAndBiases("project", mode="offline", tags=("a", "b"))], pytest.fail)
    with hooks.around(RunStart("run", 0, 2, 'SEED = "x"', 7)):
        hooks.step(1, {"loss": 2.5, "mfu": None})
        hooks.step(2, {"loss": 1.5, "mfu": None})
        hooks.evaluation(2, "eval/t", {"loss": 1.25})
    wandb.teardown()  # a command that is started later has a service of its own
    (log,) = pathlib.Path("run").glob("wandb/offline-run-*/*.wandb")
    records = records_of(log)
    history = [{(i.key or i.nested_key[0]): i.value_json for i in r.history.item} for r in records if r.HasField("history")]
    assert [(line["step"], line.get("train/loss")) for line in history] == [("1", "2.5"), ("2", "1.5"), ("2", None)]
    assert history[2]["eval/t/loss"] == "1.25" and "train/mfu" not in history[0]
    (run,) = [r.run for r in records if r.HasField("run")][:1]
    config = {update.key: update.value_json for update in run.config.update}
    assert run.project == "project" and config["num_parameters"] == "7" and run.display_name == "run"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_average_of_the_weights_follows_its_formula(mesh):
    before, training, after = trained(Sgd(LearningRate("constant", 1.0)), mesh, steps=4, average_decay=0.2)
    average = before
    for n, (state, _) in enumerate(after):
        decay = min(0.2, (1 + n) / (10 + n))
        average = jax.tree.map(lambda old, new, decay=decay: decay * old + (1 - decay) * new, average, state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.average, average)
    abstract = training.abstract_state
    assert jax.tree.map(lambda x: x.sharding, abstract.average) == jax.tree.map(lambda x: x.sharding, abstract.params)
    assert not np.array_equal(*(flat_names(tree)["logits_dense/kernel"] for tree in (state.params, state.average)))


@pytest.mark.exhaustive
def test_a_run_keeps_evaluates_saves_and_loads_its_average():
    decay = "--gin.AVERAGE_DECAY=0.5"
    argv = flags("causal_decoder", FULL_LM, "run", 4, decay, "--gin.EVAL_PERIOD=4", "--gin.DataConfig.eval_steps=2")
    assert main(argv) == 0
    (averaged,) = [line for line in read_metrics("run") if line["split"].startswith("eval_average/")]
    (last,) = [line for line in read_metrics("run") if line["split"].startswith("eval/")]
    assert averaged["loss"] != last["loss"] and averaged["tokens_with_loss"] == last["tokens_with_loss"]
    config = GinConfig(["run/config.gin"])
    for weights, line in (("last", last), ("average", averaged)):
        ((_, result),) = evaluate_checkpoints(config, "run", "latest", weights=weights)
        np.testing.assert_allclose(result["eval/sotu_full_lm"]["loss"], line["loss"], rtol=1e-6)
    ((_, result),) = evaluate_checkpoints(config, "run", "latest")  # as training evaluates
    assert result["eval/sotu_full_lm"]["loss"] == last["loss"]
    assert result["eval_average/sotu_full_lm"]["loss"] == averaged["loss"]
    average = t5x_lab.load("run", weights="average").params
    new = RestoreCheckpointConfig(weights="average", assignment_map=(("nothing", None),), strict=False)
    sharded = ShardedModel(config.model(), MESHES["one device"], jax.devices()[:1])
    loaded = load_params(find("run", weights="average"), sharded.abstract_params, sharded.model.axes, new)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded), jax.device_get(average))
    assert main([*argv, "--gin.TRAIN_STEPS=5", "--gin.AVERAGE_DECAY=None"]) == 0  # leaves it off
    with pytest.raises(UserError, match="has no averaged weights"):
        find("run", weights="average")
    assert main([*argv, "--gin.TRAIN_STEPS=6"]) == 0  # begins it anew
    begun = t5x_lab.load("run", weights="average").params
    assert not np.array_equal(*(jax.tree.leaves(x)[0] for x in (begun, t5x_lab.load("run").params)))
    with pytest.raises(UserError, match="Choose one of: average, last"):
        find("run", weights="averaged")
