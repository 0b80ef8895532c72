"""Parameters added to a network: adapter layers, LoRA, a user's own; what is trained and what stays."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import exhaustive, exhaustive_except, random_batch, random_params, tiny_config
from runs_of_text import SPANS, flags

import t5x_lab
from t5x_lab.checkpoints.manager import save_run
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks import peft as additions
from t5x_lab.networks.adapter import Adapter
from t5x_lab.networks.lora import Lora
from t5x_lab.networks.module_network import ModuleNetwork
from t5x_lab.networks.peft import peft_names
from t5x_lab.optim.groups import flat_names, trained_predicate
from t5x_lab.optim.optimizers import Adafactor
from t5x_lab.optim.schedules import LearningRate
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble
from t5x_lab.runs.train.training_flops import training_flops

ALL = r".*(query|key|value|out|wi_0|wi_1|wo)"
LOUD = ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384", 'TransformerConfig.dtype = "float32"']
NETWORKS = ("encoder_decoder", "causal_decoder", "prefix_decoder", "shared_stacks", "rotary", "gpt1")


def models(network, **added):
    config = network if not isinstance(network, str) else tiny_config(network)
    return Model(ModelConfig(config)), Model(ModelConfig(config, added))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_base_model_is_what_it_was(network):
    """The same seed gives the same parameters under the same names, and the same logits."""
    base, model = models(network, lora=Lora(ALL, rank=3), adapter=Adapter(size=5))
    before, params = base.init(jax.random.key(1)), model.init(jax.random.key(1))
    expected, now = flat_names(before), flat_names(params)
    added = peft_names(params, model.config.network)
    assert added == now.keys() - expected.keys() and {name.split("/")[-1] for name in added} == {"up", "down"}
    for name, x in expected.items():
        np.testing.assert_array_equal(now[name], x)
    batch = random_batch(network)
    np.testing.assert_array_equal(model.logits(params, batch), base.logits(before, batch))


@pytest.mark.parametrize("network", exhaustive_except(NETWORKS, ("encoder_decoder", "causal_decoder", "lstm")))
def test_lora_is_what_its_paper_says(network):
    """The same logits as of kernels W + alpha / rank * down up; teacher-forced, and token by token."""
    base, model = models(network, lora=Lora(ALL, rank=3, alpha=6.0))
    params = random_params(model)
    merged = _tree(
        {
            name: _with_lora(name, kernel, flat_names(params))
            for name, kernel in flat_names(params).items()
            if "/lora/" not in name
        }
    )
    assert sum("/lora/up" in name for name in flat_names(params)) >= 4
    by_library = flat_names(additions.merge_peft(params, {"lora": Lora(ALL, rank=3, alpha=6.0)}))
    for name, x in flat_names(merged).items():
        np.testing.assert_allclose(by_library.pop(name), x, rtol=1e-5, atol=1e-5)
    assert not by_library
    batch = random_batch(network)
    expected = base.logits(merged, batch)
    np.testing.assert_allclose(model.logits(params, batch), expected, rtol=2e-4, atol=2e-4 * float(jnp.abs(expected).max()))
    prompt = jnp.asarray(np.random.default_rng(0).integers(1, 64, (2, 5)))
    (first, state), (two, of_base) = model.prefill(params, prompt, 4), base.prefill(merged, prompt, 4)
    for _ in range(3):
        np.testing.assert_allclose(first, two, rtol=2e-4, atol=2e-4 * float(jnp.abs(two).max()))
        token = jnp.argmax(two, axis=-1)
        first, state = model.decode_step(params)(state, token)
        two, of_base = base.decode_step(merged)(of_base, token)


def _with_lora(name, kernel, params):
    """One kernel of a stack of layers, layer by layer."""
    path = name.rsplit("/", 1)[0]
    if not (name.endswith("kernel") and f"{path}/lora/up" in params):
        return kernel
    layers = zip(params[f"{path}/lora/down"], params[f"{path}/lora/up"], strict=True)
    return kernel + 2.0 * np.stack([np.tensordot(down, up, 1) for down, up in layers]).astype(np.float32)


def _tree(flat):
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def test_adapters_stand_behind_each_feed_forward_network():
    """T5's Table 10: 2 · d_model · d parameters a block; y + relu(y down) up of each block's feed-forward network."""
    config = tiny_config("encoder_decoder")
    base, model = models(config, adapter=Adapter(size=6))
    blocks = config.num_encoder_layers + config.num_decoder_layers
    assert model.num_parameters - base.num_parameters == blocks * 2 * config.emb_dim * 6
    params = random_params(model)
    layer = model.network(params).decoder.unstack()[1]
    of_base = base.network({name: x for name, x in _without(params, "adapter").items()}).decoder.unstack()[1]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, config.emb_dim)), jnp.float32)
    y = of_base.mlp(x)
    down, up = (params["decoder"]["layers"]["mlp"]["adapter"][name][1] for name in ("down", "up"))
    np.testing.assert_allclose(layer.mlp(x), y + np.maximum(y @ down, 0) @ up, rtol=1e-5, atol=1e-5)


def _without(params, name):
    return _tree({path: x for path, x in flat_names(params).items() if name not in path.split("/")})


class Net(nnx.Module):
    """A network of a user's, with Flax's layers."""

    architecture, vocab_size = "causal_decoder", 64

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(64, 8, rngs=rngs)
        self.middle = nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.Linear(8, 64, rngs=rngs)

    def __call__(self, batch):
        return self.middle(self.table(batch["decoder_input_tokens"]))

    def logits(self, hidden):
        return self.out(hidden)


@dataclasses.dataclass(frozen=True)
class Shift:
    """An addition of a user's: a vector, as BitFit adds."""

    modules: str = "middle"

    def make(self, module, rngs):
        return _Shift()


class _Shift(nnx.Module):
    def __init__(self):
        self.vector = nnx.Param(jnp.zeros(8))

    def __call__(self, x, y):
        return y + self.vector[...][None, None]


def test_networks_and_additions_of_a_users_own():
    base, model = models(ModuleNetwork(Net), shift=Shift(), lora=Lora("middle|out", rank=2, alpha=2.0))
    params = random_params(model)
    batch = {"decoder_input_tokens": jnp.asarray([[0, 5, 9]])}
    x = params["table"]["embedding"][jnp.asarray([[0, 5, 9]])]
    linear = lambda x, p: x @ (p["kernel"] + p["lora"]["down"] @ p["lora"]["up"]) + p["bias"][None, None]
    expected = linear(linear(x, params["middle"]) + params["middle"]["shift"]["vector"][None, None], params["out"])
    np.testing.assert_allclose(model.logits(params, batch), expected, rtol=1e-4, atol=1e-4)
    assert flat_names(_without(_without(params, "lora"), "shift")).keys() == flat_names(base.abstract_params).keys()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 1), MeshShape(2, 2, 2)])
def test_only_what_is_trainable_changes_and_has_slots(mesh):
    config = ModelConfig(tiny_config("causal_decoder"), {"lora": Lora(ALL, rank=2), "adapter": Adapter(size=4)})
    sharded = ShardedModel(config, mesh, mesh.first_of(jax.devices()))
    trainable = r".*/adapter/.*|.*norm/scale"
    training = assemble(
        sharded, Adafactor(LearningRate("constant", 0.01)), batch_size=8, microbatches=1, seed=0, trainable=trainable
    )
    params = random_params(sharded.model)
    state, _ = training.step(
        training.init_state(jax.device_put(params, sharded.param_shardings)),
        sharded.shard_batch(random_batch("causal_decoder", rows=8)),
    )
    changed = {
        name for name, x in flat_names(jax.device_get(state.params)).items() if not np.array_equal(x, flat_names(params)[name])
    }
    layers = [f"decoder/layers/{name}/scale" for name in ("self_attention_norm", "mlp_norm")]
    adapters = [f"decoder/layers/mlp/adapter/{name}" for name in ("down", "up")]
    assert changed == {"decoder/final_norm/scale", *layers, *adapters}
    slots = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    assert not any("kernel" in name or "lora" in name for name in slots)


@pytest.mark.parametrize(
    "added, says",
    [
        ({"lora": Lora(".*/qeury")}, r'Lora.modules is ".*/qeury", which matches no module of the network. The modules are'),
        ({"lora": Lora("decoder/layers/mlp")}, "Lora cannot be attached to decoder/layers/mlp: the module has no kernel"),
        ({"adapter": Adapter("token_embedder/none")}, "matches no module"),
        ({"adapter": Adapter("decoder/layers")}, "Adapter.modules matches a module that returns several arrays"),
        ({"kernel": Lora(".*/query")}, 'PEFT has the name "kernel", which is part of a parameter name of the base network'),
        (
            {"equation": Lora(".*/query")},
            'The module decoder/layers/self_attention/query has an attribute "equation". Choose another name',
        ),
        ({"lora": "lora"}, "It must be a PEFT method, such as @Lora"),
        ({"lora": Lora}, "It must be a PEFT method"),
        ({"lora/a": Lora()}, "A name consists of letters, digits"),
        ({"lora": Lora("(")}, "which is not a valid regular expression"),
    ],
)
def test_what_cannot_be_added_is_said(added, says):
    with pytest.raises(UserError, match=says):
        ModelConfig(tiny_config("causal_decoder"), added)


def test_what_cannot_be_trained_is_said():
    optimizer = Adafactor(LearningRate("constant", 0.01))
    for trainable, says in (
        (".*/lora/.*", "which matches no parameter. Examples of names: a/b"),
        ("(", "which is not a valid regular expression"),
    ):
        with pytest.raises(UserError, match=says):
            trained_predicate(optimizer, ["a/b"], trainable)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("added", ["lora", "adapters"])
def test_a_run_trains_peft_parameters_of_a_base_model(added, tmp_path):
    """Initial parameters need no rules. Only PEFT parameters change. They can be saved, loaded and merged alone."""
    base = str(tmp_path / "base")
    assert main(flags("encoder_decoder", SPANS, base, 2)) == 0
    more = [
        f"--gin_file=peft/{added}.gin", f"--gin.INITIAL_CHECKPOINT_PATH={base}", "--gin.OPTIMIZER=@AdamW()",
        "--gin.LearningRate.factors=constant", "--gin.LearningRate.base_learning_rate=0.01", "--gin.CHECKPOINT_PERIOD=2",
    ]  # fmt: skip
    whole = str(tmp_path / "whole")
    assert main(flags("encoder_decoder", SPANS, whole, 2, *more)) == 0
    of_base, run = t5x_lab.load(base), t5x_lab.load(whole)
    before, after = flat_names(of_base.params), flat_names(run.params)
    moved = {name for name, x in after.items() if name not in before or not np.array_equal(x, before[name])}
    trainable = re.compile(GinConfig((f"peft/{added}.gin",)).text.split("TRAINABLE = ")[1].splitlines()[0].strip("'\""))
    assert moved == {name for name in after if trainable.fullmatch(name)} and after.keys() > before.keys()
    assert run.generate(["a"], max_tokens=2) and main(["eval", f"--model_dir={whole}"]) == 0

    text, texts = ["a text"], ["of words"]
    run.save_adapter(str(tmp_path / "alone"))
    for directory in (whole, str(tmp_path / "alone")):
        on_top = of_base.with_adapter(directory)
        assert on_top.score(text, texts) == run.score(text, texts)
        own = flat_names(on_top.params)
        shared = {name for name, x in before.items() if own[name] is x}
        assert shared == {name for name in before if not trainable.fullmatch(name)}
    files = lambda path: sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())
    assert files(tmp_path / "alone" / "checkpoints") < 0.5 * files(f"{base}/checkpoints/2/params")
    with pytest.raises(UserError, match="belongs to a base model with .* This model (has shape|does not have it)"):
        t5x_lab.from_gin(["models/decoder/tiny.gin"]).with_adapter(whole)
    with pytest.raises(UserError, match="This model has .*(adapter|lora).*, which the base model of .* does not have"):
        run.with_adapter(_with_another_name(tmp_path, whole))
    with pytest.raises(UserError, match="All parameters of this model are trained. Save and load the whole model"):
        of_base.with_adapter(base)
    with pytest.raises(
        UserError, match=r"holds only PEFT parameters; .* of its base model is missing. .* t5x_lab.load\(BASE\).with_adapter"
    ):
        t5x_lab.load(str(tmp_path / "alone"))
    assert of_base.with_adapter(whole)._inference is of_base.with_adapter(str(tmp_path / "alone"))._inference  # compiled once

    began = t5x_lab.from_gin([f"{base}/config.gin", f"peft/{added}.gin"], checkpoint=base)
    assert began.score(["a text"], ["of words"]) == of_base.score(["a text"], ["of words"])
    if added == "lora":
        alone = run.merged()
        assert flat_names(alone.params).keys() == before.keys()
        np.testing.assert_allclose(alone.score(["a"], ["of words"]), run.score(["a"], ["of words"]), rtol=1e-4)
        alone.save(str(tmp_path / "merged"))
        assert t5x_lab.load(str(tmp_path / "merged")).score(["a"], ["of words"]) == alone.score(["a"], ["of words"])
    else:
        with pytest.raises(UserError, match="Adapter cannot be merged into the base parameters"):
            run.merged()
    for change in ("TRAINABLE=.*norm/.*", "Lora.alpha=64.0" if added == "lora" else "Adapter.modules='decoder/layers/mlp'"):
        assert main(flags("encoder_decoder", SPANS, whole, 3, *more, f"--gin.{change}")) == 2


@pytest.mark.exhaustive
def test_training_of_peft_parameters_resumes_exactly():
    """Two runs of two steps give the parameters of one run of four, bit by bit."""
    assert main(flags("encoder_decoder", SPANS, "base", 2)) == 0
    more = ["--gin_file=peft/lora.gin", "--gin.INITIAL_CHECKPOINT_PATH=base", "--gin.CHECKPOINT_PERIOD=2", "--gin.EVALS=()"]
    for run, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        assert main(flags("encoder_decoder", SPANS, run, steps, *more)) == 0
    jax.tree.map(np.testing.assert_array_equal, t5x_lab.load("parts").params, t5x_lab.load("whole").params)


def _with_another_name(tmp_path, whole):
    """The same as in `whole`, added under another name."""
    run = t5x_lab.load(whole)
    names = {"lora": "thin", "adapter": "thin"}
    rename = lambda tree: {names.get(k, k): rename(x) if isinstance(x, dict) else x for k, x in tree.items()}
    (name,) = run.config.model().peft
    kind = {"lora": "Lora", "adapter": "Adapter"}[name]
    config = GinConfig((), (run.config.text, f'PEFT = {{"thin": @{kind}()}}', 'TRAINABLE = ".*/thin/.*"'))
    save_run(str(tmp_path / "renamed"), config.text, rename(run.params), 2)
    return str(tmp_path / "renamed")


def test_what_is_added_to_logits_counts():
    """LoRA of the matrix that makes logits: in logits, losses and scores, as merged into it."""
    more = ['PEFT = {"lora": @Lora()}', 'Lora.modules = ".*/query|logits_dense"', 'TRAINABLE = ".*/lora/.*"']
    run = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], [*LOUD, *more])
    draw = np.random.default_rng(0)
    run.params = jax.tree.map(lambda x: np.asarray(x) + draw.normal(size=x.shape).astype(np.float32) * 0.3, run.params)
    ids = lambda first: np.arange(first, first + 6)[None]
    batch = {"encoder_input_tokens": ids(3), "decoder_input_tokens": ids(4), "decoder_target_tokens": ids(5)}
    merged = run.merged()
    without = {name: tree for name, tree in run.params.items() if name != "logits_dense"}
    without["logits_dense"] = {"kernel": run.params["logits_dense"]["kernel"], "lora": jax.tree.map(
        np.zeros_like, run.params["logits_dense"]["lora"])}  # fmt: skip
    assert np.abs(run.with_params(without, 0).logits(**batch) - merged.logits(**batch)).max() > 0.1
    np.testing.assert_allclose(run.logits(**batch), merged.logits(**batch), atol=1e-4)
    assert run.loss(batch)["loss"] == pytest.approx(merged.loss(batch)["loss"], rel=1e-5)
    np.testing.assert_allclose(run.score(["a"], ["of"]), merged.score(["a"], ["of"]), rtol=1e-4)


def test_what_begins_with_zeros_learns_at_the_rate_that_is_set():
    """A step of the files' optimizer moves `up` by about the rate, and not by a thousandth of it."""
    for added in ("lora", "adapters"):
        run = GinConfig(
            ["models/t5_1_1/tiny.gin", "runs/finetune.gin", f"peft/{added}.gin"],
            [*LOUD, "MODEL_DIR = 'x'", "TRAIN_STEPS = 1", 'MIXTURE_OR_TASK_NAME = "sotu_span_corruption"',
             'TASK_FEATURE_LENGTHS = {"inputs": 32}'],
        ).run()  # fmt: skip
        model = Model(run.model)
        params = random_params(model)
        zero = jax.tree.map(jnp.zeros_like, params)
        optimizer = run.optimizer.make(model.axes)
        updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(zero), zero)
        moved = [float(jnp.abs(x).mean()) for name, x in flat_names(updates).items() if name.endswith("/up")]
        assert moved and all(0.0005 < x < 0.002 for x in moved)  # the rate is 0.001


def test_groups_that_are_not_frozen_are_saved_with_what_is_added(tmp_path):
    groups = ['PEFT = {"lora": @Lora()}', "OPTIMIZER = @Groups()",
              'Groups.groups = [(".*/lora/.*", @Adafactor()), (".*norm/scale", @AdamW()), (".*", None)]']  # fmt: skip
    base = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], LOUD)
    run = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], [*LOUD, *groups])
    changed = {
        name: x + (0.5 if "/lora/" in name or name.endswith("norm/scale") else 0) for name, x in flat_names(run.params).items()
    }
    run = run.with_params(_tree(changed), 3)
    run.save_adapter(str(tmp_path / "alone"))
    np.testing.assert_allclose(
        base.with_adapter(str(tmp_path / "alone")).score(["a"], ["b"]), run.score(["a"], ["b"]), rtol=1e-6
    )
    whole = t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], [*LOUD, groups[0]])
    with pytest.raises(UserError, match="All parameters of this model are trained"):
        whole.save_adapter(str(tmp_path / "whole"))


MISTAKES = {
    "a name that parts of the network have": (
        ['PEFT = {"query": @Lora()}'],
        'the name "query", which is part of a parameter name of the base network',
    ),
    "an adapter of logits": (
        ['PEFT = {"a": @Adapter()}', 'Adapter.modules = "logits_dense"'],
        "Adapter cannot be attached to logits_dense",
    ),
    "an adapter of heads": (
        ['PEFT = {"a": @Adapter()}', 'Adapter.modules = ".*/query"'],
        "Adapter.modules matches a module that returns an array of shape",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_said_in_a_sentence(case):
    lines, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence):
        t5x_lab.from_gin(["models/t5_1_1/tiny.gin"], [*LOUD, *lines])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_lora_goes_to_and_comes_from_peft(kind, tmp_path):
    """Logits equal those of peft on the same weights, both ways; several LoRAs stand over one base's arrays."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[compare]' compares with peft")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, num_layers=2, num_heads=4)
    if kind == "t5":
        config = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, feed_forward_proj="gated-gelu", **sizes)
        hf_model, targets = transformers.T5ForConditionalGeneration(config), ["q", "v", "o", "wi_0", "wo"]
    else:
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        hf_model, targets = transformers.LlamaForCausalLM(config), ["q_proj", "k_proj", "o_proj", "down_proj"]
    hf_model.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False)
    with_lora = peft.get_peft_model(hf_model, lora).eval()
    with_lora.save_pretrained(tmp_path / "theirs")
    ids = np.random.default_rng(0).integers(1, 96, (2, 6))

    def logits_of(model):
        more = {"decoder_input_ids": torch.tensor(ids[:, :4])} if kind == "t5" else {}
        with torch.no_grad():
            return model(input_ids=torch.tensor(ids), **more).logits.numpy()

    def logits_of_run(run):
        if kind == "t5":
            return run.logits(encoder_input_tokens=ids, decoder_input_tokens=ids[:, :4])
        return run.logits(decoder_input_tokens=ids)

    base = t5x_lab.load(str(tmp_path / "base"), dtype="float32")
    run = base.with_peft(str(tmp_path / "theirs"))
    expected = logits_of(with_lora)
    np.testing.assert_allclose(logits_of_run(run), expected, rtol=1e-4, atol=2e-5)
    assert np.abs(logits_of_run(base) - expected).max() > 1e-2
    before = flat_names(base.params)
    assert all(before[name] is x for name, x in flat_names(run.params).items() if name in before)

    run.save_peft(str(tmp_path / "ours"))
    fresh = type(hf_model).from_pretrained(tmp_path / "base")
    np.testing.assert_allclose(logits_of(peft.PeftModel.from_pretrained(fresh, tmp_path / "ours").eval()), expected, atol=1e-5)
    np.testing.assert_array_equal(logits_of_run(base.with_peft(str(tmp_path / "ours"))), logits_of_run(run))
    np.testing.assert_allclose(logits_of_run(run.merged()), expected, rtol=1e-4, atol=2e-5)

    settings = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    for name, value in (("use_dora", True), ("init_lora_weights", "pissa")):  # the latter changes the base's weights
        (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps({**settings, name: value}))
        with pytest.raises(UserError, match=f"uses {name}, which is not supported"):
            base.with_peft(str(tmp_path / "theirs"))
    with pytest.raises(UserError, match="is not a LoRA configuration of peft"):
        base.with_peft(str(tmp_path / "base"))
    with pytest.raises(UserError, match="Only LoRA can be written for peft"):
        base.save_peft(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="exists. Choose a new directory"):
        run.save_peft(str(tmp_path / "ours"))


@pytest.mark.parametrize("policy", [exhaustive("everything"), "boundaries"])
def test_flops_of_training_are_those_of_the_gradients_that_are_computed(policy):
    """A third of the FLOPs of each matrix product of T5 1.1 is its weight gradient, which frozen kernels do not have."""
    more = ["TRAIN_STEPS = 1", "MODEL_DIR = 'x'", f'TransformerConfig.remat_policy = "{policy}"']
    run = lambda *files, more=more: GinConfig(["models/t5_1_1/tiny.gin", "objectives/span_corruption.gin", *files], more).run()
    S, T = 96, 32
    plain = run()
    c = plain.model.network
    whole = training_flops(plain, Model(plain.model), S, T)
    assert whole == c.flops(S, T)
    E, D, inner = c.num_encoder_layers, c.num_decoder_layers, c.num_heads * c.head_dim
    scores = 2 * inner * (E * S * S + D * T * T + D * T * S)
    attention, logits = 2 * scores, 2 * T * c.emb_dim * c.vocab_size
    kernels = whole / 3 - attention - logits
    prompt = run("peft/soft_prompt.gin", more=[*more, "SOFT_PROMPT_LENGTH = 4"])
    assert training_flops(prompt, Model(prompt.model), S, T) == pytest.approx(3 * attention + 2 * (kernels + logits), rel=0.02)
    lora = run("peft/lora.gin")
    thin = 2 * 8 * (c.emb_dim + inner) * (2 * E * S + 2 * D * T + D * (T + S))  # of rank 8, on queries and values
    assert training_flops(lora, Model(lora.model), S, T) == pytest.approx(
        3 * attention + 2 * (kernels + logits) + 3 * thin, rel=0.02
    )
    last = run(more=[*more, 'TRAINABLE = ".*logits.*"'])
    assert training_flops(last, Model(last.model), S, T) == pytest.approx(attention + kernels + 2 * logits, rel=0.02)
