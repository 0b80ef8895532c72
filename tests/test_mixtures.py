"""Mixing rates by counting what comes out, truncated data sets, and the same examples again and again."""

import dataclasses
import hashlib
import re

import commands
import numpy as np
import pytest
import seqio
import tensorflow as tf
from etils import epath
from helpers import exhaustive
from runs_of_text import flags

import t5x_lab.tasks  # noqa: F401  (registers the texts)
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig, Mixing, TextFiles
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.sources import text_files as sources
from t5x_lab.data.tasks import names as tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.prompts.config import Collection
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.runs.train.batch import resolve_batch
from t5x_lab.training.batches import Rows

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
# Training examples, as T5's mixture has them.
SIZES = {"cola": 8_551, "squad": 87_599, "cnn": 287_113, "mnli": 392_702, "ende": 4_548_885}


@pytest.fixture
def mixture():
    """Five tasks, each of one example, its first target telling which."""

    def source(number):
        def dataset(split, shuffle_files=False, seed=None):
            return tf.data.Dataset.from_tensors({"inputs": [9], "targets": [number]}).repeat(64)

        return seqio.FunctionDataSource(
            dataset, splits=["train"], num_input_examples={"train": list(SIZES.values())[number - 3]}
        )

    features = {name: seqio.Feature(VOCABULARY, add_eos=False) for name in ("inputs", "targets")}
    for number, name in enumerate(SIZES, start=3):
        seqio.TaskRegistry.add(name, source(number), preprocessors=[_as_int32], output_features=features)
    seqio.MixtureRegistry.add("five", list(SIZES), default_rate=seqio.mixing_rate_num_examples)
    yield "five"
    seqio.MixtureRegistry.remove("five")
    for name in SIZES:
        seqio.TaskRegistry.remove(name)


def _as_int32(dataset):
    return dataset.map(lambda x: {name: tf.cast(tokens, tf.int32) for name, tokens in x.items()})


def formula(maximum, temperature):
    """Raffel et al., section 3.5.2."""
    rates = np.array([min(size, maximum) for size in SIZES.values()], float)
    rates = (rates / rates.sum()) ** (1 / temperature)
    return rates / rates.sum()


MIXINGS = [
    (None, formula(10**9, 1)),  # the mixture's own rates
    (Mixing(maximum=2**16), formula(2**16, 1)),
    (Mixing(maximum=2**19), formula(2**19, 1)),
    (Mixing(maximum=2**21, temperature=2.0), formula(2**21, 2)),
    (Mixing(maximum=2**21, temperature=4.0), formula(2**21, 4)),
    (Mixing(maximum=2**21, temperature=8.0), formula(2**21, 8)),
    (Mixing(equal=True), np.full(5, 0.2)),
]


def mixed(mixture, mixing):
    """The configuration of a mixture, what it resolves to, and the place of each part's task in `SIZES`."""
    lengths, options = {"inputs": 1, "targets": 1}, dict(shards=2, pack=False, shuffle_buffer_size=1)
    config = DataConfig(mixture, lengths, 1000, ByteVocabulary(), mixing=mixing, **options)
    resolved = resolve_tasks(config, "encoder_decoder", 384)
    return config, resolved, [list(SIZES).index(part.task.name) for part in resolved.components]


def test_rates_are_the_papers(mixture):
    for mixing, expected in MIXINGS:
        _, mixing_rates, order = mixed(mixture, mixing)
        rates = np.array([part.rate for part in mixing_rates.components])
        np.testing.assert_allclose(rates / rates.sum(), expected[order], err_msg=str(mixing))


@pytest.mark.slow
def test_examples_come_out_at_their_rates(mixture):
    """50,000 examples, each share within four standard errors; by their targets, and by the tokens counted for each task."""
    mixing, expected = MIXINGS[4]
    config, mixing_rates, order = mixed(mixture, mixing)
    batches = SeqioBatches(mixing_rates, config, seed=0)
    drawn, counted = np.zeros(5), np.zeros(5)
    for _ in range(50):
        batch = next(batches)
        drawn += np.bincount(batch["decoder_target_tokens"][:, 0] - 3, minlength=5)
        counted += batch["task_tokens"].sum(0)
    np.testing.assert_array_equal(counted, 2 * drawn[order])  # one token of input and one of target each
    error = 4 * np.sqrt(expected * (1 - expected) / drawn.sum())
    assert drawn.sum() == 50_000 and (np.abs(drawn / drawn.sum() - expected) < error).all(), (drawn / drawn.sum(), expected)


def test_sizes_that_nobody_knows_are_asked_for_and_can_be_given(mixture):
    lengths = {"inputs": 8, "targets": 8}
    unknown = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=["train"])
    features = seqio.TaskRegistry.get("cola").output_features
    seqio.TaskRegistry.add("unknown", unknown, preprocessors=[], output_features=features)
    seqio.MixtureRegistry.add("with_unknown", [("cola", 1.0), ("unknown", 1.0)])
    try:
        config = DataConfig("with_unknown", lengths, 4, ByteVocabulary(), mixing=Mixing(maximum=1000))
        with pytest.raises(UserError, match='number of training examples of the task "unknown" is unknown'):
            resolve_tasks(config, "encoder_decoder", 384).rates()
        with_sizes = Mixing(maximum=1000, num_examples={"unknown": 250})
        config = DataConfig("with_unknown", lengths, 4, ByteVocabulary(), mixing=with_sizes)
        assert [part.rate for part in resolve_tasks(config, "encoder_decoder", 384).components] == [1000, 250]
    finally:
        seqio.MixtureRegistry.remove("with_unknown")
        seqio.TaskRegistry.remove("unknown")


def test_a_collection_may_hold_texts_of_the_run(mixture, tmp_path):
    """The text is found under its name, read from this run's file also after another run had one of the same name."""
    for word, members in (("apple", ("mine_prefix_lm", "ende")), ("river", ("cola", "mine_prefix_lm"))):
        (tmp_path / f"{word}.txt").write_text(f"{word} {word} {word}\n" * 40)
        prompts = Prompts(collections={"both": Collection(members=members, rates={"mine_prefix_lm": 3.0, members[0]: 3.0})})
        texts = {"mine": TextFiles(train=str(tmp_path / f"{word}.txt"))}
        mixing = Mixing(maximum=1000, num_examples={"mine_prefix_lm": 250})
        lengths = {"inputs": 32, "targets": 32}
        config = DataConfig("both", lengths, 4, ByteVocabulary(), prompts=prompts, texts=texts, mixing=mixing, shards=1)
        parts = {part.task.name: part for part in resolve_tasks(config, "encoder_decoder", 384).components}
        other = next(member for member in members if member != "mine_prefix_lm")
        assert {name: part.rate for name, part in parts.items()} == {"mine_prefix_lm": 250, other: 1000}
        example = next(parts["mine_prefix_lm"].task.get_dataset(lengths, "train", shuffle=False).as_numpy_iterator())
        assert word in parts["mine_prefix_lm"].task.output_features["targets"].vocabulary.decode(example["targets"].tolist())
    with pytest.raises(UserError, match='has the member "mine_prefix_ml"'):
        wrong = Prompts(collections={"both": Collection(members=("mine_prefix_ml",))})
        resolve_tasks(dataclasses.replace(config, prompts=wrong), "encoder_decoder", 384)


def test_a_mixture_may_hold_text_whose_objective_is_set_apart(mixture):
    seqio.MixtureRegistry.add("text_too", [("sotu", 3.0), ("squad", 1.0)])
    try:
        config = DataConfig("text_too", {"inputs": 64, "targets": 64}, 4, ByteVocabulary(), objective="span_corruption")
        parts = resolve_tasks(config, "encoder_decoder", 384).components
        assert {part.task.name: part.rate for part in parts} == {"sotu_span_corruption": 3.0, "squad": 1.0}
        by_size = DataConfig(
            "text_too", {"inputs": 64, "targets": 64}, 4, ByteVocabulary(), objective="span_corruption", mixing=Mixing()
        )
        rates = {part.task.name: part.rate for part in resolve_tasks(by_size, "encoder_decoder", 384).components}
        assert rates["squad"] == SIZES["squad"] and 1000 < rates["sotu_span_corruption"] < 5000  # its documents are counted
    finally:
        seqio.MixtureRegistry.remove("text_too")


@pytest.mark.slow
def test_texts_by_name_are_read_at_their_rates(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {n} red and green" for n in range(300)))
    texts = {name: TextFiles(train=str(tmp_path / f"{name}.txt"), rate=rate) for name, rate in (("one", 3.0), ("two", 1.0))}
    settings = dict(texts=texts, objective="full_lm")
    drawn = tokens_by_task("texts", {"targets": 16}, "causal_decoder", **settings)
    assert abs(drawn[0] / drawn.sum() - 0.75) < 0.03
    alone = DataConfig("two", {"targets": 16}, 4, ByteVocabulary(), **settings)
    assert [part.task.name for part in resolve_tasks(alone, "causal_decoder", 384).components] == ["two_full_lm"]
    lines = {name: dataclasses.replace(text, lines_per_document=1) for name, text in texts.items()}
    by_size = DataConfig("texts_prefix_lm", {"targets": 16}, 4, ByteVocabulary(), texts=lines, mixing=Mixing(maximum=5))
    assert resolve_tasks(by_size, "causal_decoder", 384).rates() == [5, 5]


@pytest.mark.slow
def test_rates_may_be_shares_of_tokens(mixture):
    """`five` has rates of its own; its first two tasks are given examples of 1 and of 5 targets."""
    longer = lambda dataset: dataset.map(lambda x: {**x, "targets": tf.repeat(x["targets"], 5)})
    features = seqio.TaskRegistry.get("cola").output_features
    seqio.TaskRegistry.add("long", seqio.TaskRegistry.get("squad").source, features, [_as_int32, longer])
    seqio.MixtureRegistry.add("uneven", [("cola", 1.0), ("long", 2.0)])
    try:
        drawn = tokens_by_task("uneven", {"inputs": 8, "targets": 8}, "encoder_decoder", rates_of="tokens")
        assert abs(drawn[0] / drawn.sum() - 1 / 3) < 0.02  # 2 and 6 tokens an example with its input: 3 examples to 2
        drawn = tokens_by_task("uneven", {"inputs": 8, "targets": 8}, "encoder_decoder")
        assert abs(drawn[0] / drawn.sum() - 2 / 14) < 0.02
    finally:
        seqio.MixtureRegistry.remove("uneven")
        seqio.TaskRegistry.remove("long")


def tokens_by_task(name, lengths, architecture, batches=150, **settings):
    config = DataConfig(name, lengths, 32, ByteVocabulary(), **settings)
    stream = SeqioBatches(resolve_tasks(config, architecture, 384), config, seed=0)
    return sum(next(stream)["task_tokens"].sum(axis=0) for _ in range(batches))


def test_documents_are_counted_once_and_not_to_tell_shapes(tmp_path, monkeypatch):
    counts, reduce = [], tf.data.Dataset.reduce
    monkeypatch.setattr(tf.data.Dataset, "reduce", lambda self, *args: counts.append(1) or reduce(self, *args))
    for name, size in (("few", 8), ("many", 24)):
        (tmp_path / f"{name}.txt").write_text("one line\n" * size)
        files = {"train": [str(tmp_path / f"{name}.txt")]}
        tasks.register_text(name, sources.document_files(files, lines_per_document=1))
    seqio.MixtureRegistry.add("texts", [("few", 1.0), ("many", 1.0)])
    try:
        config = DataConfig("texts", {"targets": 8}, 4, ByteVocabulary(), objective="full_lm", mixing=Mixing())
        resolved = resolve_batch(config, "causal_decoder").tasks
        assert not counts
        assert resolved.rates() == [8, 24] and len(counts) == 2
        assert resolve_tasks(config, "causal_decoder", 384).rates() == [8, 24] and len(counts) == 2
        (tmp_path / "few.txt").write_text("one line\n" * 9)
        assert resolve_tasks(config, "causal_decoder", 384).rates() == [9, 24]
    finally:
        seqio.MixtureRegistry.remove("texts")
        for name in ("few", "many"):
            tasks.remove_text(name)


@pytest.mark.slow
def test_a_run_that_goes_on_counts_nothing_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts, reduce = [], tf.data.Dataset.reduce
    (tmp_path / "a.txt").write_text("red and green\n" * 400)
    cut = [f"--gin_bindings={name}/TextFiles.lines_per_document = {lines}" for name, lines in (("one", 1), ("two", 2))]
    named = '--gin_bindings=TEXTS = {"one": @one/TextFiles(), "two": @two/TextFiles()}'
    text = ["--gin.MIXTURE_OR_TASK_NAME=texts_full_lm", '--gin.TASK_FEATURE_LENGTHS={"targets": 32}', "--gin.DATA_SHARDS=1"]
    more = [named, *cut, "--gin.one/TextFiles.train=a.txt", "--gin.two/TextFiles.train=a.txt", "--gin.MIXING=@Mixing()"]
    train = lambda steps: main(flags("causal_decoder", text, "run", steps, *more))
    assert train(2) == 0
    counted = read_info(epath.Path("run/checkpoints/2"))["documents"]
    assert sorted(counted.values()) == [200, 400]
    sources.document_counts.clear()
    monkeypatch.setattr(tf.data.Dataset, "reduce", lambda self, *args: counts.append(1) or reduce(self, *args))
    assert train(3) == 0 and not counts


def test_mistakes_in_texts_are_sentences():
    file = TextFiles(train="a.txt")
    for texts, says in (
        ({"w": "good.txt"}, r'TEXTS\["w"\] is .good.txt.. It must be TextFiles'),
        ({"my-text": file}, 'TEXTS has a text called "my-text". Use letters, digits and "_".'),
        ({"texts": file}, 'TEXTS has a text called "texts"'),
        ({"sotu": file}, 'TEXTS has a text called "sotu", the name of a registered text'),
        ({}, '"texts_full_lm" stands for all of TEXTS, which is empty'),
    ):
        with pytest.raises(UserError, match=says):
            config = DataConfig("texts_full_lm", {"targets": 8}, 4, ByteVocabulary(), texts=texts)
            resolve_tasks(config, "causal_decoder", 384)


@pytest.mark.slow
def test_a_truncated_data_set_is_the_same_tokens_in_every_epoch():
    """240 documents of 50 tokens, the first telling which; 1,025 unique tokens in two shards, met many times over."""
    documents = [[3 + n, *[255] * 49] for n in range(240)]

    def dataset(split, shuffle_files=False, seed=None):
        numbered = tf.data.Dataset.from_tensor_slices({"targets": tf.constant(documents, tf.int32)})
        return numbered.shuffle(240, seed=seed) if shuffle_files else numbered

    source = seqio.FunctionDataSource(dataset, splits=["train"])
    features = {"targets": seqio.Feature(VOCABULARY, add_eos=False)}
    seqio.TaskRegistry.add("numbered", source, preprocessors=[], output_features=features)
    try:
        config = DataConfig(
            "numbered", {"targets": 50}, 4, ByteVocabulary(), objective="full_lm", unique_tokens=1025, shards=2, pack=False
        )
        batches = SeqioBatches(resolve_tasks(config, "causal_decoder", 384), config, seed=0)
        rows = np.concatenate([next(batches)["decoder_target_tokens"] for _ in range(60)])
        # Per shard 512 or 513 tokens: ten documents of 50, and 12 or 13 tokens of an eleventh.
        numbers = np.unique(rows[(rows > 2) & (rows < 255)]) - 3
        assert sorted(numbers) == sorted(2 * n + shard for n in range(11) for shard in range(2))
        times = np.bincount(rows[(rows > 2) & (rows < 255)] - 3)[numbers]
        assert times.min() > 3, "each is met many times over"
        assert (rows == 255).sum() / (rows == 1).sum() == pytest.approx((1025 - 22) / 22, rel=0.03)
    finally:
        seqio.TaskRegistry.remove("numbered")


SETTINGS = [
    (name, "causal_decoder" if name == "full_lm" else "encoder" if name == "masked_lm" else "encoder_decoder")
    for name in ("full_lm", "prefix_lm", "masked_lm", "bert_style", "deshuffling", "mass_style", "replace_spans", "drop_tokens",
                 "span_corruption", "ul2")
]  # fmt: skip


def documents(split, shuffle_files=False, seed=None):
    texts = [f"document {n} says {'word ' * (n % 7)}and ends here" for n in range(100)]
    dataset = tf.data.Dataset.from_tensor_slices({"text": texts})
    return dataset.shuffle(100, seed) if shuffle_files else dataset


def stream(name, architecture, seed=0, rows=Rows.all, shards=1):
    tasks.known_names()
    tasks.register_text("documents", seqio.FunctionDataSource(documents, splits=["train"]))
    try:
        lengths = {"targets": 33} if name in ("full_lm", "prefix_lm") else {"inputs": 48}
        options = dict(objective=name, shards=shards, shuffle_buffer_size=10)
        config = DataConfig("documents", lengths, 4, ByteVocabulary(), **options)
        return SeqioBatches(resolve_tasks(config, architecture, 384), config, seed, rows)
    finally:
        tasks.remove_text("documents")


def digest(batch):
    return hashlib.md5(b"".join(name.encode() + batch[name].tobytes() for name in sorted(batch))).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, architecture", [*SETTINGS[:3], SETTINGS[-1], *(exhaustive(*setting) for setting in SETTINGS[3:-1])]
)
def test_a_stream_resumes_where_it_was(name, architecture, tmp_path):
    batches = stream(name, architecture)
    for _ in range(3):
        next(batches)
    batches.save(epath.Path(tmp_path))
    later = [digest(next(batches)) for _ in range(3)]
    again = stream(name, architecture)
    again.restore(epath.Path(tmp_path), epath.Path(tmp_path))
    assert [digest(next(again)) for _ in range(3)] == later


@pytest.mark.slow
def test_a_stream_is_split_among_processes():
    """Two shards of two rows; the even split, and one where both processes hold the second shard."""
    name = "prefix_lm"
    whole = stream(name, "encoder_decoder", shards=2)
    expected = [next(whole) for _ in range(2)]
    for rows in ([0, 1], [2, 3], [0, 1, 2]):
        part = stream(name, "encoder_decoder", rows=lambda size, own=np.array(rows): Rows(own, own), shards=2)
        for batch in expected:
            assert digest(next(part)) == digest({feature: x[rows] for feature, x in batch.items()})


def digest_of(name, architecture, seed=0):
    return digest(next(stream(name, architecture, seed)))


@pytest.mark.slow
def test_another_process_makes_the_same_batches_and_another_seed_others():
    local_digest = digest_of("ul2", "encoder_decoder")
    assert local_digest == commands.call(digest_of, "ul2", "encoder_decoder") != digest_of("ul2", "encoder_decoder", seed=1)


def test_unique_tokens_of_several_texts_are_their_sum(tmp_path):
    """Splits 400 tokens into 300 of a text of rate 3 and 100 of one of rate 1. Numbers in the texts show how far they are read."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name[0]}{n:04d}" for n in range(400)))
    texts = {name: TextFiles(train=str(tmp_path / f"{name}.txt"), rate=rate) for name, rate in (("one", 3.0), ("two", 1.0))}
    config = DataConfig("texts_full_lm", {"targets": 20}, 4, ByteVocabulary(), texts=texts, unique_tokens=400, shards=1)
    batches = SeqioBatches(resolve_tasks(config, "causal_decoder", 384), config, 0)
    rows = [row for _ in range(60) for row in next(batches)["decoder_target_tokens"].tolist()]
    text = " ".join("".join(chr(token - 3) for token in row if token > 2) for row in rows)
    last = {letter: max(map(int, re.findall(rf"{letter}(\d{{4}})", text))) for letter in "ot"}
    assert last == {"o": 300 // 5 - 1, "t": 100 // 5 - 1}


def test_tasks_without_records_are_left_out_and_unknown_sizes_named(tmp_path, capsys):
    (tmp_path / "full.txt").write_text("some text\n" * 300)
    (tmp_path / "empty.txt").write_text("")
    texts = {name: TextFiles(train=str(tmp_path / f"{name}.txt")) for name in ("full", "empty")}
    config = DataConfig("texts_full_lm", {"targets": 16}, 4, ByteVocabulary(), texts=texts, shards=2)
    batch = next(SeqioBatches(resolve_tasks(config, "causal_decoder", 384), config, 0))
    assert batch["decoder_target_tokens"].all()
    assert "Tasks of texts_full_lm without training records are skipped: empty_full_lm." in capsys.readouterr().err

    class Unknown(seqio.FunctionDataSource):
        def num_input_examples(self, split):
            return None

    source = Unknown(lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensors({"targets": "a"}), ("train",))
    steps = [seqio.preprocessors.tokenize]
    features = {"targets": seqio.Feature(seqio.ByteVocabulary(100))}
    seqio.TaskRegistry.add("of_unknown_size", source, preprocessors=steps, output_features=features)
    seqio.MixtureRegistry.add("by_sizes", [("of_unknown_size", seqio.mixing_rate_num_examples)])
    try:
        config = DataConfig("by_sizes", {"targets": 16}, 4, ByteVocabulary(), shards=1)
        with pytest.raises(UserError, match='number of training examples of the task "of_unknown_size" is unknown'):
            resolve_tasks(config, "causal_decoder", 384).rates()
    finally:
        seqio.MixtureRegistry.remove("by_sizes")
        seqio.TaskRegistry.remove("of_unknown_size")
