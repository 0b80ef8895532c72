"""Gin as T5X's users write it, and mistakes in their own modules."""

import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from gin.config import _REGISTRY
from helpers import documented

from t5x_lab.checkpoints.layout import absolute_path
from t5x_lab.checkpoints.manager import save_params
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log_once
from t5x_lab.config.macros import macro_bindings
from t5x_lab.config.renamed import replace_old_names
from t5x_lab.config.t5x_names import ROWS, TABLE, UNCHANGED_MACROS, documentation, hint
from t5x_lab.migration.translate import RULES
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.configurables import CONFIGURABLES
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.load import load
from t5x_lab.runs.model.sharded_model import ShardedModel
from t5x_lab.runs.train.assemble import assemble

FILES = ["models/t5_1_1/tiny.gin", "objectives/span_corruption.gin"]
NEEDED = ["MODEL_DIR = 'x'", "TRAIN_STEPS = 3", "MIXTURE_OR_TASK_NAME = 'sotu'", "VOCABULARY = @ByteVocabulary()"]
DEFAULTS = "\n".join([*macro_bindings(CONFIGURABLES), (ROOT / "gin" / "runs" / "defaults.gin").read_text()])
FED_BY_MACROS = re.findall(r"^(\w+\.\w+) = %(\w+)$", DEFAULTS, re.MULTILINE)


@pytest.mark.parametrize("parameter, macro", FED_BY_MACROS, ids=[parameter for parameter, _ in FED_BY_MACROS])
def test_a_parameter_may_be_bound_itself_instead_of_the_macro_that_feeds_it(parameter, macro):
    by_macro = GinConfig(FILES, NEEDED)
    value = re.search(rf"^{macro} = (.*(?:\n    .*)*)", by_macro.text, re.MULTILINE)[1]
    without = [text for text in NEEDED if not text.startswith(f"{macro} =")]
    for config in (parsed := GinConfig(FILES, [*without, f"{parameter} = {value}"])), GinConfig([], [parsed.text]):
        assert config.run() == by_macro.run()
        assert (config.model(), config.mesh()) == (by_macro.model(), by_macro.mesh())
        assert config.vocabulary() == by_macro.vocabulary()


def test_a_macro_on_the_command_line_that_has_no_effect_is_refused():
    with pytest.raises(UserError, match="CHECKPOINT_PERIOD has no effect: its parameter is bound directly. Remove one"):
        GinConfig(FILES, [*NEEDED, "SaveCheckpointConfig.period = 5", "CHECKPOINT_PERIOD = 7"])


def test_dynamic_registration_finds_our_names_too(tmp_path):
    (tmp_path / "my_module.py").write_text("class Mine:\n    def __init__(self, size=3):\n        self.size = size\n")
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nimport my_module\n\n"
        'BATCH_SIZE = 16\nSaveCheckpointConfig.period = 5\nLearningRate.factors = "constant"\nmy_module.Mine.size = 4\n'
    )
    config = GinConfig([*FILES, "mine.gin"], NEEDED)
    assert "my_module" in config.text and "Mine" not in config.used_text
    for run in (config.run(), GinConfig([], [config.text]).run(), GinConfig([], [config.used_text]).run()):
        assert (run.data.batch_size, run.saving.period, run.optimizer.learning_rate.factors) == (16, 5, "constant")
    (tmp_path / "wrong.gin").write_text("from __gin__ import dynamic_registration\n\nSaveCheckpointConfg.period = 5\n")
    with pytest.raises(UserError, match="SaveCheckpointConfg"):
        GinConfig([*FILES, "wrong.gin"], NEEDED)


@pytest.mark.parametrize(
    "source, says",
    [
        ("x = 1\ny = x / 0\n", r"line 2, raises ZeroDivisionError: division by zero\."),
        ("import seqio\n\nx = (1\n", r"line 3, raises SyntaxError: '\(' was never closed\."),
        ("import a_package_that_is_not_there\n", r"line 1, raises ModuleNotFoundError: No module named 'a_package_that_is"),
        ("class A:\n    pass\n\nA().b\n", r"line 4, raises AttributeError: 'A' object has no attribute 'b'\."),
    ],
)
def test_an_error_in_a_users_module_names_its_file_and_line(source, says):
    name = f"broken_{abs(hash(source))}"
    pathlib.Path(f"{name}.py").write_text(source)
    with pytest.raises(UserError, match=rf"^{name}\.py, {says}"):
        GinConfig([], [f"import {name}"])


def test_a_checkpoint_whose_module_is_gone_names_both(tmp_path):
    save_params(absolute_path(tmp_path / "checkpoints" / "0"), {"a": np.zeros(2)}, config="import a_module_that_is_gone\n")
    says = r"No module named 'a_module_that_is_gone' \(in the configuration of .*/checkpoints/0\)"
    with pytest.raises(UserError, match=says):
        load(str(tmp_path), trust=True)


def test_an_error_in_a_users_configurable_names_its_file_and_line():
    pathlib.Path("broken_schedule.py").write_text(
        "import gin\n\n@gin.configurable\ndef broken_schedule():\n    return {}['rate']\n"
    )
    config = GinConfig(FILES, [*NEEDED, "import broken_schedule", "Adafactor.learning_rate = @broken_schedule()"])
    with pytest.raises(UserError, match=r"^broken_schedule\.py, line 5, raises KeyError: 'rate'\."):
        config.run()


BOUND = pathlib.Path(ROOT.parent / "shared" / "facts" / "t5x_bindings.md")


@pytest.mark.parametrize(
    "line, says",
    [
        (
            "RANDOM_SEED = 3",
            "The macro RANDOM_SEED is not used. T5X's RANDOM_SEED is SEED here: 0 by default, so runs are reproducible.",
        ),
        ("network.T5Config.emb_dim = 8", "T5X's T5Config is TransformerConfig here"),
        ("train_eval/utils.DatasetConfig.batch_size = 8", "T5X's DatasetConfig.batch_size is BATCH_SIZE here."),
        ("partitioning.PjitPartitioner.num_partitions = 2", 'is MESH here: "data=-1,tensor=4" for 4 partitions.'),
        ("Adafactor.weight_decay_rate = 0.1", "T5X's Adafactor.weight_decay_rate is Adafactor.weight_decay here."),
        (
            "SaveCheckpointConfig.dtype = 'float32'",
            "T5X's SaveCheckpointConfig.dtype has no equivalent: checkpoints are float32",
        ),
        ("trainer.Trainer.num_microbatches = 2", "T5X's Trainer.num_microbatches is MICROBATCHES here."),
        ("utils.create_learning_rate_scheduler.factors = 'constant'", "is LearningRate here: with the same factors"),
        ("SentencePieceVocabulary.sentencepiece_model_file = 'x'", "is SentencePieceVocabulary.path here"),
        ("EVAL_STEPS = 3", "T5X's EVAL_STEPS is DataConfig.eval_steps here."),
        ("import t5x.utils", "A gin file imports t5x"),
    ],
)
def test_a_name_of_t5x_gets_ours_as_its_hint(line, says):
    with pytest.raises(UserError) as error:
        GinConfig(FILES, [*NEEDED, line]).run()
    assert says in error.value.sentence


def test_a_binding_of_an_installed_t5x_that_nothing_uses_is_refused(tmp_path, monkeypatch):
    """T5X's trainer is not called here. Its network may be: a reference makes its bindings effective."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "t5x").mkdir()
    (tmp_path / "t5x" / "__init__.py").write_text("")
    (tmp_path / "t5x" / "utils.py").write_text("class DatasetConfig:\n    def __init__(self, batch_size=1): pass\n")
    lines = ("from __gin__ import dynamic_registration", "from t5x import utils", "train/utils.DatasetConfig.batch_size = 8")
    with pytest.raises(UserError, match=r"t5x.utils.DatasetConfig.batch_size has no effect.* is BATCH_SIZE here"):
        GinConfig(FILES, [*NEEDED, *lines])
    GinConfig(FILES, [*NEEDED, *lines, "HOOKS = (@train/utils.DatasetConfig(),)"])


def test_every_name_that_t5xs_users_bind_is_ours_or_in_the_table():
    if not BOUND.exists():
        pytest.skip("needs the counts of what public projects bind, which are not here")
    names = re.findall(r"^\| `([\w./]+)` \| \d+ \| \d+ \|$", BOUND.read_text(), re.MULTILINE)
    unknown_names = [name for name in names if not hint(name) and not is_ours(name)]
    assert len(names) > 200 and unknown_names == [
        "create_task_from_tuples.vocab",
        "utils.SaveCheckpointConfig.period",
    ]  # one's own
    assert GinConfig(FILES, [*NEEDED, "utils.SaveCheckpointConfig.period = 5"]).run().saving.period == 5


def is_ours(name):
    """Whether a macro, a configurable or a parameter of one has this name here."""
    configurables = {selector.split(".")[-1]: entry for selector, entry in _REGISTRY._selector_map.items()}
    owner, _, parameter = name.partition(".")
    if parameter:
        return owner in configurables and parameter in inspect.signature(configurables[owner].wrapped).parameters
    return name in configurables or re.search(rf"^{name} =|%{name}\b", DEFAULTS, re.MULTILINE) is not None


def test_every_name_of_ours_in_the_table_exists():
    names = {name for rows in TABLE.values() for row in rows for name in row.equivalents.split(", ") if name}
    assert [name for name in sorted(names) if not is_ours(name)] == []


def test_the_documentation_has_the_table():
    assert documentation() in (ROOT / "docs" / "from_t5x.md").read_text()


@pytest.mark.parametrize("name", sorted(name for _, name in RULES if not name.endswith(".*")))
def test_every_name_that_migrate_translates_is_ours_or_has_its_hint(name):
    if not is_ours(name):
        with pytest.raises(UserError) as error:
            GinConfig(FILES, [*NEEDED, f"{name} = 1"]).run()
        assert f"T5X's {name}" in error.value.sentence or f"T5X's {name.partition('.')[0]} " in error.value.sentence


@pytest.mark.parametrize("name", sorted(name for name in ROWS if name not in UNCHANGED_MACROS))
def test_every_parameter_with_a_hint_is_translated(name):
    """Tests that what docs/from_t5x.md says of a parameter with one equivalent is what `migrate` does."""
    equivalents = ROWS[name].equivalents.split(", ")
    if "." in name and len(equivalents) == 1:
        assert ("", name) in RULES or ("", f"{name.partition('.')[0]}.*") in RULES


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "gin" / "optimizers").iterdir()))
def test_every_optimizer_file_binds_an_optimizer(file):
    run = GinConfig([*FILES, f"optimizers/{file}"], [*NEEDED, "TRAIN_STEPS = 5000"]).run()
    assert type(run.optimizer).__name__.lower() == file.removesuffix(".gin").replace("_", "")
    assert run.optimizer.make({"kernel": ("layers", "embed", "mlp")}) and float(run.optimizer.learning_rate(2000)) > 0


def test_an_optimizer_and_a_schedule_of_ones_own():
    """Tests the optimizer and the schedule of docs/custom_data.md."""
    pathlib.Path("my_optimizer.py").write_text(documented("custom/optimizer.md", "sign_sgd"))
    pathlib.Path("mine.gin").write_text(documented("custom/optimizer.md", "import my_optimizer"))
    config = GinConfig([*FILES, "mine.gin"], [*NEEDED, "halving.first = 0.25", "halving.every = 2"])
    for run in (config.run(), GinConfig([], [config.text]).run(), GinConfig([], [config.used_text]).run()):
        assert [float(run.optimizer.learning_rate(step)) for step in (0, 1, 2, 4)] == [0.25, 0.25, 0.125, 0.0625]
        params = {"w": np.ones((2, 2), np.float32)}
        transformation = run.optimizer.make({"w": ("embed", "mlp")})
        updates, _ = transformation.update({"w": -params["w"]}, transformation.init(params), params)
        np.testing.assert_allclose(updates["w"], 0.25)


@pytest.mark.slow
def test_an_activation_of_ones_own():
    """Squared ReLU (So et al. 2021), beside one of ours by name."""
    pathlib.Path("my_activation.py").write_text(
        "import gin\nimport jax\n\n@gin.configurable\ndef squared_relu(x):\n    return jax.nn.relu(x) ** 2\n"
    )
    bindings = ["import my_activation", 'TransformerConfig.mlp_activations = (@squared_relu, "linear")']
    config = GinConfig(FILES, [*NEEDED, *bindings])
    for model in (config.model(), GinConfig([], [config.text]).model()):
        activations = model.network.make(nnx.Rngs(0), lambda x, axes: x).encoder.layers.mlp.activations
        assert [float(f(np.float32(3.0))) for f in activations] == [9.0, 3.0]


@pytest.mark.parametrize(
    "name, expression, says",
    [
        ("summed", "lambda x: x.sum()", "returns bfloat16 [] for bfloat16 [2, 3]"),
        ("float32", "lambda x: x.astype('float32')", "It must keep shape"),
        ("two", "lambda x, y: x", "fails on a bfloat16 array: TypeError"),
    ],
)
def test_a_wrong_activation_is_a_sentence(name, expression, says):
    pathlib.Path(f"{name}_activation.py").write_text(
        f"import gin\n\n{name}_activation = gin.configurable('{name}_activation')({expression})\n"
    )
    bindings = [f"import {name}_activation", f"TransformerConfig.mlp_activations = (@{name}_activation,)"]
    with pytest.raises(UserError) as error:
        GinConfig(FILES, [*NEEDED, *bindings]).model()
    assert says in error.value.sentence


@pytest.mark.parametrize(
    "name, body, says",
    [
        (
            "number",
            "return 3",
            "RunConfig.optimizer is 3. It must be an optimizer, with learning_rate and make. Bind an instance with parentheses",
        ),
        (
            "no_optax",
            "return Optax(7, lambda step: 0.1)",
            "Optax.make(axes) returned 7. It must return an optax GradientTransformation",
        ),
        ("no_scalar", "return Optax(optax.sgd(0.1), lambda step: jnp.ones(3) * step)", "for a step. It must return a scalar"),
        ("raises", "raise ValueError('no')", "raises.py, line 10, raises ValueError: no."),
    ],
)
def test_a_wrong_optimizer_is_a_sentence(name, body, says):
    head = "import gin\nimport jax.numpy as jnp\nimport optax\n\nfrom t5x_lab.protocols import Optax\n\n\n"
    pathlib.Path(f"{name}.py").write_text(f"{head}@gin.configurable\ndef optimizer_{name}():\n    {body}\n")
    with pytest.raises(UserError) as error:
        run = GinConfig(FILES, [*NEEDED, f"import {name}", f"OPTIMIZER = @optimizer_{name}()"]).run()
        sharded = ShardedModel(run.model, MeshShape(1, 1, 1), jax.devices()[:1])
        assemble(sharded, run.optimizer, batch_size=8, microbatches=1, seed=0)
    assert says in error.value.sentence


def test_names_of_the_last_release_are_replaced_and_logged(capsys):
    log_once.cache_clear()
    old = ['include "added/lora.gin"', "MetricsEvaluation.cut_inputs = 'left'", "MetricsEvaluation.beginning = 'a'"]
    new = ['include "peft/lora.gin"', "MetricsEvaluation.truncate_inputs = 'left'", "MetricsEvaluation.decoder_prefix = 'a'"]
    evaluation = ["EVALS = (@MetricsEvaluation(),)", "INFER_EVAL_PERIOD = 2"]
    assert GinConfig(FILES, [*NEEDED, *old, *evaluation]).run() == GinConfig(FILES, [*NEEDED, *new, *evaluation]).run()
    err = capsys.readouterr().err
    assert 'The gin name "MetricsEvaluation.cut_inputs" is now "MetricsEvaluation.truncate_inputs"' in err
    assert 'The gin name "added/lora.gin" is now "peft/lora.gin"' in err
    assert replace_old_names("a/ADDED = 1\nADDED = {}\nMY_ADDED = 2") == "a/PEFT = 1\nPEFT = {}\nMY_ADDED = 2"


def test_a_macro_of_a_file_may_be_replaced_by_a_binding_of_its_parameter():
    """This is as in T5X. A macro that no file uses is a mistake, and so is one that one command line sets and replaces."""
    pathlib.Path("mine.gin").write_text('include "models/t5_1_1/tiny.gin"\nWIDTH = 24\nTransformerConfig.emb_dim = %WIDTH\n')
    width = lambda *bindings: GinConfig(["mine.gin"], bindings).model().network.emb_dim
    assert width() == 24 and width("WIDTH = 16") == 16
    pathlib.Path("mine.gin").write_text(
        'include "models/t5_1_1/tiny.gin"\nBASE = 24\nWIDTH = %BASE\nTransformerConfig.emb_dim = %WIDTH\n'
    )
    replaced = GinConfig(["mine.gin"], ["TransformerConfig.emb_dim = 32"])
    assert replaced.model().network.emb_dim == 32 and "WIDTH" not in replaced.text
    with pytest.raises(UserError, match="WIDTH has no effect: its parameter is bound directly"):
        width("WIDTH = 16", "TransformerConfig.emb_dim = 32")
    pathlib.Path("mine.gin").write_text('include "models/t5_1_1/tiny.gin"\nWIDTH = 24  # not %WIDTH\n')
    with pytest.raises(UserError, match="The macro WIDTH is not used"):
        width()
