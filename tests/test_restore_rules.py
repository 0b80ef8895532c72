"""Starting from another model: which tensors go over, which stay fresh, and what is refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import serialization, traverse_util
from helpers import tiny_config
from jax.sharding import NamedSharding, PartitionSpec
from test_checkpoints import advance, make, synthetic

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.huggingface.directory import find_family
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.initial import carry_over, load_params
from t5x_lab.checkpoints.layers import Part, unstack_layers
from t5x_lab.checkpoints.layout import make_info, named_leaves
from t5x_lab.checkpoints.lazy_tensors import from_array
from t5x_lab.checkpoints.manager import Checkpoints, save_params
from t5x_lab.checkpoints.rules import assign_sources, fit_shape
from t5x_lab.checkpoints.sharded_arrays import to_array
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.config import EncoderShape
from t5x_lab.optim.groups import flat_names
from t5x_lab.partitioning.mesh import MeshShape, make_mesh
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel

pytestmark = pytest.mark.slow

GPT1 = dict(
    scaling="standard", positions="learned", max_positions=16, norm="layer", norm_position="post", use_bias=True,
    mlp_activations=("gelu",), logits_via_embedding=True, mlp_dim=64, num_decoder_layers=12,
)  # fmt: skip


def random_params(model: Model, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.abstract_params)


def saved(tmp_path, network, seed=1):
    """A checkpoint of random parameters."""
    model = Model(ModelConfig(network))
    params = random_params(model, seed)
    save_params(find_path(tmp_path), params)
    return find(str(tmp_path / "source")), params


def find_path(tmp_path):
    from etils import epath

    return epath.Path(tmp_path) / "source"


def test_layers_go_to_the_devices_that_hold_them():
    """An array whose layers are split over eight devices, of which the sixth stays fresh."""
    mesh = make_mesh(MeshShape(8, 1, 1))
    like = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    fresh = jax.device_put(np.full((8, 3), 9, np.float32), like.sharding)
    layers = [(layer, from_array(np.full((3,), layer, np.float32))) for layer in range(8) if layer != 5]
    expected = np.repeat(np.array([0, 1, 2, 3, 4, 9, 6, 7], np.float32)[:, None], 3, axis=1)
    np.testing.assert_array_equal(to_array(like, layers, fresh), expected)


def test_what_nobody_takes_is_refused_where_there_are_no_rules(tmp_path):
    tensors = {name: from_array(np.zeros((2,), np.float32)) for name in ("mine", "theirs")}
    new, source = {"mine": Part("mine", None, (2,))}, Source(tmp_path, 0, tensors)
    with pytest.raises(UserError, match="has theirs, which the new model does not have"):
        assign_sources(new, source, RestoreCheckpointConfig())
    sources = assign_sources(new, source, RestoreCheckpointConfig(assignment_map=(("mine", "theirs"),)))
    assert sources["mine"].source == "theirs"


def load(place, network, mesh=MeshShape(1, 1, 1), fresh_seed=2, **rules):
    """Returns the restored parameters of a new model and the fresh parameters."""
    sharded = ShardedModel(ModelConfig(network), mesh, mesh.first_of(jax.devices()))
    fresh = random_params(sharded.model, fresh_seed)
    put = lambda: jax.device_put(fresh, sharded.param_shardings)
    params = load_params(place, sharded.abstract_params, sharded.model.axes, RestoreCheckpointConfig(**rules), put)
    return jax.device_get(params), fresh


def single(params) -> dict[str, np.ndarray]:
    return {
        name: t.read_all()
        for name, t in unstack_layers({n: from_array(np.asarray(x)) for n, x in named_leaves(params).items()}).items()
    }


@pytest.mark.parametrize("n, num_restored", [(-1, 0), (0, 2), (1, 14), (6, 74), (12, 146)])
def test_transfer_of_the_first_layers_keeps_gpt1s_tensors(n, num_restored, tmp_path):
    """Radford et al., figure 2: 2 tensors of embeddings and 12 a layer, as the paper's model counts them."""
    network = tiny_config("causal_decoder", **GPT1)
    place, source = saved(tmp_path, network)
    only_layers = {"layers": {"decoder": [*range(n), *[None] * (12 - n)]}}
    rules = {"assignment_map": [(".*", None)]} if n < 0 else only_layers
    params, fresh = load(place, network, **rules)
    first_layers = lambda tree: {
        entry.name: entry.export({name: from_array(x) for name, x in single(tree).items()}).read_all()
        for entry in find_family(network)[0].entries(network)
    }
    t5x_restored, old, new = first_layers(params), first_layers(source), first_layers(fresh)
    same = [name for name in t5x_restored if np.array_equal(t5x_restored[name], old[name])]
    assert len(same) == num_restored and len(t5x_restored) == 146
    assert all(np.array_equal(t5x_restored[name], new[name]) for name in t5x_restored if name not in same)
    layers = {int(name.split(".")[2]) for name in same if ".h." in name}
    assert layers == set(range(max(n, 0)))


@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 1), MeshShape(2, 2, 2)])
def test_layers_are_picked_one_by_one_on_any_mesh(mesh, tmp_path):
    """Every second layer of six, and one more than there were."""
    network = tiny_config("causal_decoder", num_decoder_layers=6)
    place, source = saved(tmp_path, network)
    smaller = dataclasses.replace(network, num_decoder_layers=4)
    params, fresh = (single(tree) for tree in load(place, smaller, mesh, layers={"decoder": [0, 2, 4, None]}))
    source = single(source)
    for name, value in params.items():
        layer = name.split("layers_")[-1].split("/")[0] if "layers_" in name else None
        wanted = source[name] if layer is None else fresh[name] if layer == "3" else None
        if wanted is None:
            wanted = source[name.replace(f"layers_{layer}/", f"layers_{2 * int(layer)}/")]
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 1), MeshShape(1, 2, 4)])
def test_a_vocabulary_is_extended_and_logits_are_untied(mesh, tmp_path):
    network = tiny_config("causal_decoder", logits_via_embedding=True)
    place, source = saved(tmp_path, network)
    larger = dataclasses.replace(network, vocab_size=96, logits_via_embedding=False)
    rules = [("logits_dense/kernel", "token_embedder/embedding", "transposed")]
    params, fresh = load(place, larger, mesh, assignment_map=rules, extend=["vocab"])
    table = source["token_embedder"]["embedding"]
    np.testing.assert_array_equal(params["token_embedder"]["embedding"][:64], table)
    np.testing.assert_array_equal(params["token_embedder"]["embedding"][64:], fresh["token_embedder"]["embedding"][64:])
    np.testing.assert_array_equal(params["logits_dense"]["kernel"][:, :64], table.T)
    np.testing.assert_array_equal(params["logits_dense"]["kernel"][:, 64:], fresh["logits_dense"]["kernel"][:, 64:])
    with pytest.raises(UserError, match=r"embedding, transposed, with shape \(16, 64\), but logits_dense/kernel .* \(16, 96\)"):
        load(place, larger, assignment_map=[*rules, ("token_embedder/.*", None)])


def test_a_decoder_is_made_of_an_encoder_decoders(tmp_path):
    """Rules over names: what the source has no use for is left."""
    place, source = saved(tmp_path, tiny_config("encoder_decoder", relative_bias="per_layer", num_decoder_layers=2))
    network = tiny_config("causal_decoder", relative_bias="per_layer", num_decoder_layers=2)
    params, _ = load(place, network, assignment_map=[(r"decoder/layers_(\d)/mlp/(.*)", r"encoder/layers_\1/mlp/\2")])
    np.testing.assert_array_equal(
        params["decoder"]["layers"]["mlp"]["wo"]["kernel"], source["encoder"]["layers"]["mlp"]["wo"]["kernel"]
    )
    table = source["decoder"]["layers"]["relpos_bias"]["rel_embedding"]
    np.testing.assert_array_equal(params["decoder"]["layers"]["relpos_bias"]["rel_embedding"], table)


ADAPTED = "MODEL_DIR = 'x'", "TRAIN_STEPS = 1", "MIXTURE_OR_TASK_NAME = 'sotu'"


def network_of(preset: str, **changes):
    return dataclasses.replace(GinConfig([f"models/{preset}/tiny.gin"]).model().network, vocab_size=64, **changes)


@pytest.mark.parametrize("decoder, adapted", [("gemma2", "t5gemma"), ("gemma3", "t5gemma2"), ("decoder", "t5_1_1")])
def test_an_encoder_decoder_is_made_of_a_decoder(decoder, adapted, tmp_path):
    """Every tensor, by its name: those of T5 1.1, whose logits are not tied, need another rule."""
    place, source = saved(tmp_path, network_of(decoder, logits_via_embedding=adapted != "t5_1_1"))
    run = GinConfig(
        [f"models/{adapted}/tiny.gin", "objectives/prefix_lm.gin", "recipes/adapt_to_encoder_decoder.gin"], ADAPTED
    ).run()
    params, _ = load(place, network_of(adapted), **dataclasses.asdict(run.restore))
    sources, names = single(source), set()
    for name, value in single(params).items():
        expected = name.replace("encoder_token_embedder", "token_embedder").replace("cross_attention", "self_attention")
        expected = f"decoder{expected.removeprefix('encoder')}" if name.startswith("encoder/") else expected
        np.testing.assert_array_equal(value, sources[expected], err_msg=name)
        names.add(expected)
    assert names == sources.keys()


def test_an_encoder_decoder_is_made_of_two_decoders_of_different_sizes(tmp_path):
    sizes = dict(emb_dim=12, num_heads=6, num_kv_heads=3, head_dim=4, mlp_dim=20)
    _, large = saved(tmp_path / "large", network_of("gemma2", **sizes), seed=3)
    place, small = saved(tmp_path / "small", network_of("gemma2"))
    files = ["models/t5gemma/tiny.gin", "objectives/prefix_lm.gin", "recipes/adapt_unbalanced.gin"]
    run = GinConfig(files, [*ADAPTED, f"ENCODER_CHECKPOINT_PATH = '{tmp_path}/large/source'"]).run()
    network = network_of("t5gemma", encoder=EncoderShape(**sizes))
    params, fresh = load(place, network, **dataclasses.asdict(run.restore))
    encoder, decoder, fresh = single(large), single(small), single(fresh)
    for name, value in single(params).items():
        expected = decoder.get(name)
        if name.startswith("encoder"):
            expected = encoder[name.replace("encoder_token", "token").replace("encoder/", "decoder/")]
        elif "cross_attention" in name:
            expected = fresh[name]
        np.testing.assert_array_equal(value, expected, err_msg=name)
    is_first = {name for name in single(params) if re.fullmatch(run.optimizer.parameters, name)}
    assert is_first == {name for name in single(params) if "cross_attention" in name}
    with pytest.raises(UserError, match='has .* for "encoder", which no rule uses'):
        RestoreCheckpointConfig(others={"encoder": "x"}, assignment_map=(("a", "b"),))
    with pytest.raises(UserError, match="nowhere"):
        load(place, network, **{**dataclasses.asdict(run.restore), "others": {"encoder": str(tmp_path / "nowhere")}})
    wider = network_of("t5gemma", encoder=EncoderShape(**{**sizes, "mlp_dim": 24}))
    with pytest.raises(UserError, match=r"large/\S+ has decoder/layers_0/mlp/w\S+ with shape .*, but encoder/layers_0/mlp"):
        load(place, wider, **dataclasses.asdict(run.restore))
    deeper = network_of("t5gemma", encoder=EncoderShape(**sizes), num_encoder_layers=9)
    with pytest.raises(UserError, match=r"large/\S+ does not have decoder/layers_\d/\S+, for encoder/layers_\d"):
        load(place, deeper, **dataclasses.asdict(run.restore))


def test_a_directory_may_have_any_name_and_a_step_is_no_path(tmp_path):
    network = tiny_config("causal_decoder")
    place, source = saved(tmp_path / "a#1?b 50%25", network)
    params, _ = load(place, network, extend=["vocab"])
    jax.tree.map(np.testing.assert_array_equal, params, source)
    info = place.path / "info" / "metadata"
    for step in ("../../escaped", -1, True):
        text = json.loads(info.read_text())
        info.write_text(json.dumps(make_info(text["parameters"], step, checksums=text["checksums"])))
        with pytest.raises(UserError, match="has the step"):
            load(place, network, extend=["vocab"])


def test_mistakes_in_rules_are_sentences(tmp_path):
    network = tiny_config("causal_decoder")
    place, _ = saved(tmp_path, network)
    one_more = dataclasses.replace(network, num_decoder_layers=4)
    for match, target, rules in [
        ('the pattern "nothing" is not the first match of any parameter', network, dict(assignment_map=[("nothing", None)])),
        ("does not fit the model: .* or rules in RestoreCheckpointConfig", one_more, {}),
        ("does not have decoder/layers_3/.* Add a rule", one_more, dict(extend=["vocab"])),
        ("does not have other, for decoder/final_norm/scale", network, dict(assignment_map=[("decoder/final_norm/scale", "other")])),
        ("has 3 entries for decoder, which has 4 layers", one_more, dict(layers={"decoder": [0, 1, 2]})),
        ("has 4 entries for decoder, which has 3 layers", network, dict(layers={"decoder": [0, 1, 2, 2]})),
        ('has the stack "decodr", but the new model has decoder', network, dict(layers={"decodr": [0, 1, 2]})),
        ("is .*vocb", network, dict(extend=["vocb"])),
        (r"shape \(16, 64\), but the new model needs \(16, 96\). To extend it, add \"vocab\"",
         dataclasses.replace(network, vocab_size=96), dict(layers={"decoder": [0, 1, 2]})),
        ("an entry of|is .*optimiser", network, dict(carry=["optimiser"])),
        ("A rule is", network, dict(assignment_map=["abc"])),
        (r"has the pattern \"\(\"", network, dict(assignment_map=[("(", None)])),
        (r'"\\2" does not fit', network, dict(assignment_map=[("decoder/(.*)", r"\2")])),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=f"(?i){match}"):
            load(place, target, **rules)
    params, fresh = load(place, one_more, strict=False, assignment_map=[("nothing", None)])
    new = params["decoder"]["layers"]["mlp"]["wo"]["kernel"][3]
    np.testing.assert_array_equal(new, fresh["decoder"]["layers"]["mlp"]["wo"]["kernel"][3])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_optimizer_and_step_go_over_where_it_is_asked_for(optimizer, tmp_path):
    """The next step equals the source's next step if both are restored, from a causal to a prefix decoder too."""
    training, batches = make(optimizer=optimizer), synthetic()
    state, _ = advance(training, training.init_state(training.sharded.init_params(0)), batches, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, batches)
    checkpoints.close()
    place = find(str(tmp_path))
    other = make(MeshShape(1, 4, 2), architecture="prefix_decoder", optimizer=optimizer)
    sharded = other.sharded

    def begin(*carry):
        config = RestoreCheckpointConfig(carry=carry)
        params = load_params(place, sharded.abstract_params, sharded.model.axes, config)
        return carry_over(place, other.init_state(params), sharded.abstract_params, sharded.model.axes, config)

    whole = begin("optimizer", "step")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), jax.device_get(state))
    slots = begin("optimizer")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(slots.opt_state), jax.device_get(state.opt_state))
    assert int(slots.step) == 0 and int(begin("step").step) == 3
    plain = begin()
    assert int(plain.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(jax.device_get(plain.opt_state)))


@pytest.mark.slow
def test_slots_follow_their_parameters_into_another_depth(tmp_path):
    training, batches = make(), synthetic()
    state, _ = advance(training, training.init_state(training.sharded.init_params(0)), batches, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state, batches)
    checkpoints.close()
    other = make(num_decoder_layers=4)
    config = RestoreCheckpointConfig(layers={"decoder": [2, 1, 0, None]}, carry=("optimizer",))
    sharded = other.sharded
    fresh = lambda: sharded.init_params(5)
    params = load_params(find(str(tmp_path)), sharded.abstract_params, sharded.model.axes, config, fresh)
    new = carry_over(find(str(tmp_path)), other.init_state(params), sharded.abstract_params, sharded.model.axes, config)
    for kind in ("v_row", "v"):
        actual, expected = named_leaves(getattr(new.opt_state, kind)), named_leaves(getattr(state.opt_state, kind))
        for name in [name for name in actual if "/layers/" in name and expected[name].ndim > 1]:
            np.testing.assert_array_equal(actual[name][:3], expected[name][::-1])
            assert not np.any(np.asarray(actual[name][3]))


@pytest.mark.parametrize(
    "shape, needed, fits",
    [((4, 6), (4, 2, 3), True), ((4, 2, 3), (4, 6), True), ((6, 4), (4, 2, 3), False), ((4, 3, 2), (4, 2, 3), False)],
)
def test_heads_are_joined_and_matrices_not_transposed_in_silence(shape, needed, fits):
    """A transposed matrix has as many numbers, in another order."""
    values = np.arange(24.0, dtype=np.float32).reshape(shape)
    fit = lambda: fit_shape(
        from_array(values), needed, ("embed", "heads", "kv"), "w", "w", Source("x", 0, {}), RestoreCheckpointConfig()
    )
    if fits:
        np.testing.assert_array_equal(fit().read_all(), values.reshape(needed))
        return
    with pytest.raises(UserError, match="x has w with shape"):
        fit()


def test_means_of_t5xs_optimizer_are_extended_with_their_parameter():
    """T5X's slots have no axis for what they average over; ours have one of size 1."""
    config = RestoreCheckpointConfig(extend=("vocab",))
    fit = lambda size, shape: (
        fit_shape(from_array(np.zeros(size)), shape, ("vocab", "embed"), "v_row", "v_row", Source("x", 0, {}), config).shape
    )
    assert fit(10, (12, 1)) == (10, 1) and fit(8, (1, 8)) == (1, 8)
    with pytest.raises(UserError, match="v_row with shape"):
        fit(6, (1, 8))


@pytest.mark.parametrize("kind", ["optax", "flax"])
def test_adam_of_t5x_is_carried_over(kind, tmp_path):
    """Carries the state of optax.adamw as T5X's wrapper writes it, without empty nodes; or of Flax's former Adam."""
    training = make(optimizer="adamw")
    stacked = random_params(training.sharded.model, 1)
    unstacked = unstack_layers({name: from_array(x) for name, x in flat_names(stacked).items()})
    params = traverse_util.unflatten_dict({name: np.asarray(x.read_all()) for name, x in unstacked.items()}, sep="/")
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda count: 0.1))
    _, state = transformation.update(jax.tree.map(lambda x: 0.1 * x, params), transformation.init(params), params)
    adam = state[1][0]
    states = serialization.to_state_dict(state)
    if kind == "flax":
        states = jax.tree.map(lambda mu, nu: {"grad_ema": mu, "grad_sq_ema": nu}, adam.mu, adam.nu)
    flat = traverse_util.flatten_dict({"target": params, "state": {"step": np.int32(7), "param_states": states}})
    tree = traverse_util.unflatten_dict({name: np.asarray(x) for name, x in flat.items()})  # without empty nodes
    folder = tmp_path / "checkpoint_7"
    folder.mkdir()
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize({"version": 3, "optimizer": tree}))

    sharded, config = training.sharded, RestoreCheckpointConfig(carry=("optimizer", "step"))
    fresh = training.init_state(sharded.init_params(0))
    loaded = carry_over(find(str(folder)), fresh, sharded.abstract_params, sharded.model.axes, config)
    leaves = named_leaves(loaded.opt_state)
    assert int(loaded.step) == 7
    counts = [int(x) for name, x in leaves.items() if name.endswith("count")]
    assert counts and set(counts) == {1 if kind == "optax" else 7}
    for slot in ("mu", "nu"):
        slots = {name.split(f"{slot}/")[1]: from_array(np.asarray(x)) for name, x in leaves.items() if f"/{slot}/" in name}
        expected = flat_names(getattr(adam, slot))
        loaded_slots = unstack_layers(slots)
        assert loaded_slots.keys() == expected.keys()
        for name, x in loaded_slots.items():
            np.testing.assert_array_equal(x.read_all(), expected[name], err_msg=f"{slot} {name}")
