"""Converters: SeqIO's, a user's and our own; training, evaluation, dry run and compile take shapes from the same one."""

import dataclasses
import pathlib

import numpy as np
import pytest
import seqio
import tensorflow as tf
from helpers import exhaustive, exhaustive_except
from runs_of_text import flags

import t5x_lab.tasks  # noqa: F401  (registers the texts)
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import PACKAGE_GIN
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.packing.feature_converter import FeatureConverter
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.evaluation_batches import eval_batches
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.observe.metrics import read_metrics
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.train.batch import resolve_batch

BYTES = seqio.ByteVocabulary(extra_ids=100)
TOKENS, RAW = seqio.Feature(BYTES), seqio.Feature(BYTES, add_eos=False)


def numbers(split, shuffle_files, seed=None):
    return tf.data.Dataset.range(1, 60).map(lambda n: {"n": tf.cast(n, tf.int32)})


def row(first, length):
    return tf.range(first, first + length)


def add_task(name, make, *more, **features):
    """A task whose n-th example is what `make` makes of n."""
    source = seqio.FunctionDataSource(numbers, ["train", "validation"])
    step = lambda dataset: dataset.map(lambda example: make(example["n"]))
    seqio.TaskRegistry.remove(name)
    return seqio.TaskRegistry.add(name, source, preprocessors=[step, *more], output_features=features)


PAIR = lambda n: {"inputs": row(3 + n % 9, 1 + n % 7), "targets": row(20 + n % 5, 1 + n % 4)}


@pytest.fixture
def tasks():
    """Tasks of kinds that public projects have."""
    add_task("pairs", PAIR, inputs=RAW, targets=RAW)
    add_task("undeclared", PAIR, targets=RAW)
    model_features = lambda n: {"decoder_target_tokens": row(5, 1 + n % 6), "decoder_loss_weights": row(5, 1 + n % 6) % 2}
    add_task("for_decoders", model_features, decoder_target_tokens=RAW, decoder_loss_weights=RAW)
    weighed = lambda n: {"decoder_target_tokens": row(5, 1 + n % 6), "decoder_loss_weights": tf.fill([1 + n % 6], 0.5)}
    add_task("weighed", weighed, decoder_target_tokens=RAW, decoder_loss_weights=dataclasses.replace(RAW, dtype=tf.float32))
    add_task("filled", lambda n: {"decoder_target_tokens": tf.ensure_shape(row(n, 8), [8])}, decoder_target_tokens=RAW)
    label = seqio.Feature(seqio.PassThroughVocabulary(3), add_eos=False, rank=0)
    dense = seqio.Feature(seqio.PassThroughVocabulary(1), add_eos=False, rank=2, dtype=tf.float32)
    labelled = lambda n: {**PAIR(n), "label": n % 3, "image": tf.fill([1 + n % 3, 2], tf.cast(n, tf.float32))}
    add_task("labelled", labelled, inputs=RAW, targets=RAW, label=label, image=dense)
    optional = dataclasses.replace(RAW, required=False)
    add_task("optional", lambda n: {"targets": PAIR(n)["targets"]}, inputs=optional, targets=RAW)
    segments = lambda n: {
        "inputs": row(3, 5), "inputs_segment_ids": tf.constant([1, 1, 2, 2, 2]),
        "targets": row(9, 3), "targets_segment_ids": tf.constant([1, 2, 2]),
    }  # fmt: skip
    add_task("in_twos", segments, inputs=RAW, targets=RAW, inputs_segment_ids=RAW, targets_segment_ids=RAW)
    names = ["pairs", "undeclared", "for_decoders", "weighed", "filled", "labelled", "optional", "in_twos"]
    seqio.MixtureRegistry.add("both_weighed", [("for_decoders", 1.0), ("weighed", 1.0)])
    seqio.MixtureRegistry.add("several", [("pairs", 1.0), ("optional", 2.0), ("sotu_span_corruption", 1.0)])
    yield
    seqio.MixtureRegistry.remove("several")
    seqio.MixtureRegistry.remove("both_weighed")
    for name in names:
        seqio.TaskRegistry.remove(name)


def batch_of(name, architecture="encoder_decoder", lengths={"inputs": 8, "targets": 6}, **options):
    """(what is told of a training batch, a training batch, one of evaluation)"""
    data = DataConfig(name, dict(lengths), 8, ByteVocabulary(), shards=2, **options)
    described = resolve_batch(data, architecture)
    resolved = resolve_tasks(data, architecture, 384)
    return described, next(SeqioBatches(resolved, data, seed=0)), next(eval_batches(resolved, resolved.components[0], data))


def shapes(batch):
    return {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in batch.items()}


LENGTHS = {"decoder_target_tokens": 8, "decoder_loss_weights": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, architecture, options",
    [
        *[("pairs", architecture, {}) for architecture in ("encoder_decoder", "causal_decoder", "prefix_decoder")],
        exhaustive("pairs", "prefix_decoder", dict(pack=False)),
        exhaustive("undeclared", "encoder_decoder", {}),
        ("undeclared", "causal_decoder", dict(lengths={"targets": 6})),
        ("for_decoders", "causal_decoder", dict(lengths=LENGTHS)),
        ("weighed", "causal_decoder", dict(lengths=LENGTHS)),
        exhaustive("labelled", "encoder_decoder", {}),
        ("labelled", "encoder_decoder", dict(lengths={"inputs": 8, "targets": 6, "image": 4}, pack=False)),
        exhaustive("optional", "prefix_decoder", {}),
        ("optional", "encoder_decoder", {}),
        ("in_twos", "encoder_decoder", {}),
        exhaustive("in_twos", "encoder_decoder", dict(pack=False)),
        exhaustive("several", "encoder_decoder", {}),
        ("several", "causal_decoder", dict(lengths={"inputs": 64, "targets": 30})),
        ("pairs", "encoder_decoder", dict(converter=seqio.EncDecFeatureConverter())),
        ("pairs", "prefix_decoder", dict(converter=seqio.PrefixLMFeatureConverter(loss_on_targets_only=False))),
        exhaustive("several", "encoder_decoder", dict(converter=seqio.EncDecFeatureConverter(pack=False))),
        ("filled", "causal_decoder", dict(lengths={"decoder_target_tokens": 8}, converter=seqio.PassThroughFeatureConverter())),
    ],
)
def test_what_is_told_of_a_batch_is_what_is_trained_and_evaluated(tasks, name, architecture, options):
    described, trained, evaluated = batch_of(name, architecture, **options)
    assert shapes(described.features) == shapes(trained)
    without_tasks = {feature: x for feature, x in trained.items() if feature not in ("task_tokens", "task")}
    assert shapes(evaluated) == shapes(without_tasks)
    assert len(described.counted_tasks) == (trained["task_tokens"].shape[1] if "task_tokens" in trained else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name, weights", [("weighed", {0.5}), ("both_weighed", {0.5, 1})])
def test_weights_of_losses_may_be_fractions(tasks, name, weights):
    _, trained, _ = batch_of(name, "causal_decoder", lengths=LENGTHS)
    assert set(np.unique(trained["decoder_loss_weights"])) - {0} == weights


@pytest.mark.exhaustive
def test_what_is_told_is_trained_for_every_objective():
    """Tests each objective with each of its architectures. `replace_spans_…` and `span_corruption_…` differ in numbers alone."""
    names = [name for name in OBJECTIVES if not name.startswith(("replace_spans_", "span_corruption_"))]
    for number, name in enumerate(names):
        objective = OBJECTIVES[name]
        for architecture in ("encoder_decoder", "causal_decoder", "encoder"):
            if objective.refusal(architecture) is None:
                lengths = {"inputs" if "inputs" in objective.needed_lengths(architecture) else "targets": 48}
                data = DataConfig(f"sotu_{name}", lengths, 8, ByteVocabulary(), shards=1, pack=number % 2 == 0)
                described, resolved = resolve_batch(data, architecture), resolve_tasks(data, architecture, 384)
                assert shapes(described.features) == shapes(next(SeqioBatches(resolved, data, seed=0))), (name, architecture)


OBJECTIVE_FILES = sorted(str(path.relative_to(PACKAGE_GIN)) for path in PACKAGE_GIN.glob("objectives/**/*.gin"))


@pytest.mark.slow
@pytest.mark.parametrize("file", exhaustive_except([*OBJECTIVE_FILES, "recipes/demo.gin"], OBJECTIVE_FILES[::3]))
def test_what_is_told_is_trained_for_every_gin_file(file):
    """Uses the gin file's own lengths and objective on a small text, with a model that it supports."""
    bindings = ["VOCABULARY = @ByteVocabulary()", "BATCH_SIZE = 2", "DATA_SHARDS = 1", "MODEL_DIR = 'run'"]
    models = [] if file.startswith("recipes") else ["decoder", "t5_1_1", "encoder"]
    for model in models or [None]:
        files = [file] if model is None else [f"models/{model}/tiny.gin", file]
        name = GinConfig(files, bindings).data().mixture_or_task_name.replace("c4", "sotu")
        config = GinConfig(files, [*bindings, f"MIXTURE_OR_TASK_NAME = {name!r}"])
        architecture, data = config.model().network.architecture, config.data()
        try:
            described = resolve_batch(data, architecture)
        except UserError as error:
            assert "cannot be trained on" in error.sentence
            continue
        resolved = resolve_tasks(data, architecture, 10**6)
        assert shapes(described.features) == shapes(next(SeqioBatches(resolved, data, seed=0)))
        return
    raise AssertionError("no architecture is made for it")


@pytest.mark.slow
def test_seqios_own_converters_give_the_rows_that_ours_give():
    """Unpacked, of the same examples; and with their own options."""
    dataset = numbers("train", False).take(9).map(lambda example: PAIR(example["n"]))
    lengths = {"inputs": 8, "targets": 6}
    for architecture, seqio_converter in (
        ("encoder_decoder", seqio.EncDecFeatureConverter(pack=False)),
        ("prefix_decoder", seqio.PrefixLMFeatureConverter(pack=False)),
    ):
        actual = FeatureConverter(architecture, pack=False)(dataset, lengths).as_numpy_iterator()
        for row, expected in zip(actual, seqio_converter(dataset, lengths).as_numpy_iterator(), strict=True):
            assert set(expected) <= set(row)
            for name in expected:
                np.testing.assert_array_equal(row[name], expected[name], err_msg=name)


@pytest.mark.slow
def test_features_of_every_kind_come_as_they_are(tasks):
    _, batch, _ = batch_of("labelled", lengths={"inputs": 8, "targets": 6, "image": 4}, pack=False)
    assert batch["label"].shape == (8,) and batch["image"].shape == (8, 4, 2) and batch["image"].dtype == np.float32
    for label, image, inputs in zip(batch["label"], batch["image"], batch["encoder_input_tokens"], strict=True):
        n = int(image[0, 0])
        assert label == n % 3 and (image.sum(1) > 0).sum() == 1 + n % 3 and inputs[0] == 3 + n % 9

    _, batch, _ = batch_of("for_decoders", "causal_decoder", lengths=LENGTHS)
    tokens, weights, segments = (batch[f"decoder_{name}"] for name in ("target_tokens", "loss_weights", "segment_ids"))
    assert (segments.max(1) > 1).any()
    np.testing.assert_array_equal(weights, tokens % 2)
    np.testing.assert_array_equal(batch["raw_tokens"], (tokens > 0).sum(1))

    _, batch, _ = batch_of("undeclared")
    assert (batch["encoder_input_tokens"][:, 0] >= 3).all()


@pytest.mark.slow
def test_texts_of_one_example_are_told_apart(tasks):
    """Each comes as a segment, with positions of its own, packed with others or not."""
    for pack in (True, False):
        _, batch, _ = batch_of("in_twos", lengths={"inputs": 16, "targets": 7}, pack=pack)
        inputs = [1, 1, 2, 2, 2, 3, 3, 4, 4, 4] if pack else [1, 1, 2, 2, 2]
        targets = [1, 2, 2, 3, 4, 4] if pack else [1, 2, 2]
        for side, segments, length in (("encoder", inputs, 16), ("decoder", targets, 7)):
            np.testing.assert_array_equal(batch[f"{side}_segment_ids"], [segments + [0] * (length - len(segments))] * 8)
            positions = [segments[:i].count(segment) for i, segment in enumerate(segments)]
            np.testing.assert_array_equal(batch[f"{side}_positions"], [positions + [0] * (length - len(segments))] * 8)
        starts = batch["decoder_input_tokens"][:, : len(targets)] == 0
        np.testing.assert_array_equal(starts[0], [targets[:i].count(s) == 0 for i, s in enumerate(targets)])


@pytest.mark.parametrize(
    "converter, says",
    [
        (lambda ds, lengths: ds.map(lambda x: {"decoder_target_tokens": x["targets"]}), "The converter makes .* A compiled program needs all sizes"),
        (lambda ds, lengths: ds.map(lambda x: x["labels"]), r"The converter function fails on examples with inputs, targets, .*labels"),
        (seqio.LMFeatureConverter(), r"The converter LMFeatureConverter fails .* contains extra features"),
    ],
    ids=["unknown sizes", "a feature that is not there", "other features"],
)  # fmt: skip
def test_what_is_said_of_a_wrong_converter(tasks, converter, says):
    with pytest.raises(UserError, match=says):
        batch_of("pairs", converter=converter)


OWN = '''
import gin, jax.numpy as jnp, tensorflow as tf
from flax import nnx


class Labels:
    """Frames [T, 4] of numbers in place of input tokens, and the label in five copies [5, 1]."""

    def __call__(self, ds, task_feature_lengths):
        length = task_feature_lengths["inputs"]

        def convert(example):
            tokens = example["inputs"][:length]
            tokens = tf.ensure_shape(tf.pad(tokens, [[0, length - tf.size(tokens)]]), [length])
            frames = tf.stack([tf.cast(tokens, tf.float32) / n for n in range(100, 104)], 1)
            return {"decoder_input_tokens": frames, "decoder_target_tokens": tokens, "labels": tf.fill([5, 1], example["label"])}

        return ds.map(convert)


class Net(nnx.Module):
    architecture, vocab_size = "causal_decoder", 384

    def __init__(self, rngs):
        self.frames, self.output = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 384, rngs=rngs)

    def __call__(self, batch):
        return self.frames(batch["decoder_input_tokens"]) + batch["labels"][:, :1, 0, None]

    def logits(self, hidden):
        return self.output(hidden)

    def flops(self, encoder_length, decoder_length):
        return 6 * 384 * 8 * decoder_length


def label_loss(network, hidden, batch, weights):
    return jnp.sum(batch["labels"][:, 0, 0] * 1.0) + 0.0 * jnp.sum(hidden)


gin.external_configurable(Labels)
gin.external_configurable(Net)
gin.external_configurable(label_loss)
'''


@pytest.mark.slow
def test_a_converter_a_network_and_a_loss_of_ones_own_share_a_feature(tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "with_labels.py").write_text(OWN)
    (tmp_path / "own.gin").write_text(
        "import with_labels\nMODEL = @ModelConfig()\nModelConfig.network = @Net\n"
        "ModelConfig.losses = {'of_labels': @label_loss}\nDataConfig.converter = @Labels()\nOPTIMIZER = @AdamW()\n"
        "VOCABULARY = @ByteVocabulary()\nMIXTURE_OR_TASK_NAME = 'labelled'\nTASK_FEATURE_LENGTHS = {'inputs': 8}\n"
        "BATCH_SIZE = 8\nDATA_SHARDS = 2\nTRAIN_STEPS = 3\nEVAL_PERIOD = 3\nMODEL_DIR = 'run'\n"
    )
    assert main(["train", "--gin_file=own.gin", "--dry_run"]) == 0
    assert "8 rows of 0 + 8 tokens" in capsys.readouterr().out
    assert main(["train", "--gin_file=own.gin"]) == 0
    metrics = read_metrics("run")
    assert [m["split"] for m in metrics].count("train") == 3 and any(m["split"] == "eval/labelled" for m in metrics)
    assert all(0 < m["of_labels"] < 2 for m in metrics)
    assert main(["compile", "--gin_file=own.gin"]) == 0
    assert main(["train", "--gin_file=own.gin", "--gin.DataConfig.converter=None", "--gin.MODEL_DIR=other"]) == 2
    error = capsys.readouterr().err
    assert "The network Net fails on a batch of decoder_input_tokens, " in error and "raises TypeError: dot_general" in error


@pytest.mark.exhaustive
def test_a_converter_of_seqios_is_bound_from_gin(tasks, tmp_path, monkeypatch):
    """The converter is registered by gin's dynamic registration. Another start id changes the losses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.gin").write_text(
        "from __gin__ import dynamic_registration\nimport seqio\nDataConfig.converter = @seqio.EncDecFeatureConverter()\n"
        "seqio.EncDecFeatureConverter.pack = True\n"
    )
    text = ["--gin.MIXTURE_OR_TASK_NAME=pairs", '--gin.TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 6}']
    losses = []
    for start in (0, 7):
        bos = [f"--gin.seqio.EncDecFeatureConverter.bos_id={start}"]
        assert main([*flags("encoder_decoder", text, f"run{start}", 3, *bos), "--gin_file=own.gin"]) == 0
        losses.append([m["loss"] for m in read_metrics(f"run{start}") if m["split"] == "train"])
    assert len(losses[0]) == 3 and np.isfinite(losses).all() and losses[0] != losses[1]
    assert pathlib.Path("run0/config.gin").read_text().count("EncDecFeatureConverter")
    assert main(["train", "--gin_file=run0/config.gin", "--gin.TRAIN_STEPS=4"]) == 0
