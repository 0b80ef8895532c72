"""Rules of a user's over the library's tables; heads of keys and values that a mesh does not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import documented, exhaustive, random_batch, random_params, tiny_config
from jax.sharding import PartitionSpec as P

from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.observe.model_info import model_info
from t5x_lab.optim.optimizers import AdamW
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.partitioning.rules import ShardingRules, split_further
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.inference import Inference
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble

ADAMW = AdamW(LearningRate("constant", 0.01))


def two_steps(mesh, rules=ShardingRules(), network="encoder_decoder", **changes):
    """(the sharded model, the state's shardings, losses and parameters)."""
    sharded = ShardedModel(ModelConfig(tiny_config(network, **changes)), mesh, mesh.first_of(jax.devices()), rules)
    training = assemble(sharded, ADAMW, batch_size=8, microbatches=1, seed=0)
    state, losses = training.init_state(jax.device_put(random_params(sharded.model), sharded.param_shardings)), []
    for step in range(2):
        state, metrics = training.step(state, sharded.shard_batch(random_batch(network, rows=8, seed=step)))
        losses.append(float(metrics["loss"]))
    return sharded, training.abstract_state, losses, jax.device_get(state.params)


@pytest.mark.slow
def test_a_rule_over_two_axes_and_one_over_none_train_as_one_device_does():
    config = GinConfig([], [documented("custom/sharding.md", "ShardingRules.parameters")])
    rules = config.sharding()
    assert rules == ShardingRules({"mlp": ("fsdp", "tensor"), "embed": None, "experts": "tensor"}, {"experts": "tensor"})
    _, _, losses, params = two_steps(MeshShape(1, 1, 1))
    sharded, abstract, losses_here, params_here = two_steps(config.mesh(), rules)
    np.testing.assert_allclose(losses_here, losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), params_here, params)
    wo = lambda tree: tree["decoder"]["layers"]["mlp"]["wo"]["kernel"].sharding.spec
    assert wo(abstract.params) == P(None, ("fsdp", "tensor"), None)
    slots = [x for path, x in jax.tree_util.tree_leaves_with_path(abstract.opt_state) if "'wo'" in str(path)]
    assert len(slots) == 4 and all(slot.sharding.spec == wo(abstract.params) for slot in slots)
    assert sharded.param_shardings["decoder"]["layers"]["self_attention"]["query"]["kernel"].spec == P(
        None, None, "tensor", None
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(2, 1, 4), exhaustive(MeshShape(2, 1, 1, sequence=4))])
def test_heads_that_queries_share_stay_whole_where_the_mesh_does_not_divide_them(mesh):
    """Two heads of keys and values on four devices, which share the queries' eight."""
    changes = dict(network="causal_decoder", num_heads=8, num_kv_heads=2, positions="rotary")
    _, _, losses, params = two_steps(MeshShape(1, 1, 1), **changes)
    sharded, abstract, losses_here, params_here = two_steps(mesh, **changes)
    np.testing.assert_allclose(losses_here, losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), params_here, params)
    attention = abstract.params["decoder"]["layers"]["self_attention"]
    of_width, of_heads = ("sequence", None) if mesh.sequence > 1 else (None, "tensor")
    assert attention["key"]["kernel"].sharding.spec == P(None, of_width, None, None)
    assert attention["query"]["kernel"].sharding.spec == P(None, of_width, of_heads, None)

    single_device = ShardedModel(sharded.model.config, MeshShape(1, 1, 1), jax.devices()[:1])
    prompts, options = [[0, 5, 6, 7], [0, 8, 9]], dict(limits=[4, 4], eos_id=63)
    texts = [
        {i: tokens.tolist() for i, tokens, _ in Inference(model).generate(place(model, params), prompts, **options)}
        for model in (single_device, sharded)
    ]
    assert texts[0] == texts[1]


def place(sharded, params):
    return jax.device_put(params, sharded.param_shardings)


@pytest.mark.parametrize(
    "rules, says",
    [
        (dict(parameters={"mlp": "tensr"}), 'ShardingRules.parameters shards mlp over "tensr". Did you mean "tensor"?'),
        (dict(parameters={"mlp": 2}), "ShardingRules.parameters has 'mlp': 2. Write"),
        (dict(activations={"heads": ("fsdp", "model")}), 'ShardingRules.activations shards heads over "model".'),
        (dict(activations={"batch": "data"}), "ShardingRules.activations has a rule for batch"),
        (dict(parameters=[("mlp", "tensor")]), "ShardingRules.parameters is [('mlp', 'tensor')]. It must be a dictionary"),
    ],
)
def test_what_is_said_of_wrong_rules(rules, says):
    with pytest.raises(UserError) as error:
        ShardingRules(**rules)
    assert says in error.value.sentence


def test_what_does_not_divide_is_said_with_the_way_out():
    config = ModelConfig(tiny_config("causal_decoder", mlp_dim=12))
    with pytest.raises(UserError, match=r"mlp_dim = 12 over fsdp=2 \* tensor=4 devices") as error:
        ShardedModel(config, MeshShape(1, 2, 4), rules=ShardingRules({"mlp": ("fsdp", "tensor")}))
    assert 'ShardingRules.parameters = {"mlp": None}' in error.value.sentence
    ShardedModel(config, MeshShape(1, 2, 4), rules=ShardingRules({"mlp": None}))
    with pytest.raises(UserError, match=r"head_dim = 4 over tensor=8 devices"):
        ShardedModel(config, MeshShape(1, 1, 8), rules=ShardingRules({"heads": None, "mlp": None, "kv": "tensor"}))


class Wide(nnx.Module):
    architecture, vocab_size = "causal_decoder", 64

    def __init__(self, *, rngs, constrain):
        self.constrain = constrain
        self.table = nnx.Param(jax.random.normal(rngs.params(), (64, 32)), axes=("vocab", "width"))

    def __call__(self, batch):
        return self.constrain(self.table[...][batch["decoder_input_tokens"]], ("batch", None, "width"))

    def logits(self, x):
        return x @ self.table[...].T


class Documented(nnx.Module):
    architecture, vocab_size = "causal_decoder", 256

    def __init__(self, *, rngs):
        lines, names = documented("custom/network.md", "with_partitioning").splitlines(), {**globals(), "rngs": rngs}
        self.ways = nnx.List([eval(line, names) for line in lines])

    def __call__(self, batch):
        return jax.nn.one_hot(batch["decoder_input_tokens"], 64) @ self.ways[1][...] @ self.ways[1][...].T

    def logits(self, x):
        return self.ways[0](x)


def test_both_documented_ways_to_name_dimensions_split_them():
    sharded = ShardedModel(ModelConfig(Documented), MeshShape(1, 2, 2), jax.devices()[:4])
    matrices = [array for array in jax.tree.leaves(sharded.init_params(0)) if array.ndim == 2]
    assert [array.sharding.spec for array in matrices] == 2 * [P("fsdp", "tensor")]


def test_a_name_of_ones_own_is_split_where_a_rule_says_so():
    rules = ShardingRules({"width": ("tensor", "fsdp")}, {"width": "tensor"})
    sharded = ShardedModel(ModelConfig(Wide), MeshShape(1, 2, 2), jax.devices()[:4], rules)
    assert sharded.param_shardings["table"].spec == P("tensor", "fsdp")  # the vocabulary came first
    params = sharded.init_params(0)
    batch = random_batch("causal_decoder")
    table = np.asarray(params["table"])
    expected = table[batch["decoder_input_tokens"]] @ table.T
    np.testing.assert_allclose(jax.jit(sharded.model.logits)(params, batch), expected, rtol=1e-4, atol=1e-4)
    without = ShardedModel(ModelConfig(Wide), MeshShape(1, 2, 2), jax.devices()[:4])
    with pytest.raises(UserError, match='by the axis "width", which has no rule'):
        jax.eval_shape(without.model.logits, without.model.abstract_params, batch)
    misspelled = ShardedModel(ModelConfig(Wide), MeshShape(1, 2, 2), jax.devices()[:4], ShardingRules({"widht": "tensor"}))
    assert 'ShardingRules.parameters has a rule for "widht", but no parameter has this axis' in model_info(
        misspelled.model, misspelled.partitioner
    )
    short = ShardedModel(ModelConfig(tiny_config("causal_decoder")), MeshShape(1, 2, 2), jax.devices()[:4], rules)
    with pytest.raises(UserError, match=r"A network constrains an activation of shape \(2, 3\) by the axes"):
        short.partitioner.constrain(jnp.ones((2, 3)), ("batch",))


@pytest.mark.parametrize(
    "spec, shape, expected",
    [
        (P(), (6, 16), P("fsdp", "data")),
        (P(None, "fsdp"), (6, 16), P(None, ("fsdp", "data"))),
        (P("fsdp"), (8, 3, 16), P("fsdp", None, "data")),
        (P(("data", "fsdp")), (16,), P(("data", "fsdp"))),
        (P(), (3, 5), P(None, None)),
    ],
)
def test_a_spec_is_split_over_the_axes_that_it_leaves_out(spec, shape, expected):
    assert split_further(spec, shape, {"data": 4, "fsdp": 2, "tensor": 1}) == expected
