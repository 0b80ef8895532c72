"""Tasks are SeqIO tasks: its functions read t5x_lab's by name, and T5's tasks and mixtures are read in a run's vocabulary."""

import io
import json
import re
import shlex

import numpy as np
import pytest
import sentencepiece
import seqio
import tensorflow as tf
from conftest import shared_data
from helpers import exhaustive_except

import t5x_lab
import t5x_lab.tasks
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.named import OBJECTIVES
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.evaluation_batches import eval_batches
from t5x_lab.data.tasks import names as tasks
from t5x_lab.data.vocabularies.build import build_vocabulary, sentinel_ids
from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary
from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece
from t5x_lab.data.vocabularies.sentinels import num_sentinels
from t5x_lab.observe.metrics import read_metrics


def architecture_for(objective):
    if objective == "masked_lm":
        return "encoder"
    return "prefix_decoder" if objective in ("full_lm", "prefix_lm") else "encoder_decoder"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    exhaustive_except(
        [name for name in OBJECTIVES if "architecture" not in name],
        (
            "full_lm",
            "prefix_lm",
            "masked_lm",
            "span_corruption",
            "ul2",
            "deshuffling",
            "drop_tokens",
            "mass_style",
            "bert_style",
        ),
    ),
)
def test_seqio_reads_by_name_what_a_run_reads(name):
    architecture = architecture_for(name)
    wished = {"targets": 64} if architecture == "prefix_decoder" else {"inputs": 64}
    config = DataConfig(f"sotu_{name}", wished, 8, ByteVocabulary(), pack=False, eval_steps=1)
    resolved = resolve_tasks(config, architecture, 384)
    (rows,) = eval_batches(resolved, resolved.components[0], config)
    task = seqio.get_mixture_or_task(f"sotu_{name}")
    examples = task.get_dataset(resolved.components[0].lengths, "validation", shuffle=False, seed=0).take(8).as_numpy_iterator()
    for row, example in enumerate(examples):
        if architecture == "prefix_decoder":
            expected = {"decoder_target_tokens": np.concatenate([example.get("inputs", []), example["targets"]])}
        else:
            stream = "encoder" if architecture == "encoder" else "decoder"
            expected = {"encoder_input_tokens": example["inputs"], f"{stream}_target_tokens": example["targets"]}
        for feature, tokens in expected.items():
            np.testing.assert_array_equal(rows[feature][row][: len(tokens)], tokens)
            assert not rows[feature][row][len(tokens) :].any()


@pytest.mark.slow
def test_own_tasks_stand_in_anybodys_mixture_and_need_lengths():
    seqio.MixtureRegistry.add("two_objectives", [("sotu_span_corruption", 3.0), ("sotu_ul2", 1.0)])
    try:
        dataset = seqio.get_mixture_or_task("two_objectives").get_dataset({"inputs": 64, "targets": 64}, "train", seed=0)
        example = next(dataset.as_numpy_iterator())
        assert set(example) == {"inputs", "targets"} and len(example["inputs"]) <= 64
        with pytest.raises(UserError, match="Pass sequence_length to get_dataset"):
            seqio.get_mixture_or_task("sotu_full_lm").get_dataset(None, "train")
        assert "c4_span_corruption" in seqio.TaskRegistry.names()  # nothing of C4 has been looked for
        with pytest.raises(UserError, match="needs your files. Set .--gin.TextFiles.train"):
            seqio.get_mixture_or_task("files_mass_style").get_dataset({"inputs": 8, "targets": 8}, "train")
    finally:
        seqio.MixtureRegistry.remove("two_objectives")


GLUE = {  # features of TFDS's glue, without their label
    "ax": ("premise", "hypothesis"), "cola": ("sentence",), "mnli": ("premise", "hypothesis"),
    "mnli_matched": ("premise", "hypothesis"), "mnli_mismatched": ("premise", "hypothesis"), "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"), "qqp": ("question1", "question2"), "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",), "stsb": ("sentence1", "sentence2"),
}  # fmt: skip


def _dataset(examples):
    return tf.data.Dataset.from_tensor_slices({name: [example[name] for example in examples] for name in examples[0]})


def write_glue(folder):
    """GLUE in TFDS's layout, 12 examples a split; `ax` has a test split alone, two have no training split, as T5 knows them."""
    import tensorflow_datasets as tfds

    for config, names in GLUE.items():
        label = tfds.features.Scalar(tf.float32) if config == "stsb" else tfds.features.ClassLabel(num_classes=2)
        features = {**{name: tfds.features.Text() for name in names}, "label": label, "idx": tfds.features.Scalar(tf.int32)}
        examples = [
            {**{name: f"{config} {name} {n}" for name in names}, "label": 1.5 if config == "stsb" else n % 2, "idx": n}
            for n in range(12)
        ]
        splits = ["test"] if config == "ax" else ["validation", "test"] if "matched" in config else ["train", "validation"]
        tfds.dataset_builders.store_as_tfds_dataset(
            "glue", version="1.0.0", features=tfds.features.FeaturesDict(features), config=config, data_dir=str(folder),
            split_datasets={split: _dataset(examples) for split in splits},
        )  # fmt: skip


@pytest.mark.slow
def test_seqios_evaluator_reads_an_objectives_task():
    """Ours have no metrics of their own; with one, SeqIO's Evaluator gives the model the task's targets, and gets them back."""
    tasks.known_names()
    actual = seqio.get_mixture_or_task("sotu_span_corruption")
    same = lambda targets, predictions: {"same": float(np.mean([p == t for p, t in zip(predictions, targets, strict=True)]))}
    measured = seqio.Task(
        "measured", actual.source, output_features=actual.output_features, preprocessors=actual.preprocessors,
        metric_fns=[same], postprocess_fn=lambda target, **_: target,
    )  # fmt: skip
    seqio.TaskRegistry.add_provider("measured", measured)
    try:
        lengths = {"inputs": 64, "targets": 30}
        options = dict(feature_converter=seqio.EncDecFeatureConverter(pack=False), sequence_length=lengths, num_examples=8)
        evaluator = seqio.Evaluator("measured", eval_split="validation", **options)
        answers = lambda examples: [(i, example["decoder_target_tokens"]) for i, example in examples.as_numpy_iterator()]
        result, _ = evaluator.evaluate(compute_metrics=True, step=0, predict_fn=answers, score_fn=None)[:2]
        results = result.result() if hasattr(result, "result") else result
        assert results["measured"]["same"] == 1.0
    finally:
        seqio.TaskRegistry.remove("measured")


@pytest.mark.exhaustive
def test_t5s_own_mixture_is_read_in_the_runs_vocabulary(tmp_path, monkeypatch, capsys):
    """`glue_v002_proportional`: eleven tasks in T5's vocabulary on gs://, of which eight have something to train on."""
    import t5.data.mixtures  # noqa: F401
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    seqio.set_tfds_data_dir_override(str(tmp_path))
    seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()
    write_glue(tmp_path)
    path = shared_data("t5_vocabulary", "sentencepiece.model")
    try:
        config = DataConfig(
            "glue_v002_proportional", {"inputs": 64, "targets": 8}, 64, SentencePieceVocabulary(str(path)), shards=2, pack=False
        )
        resolved = resolve_tasks(config, "encoder_decoder", 32128)
        assert len(resolved.components) == 11 and len(resolved.train_components) == 8
        stderr = capsys.readouterr().err
        assert "replaces the vocabulary of glue_ax_v002, glue_cola_v002, glue_mnli_matched_v002 and 8 more" in stderr
        assert 'without the split "train" or with rate 0 are skipped: glue_ax_v002' in stderr
        vocabulary = build_vocabulary(config.vocabulary)
        batches, prefixes = SeqioBatches(resolved, config, seed=0), set()
        for _ in range(4):
            prefixes |= {vocabulary.decode([int(t) for t in row]).split()[0] for row in next(batches)["encoder_input_tokens"]}
        assert prefixes >= {"mnli", "qnli", "qqp", "sst2"}
        assert {part.task.name: part.rate for part in resolved.train_components}[
            "glue_mnli_v002"
        ] == 392_702  # T5's, which are constants
        with pytest.raises(UserError, match='"glue_ax_v002" has no split "train" to train on; it has test'):
            alone = resolve_tasks(
                DataConfig("glue_ax_v002", {"inputs": 64, "targets": 8}, 8, config.vocabulary), "encoder_decoder", 32128
            )
            SeqioBatches(alone, config, seed=0)
        rows = [
            batch
            for part in resolved.components
            if "validation" in part.task.splits
            for batch in eval_batches(resolved, part, config)
        ]
        assert len(rows) == 10 and all(row["encoder_input_tokens"].shape == (64, 64) for row in rows)

        trained = [
            "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_bindings=import t5.data.mixtures",
            f"--gin.MODEL_DIR={tmp_path}/run", "--gin.MIXTURE_OR_TASK_NAME=glue_v002_proportional",
            f"--gin.SentencePieceVocabulary.path={path}", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 8}',
            "--gin.BATCH_SIZE=8", "--gin.DATA_SHARDS=1", "--gin.TRAIN_STEPS=3",
        ]  # fmt: skip
        assert main(trained) == 0
        lines = read_metrics(tmp_path / "run")
        assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3]
    finally:
        seqio.set_tfds_data_dir_override(None)
        seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()


def test_a_model_without_sentinels_has_none(tmp_path):
    """SentencePiece models like Llama's, and like mT5's, whose last pieces are sentinels."""
    text = [f"some words of text number {n} that make pieces" for n in range(300)]

    def train(name, symbols):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=model, vocab_size=60, user_defined_symbols=symbols, minloglevel=2,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False,
        )  # fmt: skip
        (tmp_path / name).write_bytes(model.getvalue())
        return SentencePieceVocabulary(str(tmp_path / name), extra_ids=0)

    plain, counted = train("plain.model", []), train("mt5.model", [f"▁<extra_id_{n}>" for n in range(9, -1, -1)])
    assert list(sentinel_ids(build_vocabulary(plain))) == [] and num_sentinels(plain) == 0
    ids = list(sentinel_ids(build_vocabulary(counted)))
    pieces = build_vocabulary(counted).tokenizer
    assert [pieces.IdToPiece(i) for i in ids] == [f"▁<extra_id_{n}>" for n in range(10)] and num_sentinels(counted) == 10
    gemmas = train("gemma.model", [f"<unused{n}>" for n in range(10)])
    assert build_vocabulary(gemmas).tokenizer.IdToPiece(list(sentinel_ids(build_vocabulary(gemmas)))) == [
        f"<unused{n}>" for n in range(10)
    ]
    build_vocabulary(SentencePieceVocabulary(gemmas.path, extra_ids=100))  # T5's way, beside them
    with pytest.raises(UserError, match="and 0 sentinels have no room for"):
        resolve_tasks(DataConfig("sotu_span_corruption", {"inputs": 64}, 4, plain), "encoder_decoder", 384)


class Shouting(seqio.Task):
    """A task class of one's own."""

    def preprocess_postcache(self, dataset, sequence_length, seed=None):
        dataset = super().preprocess_postcache(dataset, sequence_length, seed)
        return dataset.map(lambda example: {**example, "targets": tf.ones_like(example["targets"]) * 7})


def test_the_runs_vocabulary_leaves_features_without_text_alone():
    features = {
        "inputs": seqio.Feature(seqio.ByteVocabulary(extra_ids=7)),
        "targets": seqio.Feature(seqio.PassThroughVocabulary(size=4), add_eos=False),
    }
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=["train"])
    task = Shouting("shouting", source, output_features=features, preprocessors=[])
    config = DataConfig("shouting", {"inputs": 8, "targets": 1}, 4, ByteVocabulary(extra_ids=50))
    read = tasks.VocabularyReplacer(config)(task)
    assert type(read) is Shouting and read.name == "shouting"
    assert read.output_features["inputs"].vocabulary.extra_ids == 50
    assert read.output_features["targets"].vocabulary is features["targets"].vocabulary
    assert task.output_features["inputs"].vocabulary.extra_ids == 7
    same = tasks.VocabularyReplacer(config)(read)
    assert same is read


TWO_VOCABULARIES = """
import seqio
import tensorflow as tf

PAIRS = {"train": [(f"word {n}", f"the answer {n}") for n in range(32)], "validation": [("word 1", "the answer 1")] * 2}


def read(split, shuffle_files, seed=None):
    inputs, targets = map(list, zip(*PAIRS[split]))
    return tf.data.Dataset.from_tensor_slices({"inputs": inputs, "targets": targets})


seqio.TaskRegistry.add(
    "two_vocabularies",
    seqio.FunctionDataSource(read, splits=("train", "validation")),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={
        "inputs": seqio.Feature(seqio.SentencePieceVocabulary("pieces.model", extra_ids=7)),
        "targets": seqio.Feature(seqio.ByteVocabulary(20)),
    },
)
"""


@pytest.mark.slow
def test_inputs_and_targets_may_have_vocabularies_of_their_own(tmp_path, monkeypatch, capsys):
    """The log of a run with another vocabulary has the flags that set the task's own, as they stand."""
    monkeypatch.syspath_prepend(str(tmp_path))
    train_sentencepiece(["some words have an answer, one to nine: 0123456789"] * 40, "pieces.model", 40, "bpe")
    (tmp_path / "task_of_two_vocabularies.py").write_text(TWO_VOCABULARIES)
    train = [
        "train", "--gin_file=models/t5_1_1/tiny.gin", "--gin_bindings=import task_of_two_vocabularies", "--gin.MODEL_DIR=run",
        "--gin.MIXTURE_OR_TASK_NAME=two_vocabularies", '--gin.TASK_FEATURE_LENGTHS={"inputs": 32, "targets": 32}',
        "--gin.BATCH_SIZE=8", "--gin.DATA_SHARDS=1", "--gin.TRAIN_STEPS=2", "--gin.TransformerConfig.vocab_size=384",
    ]  # fmt: skip
    assert main([*train, "--dry_run", "--gin.VOCABULARY=@ByteVocabulary()"]) == 0
    flags = shlex.split(re.search(r"VOCABULARY, .*, replaces .* has its own with (.*)", capsys.readouterr().err)[1])
    assert len(flags) == 5 and "--gin.INPUT_VOCABULARY=@inputs/SentencePieceVocabulary()" in flags
    assert main([*train, *flags]) == 0 and "replaces the vocabulary" not in capsys.readouterr().err

    run = t5x_lab.load("run")
    pieces, data = sentencepiece.SentencePieceProcessor(model_file="pieces.model"), run.config.data()
    inputs = [*pieces.encode("word 1"), pieces.eos_id()]
    targets = [*(byte + 3 for byte in b"the answer 1"), 1]
    (rows,) = eval_batches(resolved := resolve_tasks(data, "encoder_decoder", 384), resolved.components[0], data)
    assert rows["encoder_input_tokens"][0][: len(inputs)].tolist() == inputs
    assert rows["decoder_target_tokens"][0][: len(targets)].tolist() == targets
    by_ids = run.score([inputs], [targets])
    assert run.score(["word 1"], ["the answer 1"], eos=True) == pytest.approx(by_ids)
    infer = ["infer", "--model_dir=run", "--task=two_vocabularies", "--split=validation", "--mode=score", "--output=out.jsonl"]
    assert main(infer) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert line["score"] == pytest.approx(by_ids[0], rel=1e-5) and line["inputs"] == "word 1"
    assert run.generate(["word 1"], max_tokens=3) == run.generate([inputs], max_tokens=3)

    capsys.readouterr()
    for argv, says in (
        (["convert", "--source=run", "--to=hf", "--target=hf"], "this run has an INPUT_VOCABULARY beside it"),
        ([*train, *flags, "--gin_file=models/decoder/tiny.gin", "--gin.MODEL_DIR=other"], "only an encoder-decoder reads inputs"),
        ([*train, *flags, "--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption", "--gin.MODEL_DIR=other"], "inputs and targets of one text"),
        ([*train, *flags, "--gin.INPUT_VOCABULARY=@ByteVocabulary()", "--gin.TRAIN_STEPS=3"], "INPUT_VOCABULARY"),
    ):  # fmt: skip
        assert main(argv) == 2 and says in capsys.readouterr().err, says
