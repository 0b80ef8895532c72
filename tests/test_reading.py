"""Shards of tasks: every document is drawn alike, whatever files it lies in, how many shards there are, or what it is mixed with."""

import contextlib
import dataclasses
import json
import os
import re
import shlex

import numpy as np
import pytest
import seqio
import tensorflow as tf
from etils import epath
from helpers import exhaustive
from runs_of_text import flags

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig, TextFiles
from t5x_lab.data.pipeline import graph as many
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.reading import task_shard
from t5x_lab.data.pipeline.source_shards import SourceShard
from t5x_lab.data.sources import text_files as sources
from t5x_lab.data.vocabularies.config import ByteVocabulary
from t5x_lab.training.batches import Rows

WIDE = seqio.PassThroughVocabulary(size=100_000)
FEATURES = {name: seqio.Feature(WIDE, add_eos=False) for name in ("inputs", "targets")}


def number_of_line(dataset):
    """A line that is a number, as the only token of inputs and targets."""
    token = lambda line: tf.strings.to_number([line], tf.int32)
    return dataset.map(lambda line: {"inputs": token(line), "targets": token(line)})


@contextlib.contextmanager
def registered(mixture=None, **tasks):
    for name, task in tasks.items():
        seqio.TaskRegistry.add_provider(name, task)
    if mixture:
        seqio.MixtureRegistry.add("mixed", **mixture)
    try:
        yield
    finally:
        seqio.MixtureRegistry.remove("mixed")
        for name in tasks:
            seqio.TaskRegistry.remove(name)


def numbered(name, folder, sizes, first=1, kind=seqio.Task, **options):
    """A task of numbers counted up over text files of these numbers of lines."""
    for file, size in enumerate(sizes):
        (folder / f"{name}_{file:03d}.txt").write_text("\n".join(str(first + n) for n in range(size)))
        first += size
    source = seqio.TextLineDataSource({"train": str(folder / f"{name}_*.txt")})
    return kind(name, source, output_features=FEATURES, preprocessors=[number_of_line], **options)


def read(name, shards, batch_size, batches, seed=0, **options):
    """Numbers drawn, [batches, batch size]."""
    settings = dict(shards=shards, pack=False, **options)
    config = DataConfig(name, {"inputs": 1, "targets": 1}, batch_size, ByteVocabulary(), **settings)
    stream = SeqioBatches(resolve_tasks(config, "encoder_decoder", 200_000), config, seed)
    return np.stack([next(stream)["decoder_target_tokens"][:, 0] for _ in range(batches)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "documents", "in a graph"])
@pytest.mark.parametrize(
    "sizes, shards",
    [exhaustive((500,) * 11, 10), ((20, 3_000, 40, 700), 8), exhaustive((0, 900, 0, 30, 0), 3)],
    ids=str,
)
def test_large_files_are_shared_by_bytes(sizes, shards, kind, tmp_path, monkeypatch):
    """Each record is in one shard, parts are equal but for chance, and a shard opens few files."""
    monkeypatch.setattr("t5x_lab.data.sources.sharding.LARGE", 1)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:02d}.txt").write_text("".join(f"{number:02d}_{n:05d}\n" for n in range(size)))
    files = sorted(map(str, tmp_path.glob("*.txt")))
    opened: list[set] = [set() for _ in range(shards)]

    source = seqio.FileDataSource(tf.data.TextLineDataset, {"train": files})
    if kind == "documents":
        source = sources.document_files({"train": files}, lines_per_document=1)
    make = lambda shard: SourceShard(source, shard, shards, seed=3).get_dataset()
    if kind == "in a graph":
        both = many.interleave_shards(
            lambda shard: make(shard).map(lambda line: (shard, line)), range(shards), range(1, shards + 1), 0
        )
        lines_read = [(int(shard), line.decode()) for shard, line in both.as_numpy_iterator()]
    else:
        text = lambda record: (record["text"] if kind == "documents" else record).decode()
        lines_read = [(shard, text(record)) for shard in range(shards) for record in make(shard).as_numpy_iterator()]
    everything = [f"{number:02d}_{n:05d}" for number, size in enumerate(sizes) for n in range(size)]
    assert sorted(record for _, record in lines_read) == sorted(everything)
    for shard, record in lines_read:
        opened[shard].add(record.split("_")[0])
    assert max(map(len, opened)) <= len([size for size in sizes if size]) // shards + 3
    counts = np.bincount([shard for shard, _ in lines_read], minlength=shards)
    np.testing.assert_allclose(counts, len(everything) / shards, rtol=0.02, atol=3)


def test_a_source_that_reads_in_its_own_way_keeps_it_however_large(tmp_path, monkeypatch):
    monkeypatch.setattr("t5x_lab.data.sources.sharding.LARGE", 1)

    class Mine(seqio.TextLineDataSource):
        def get_dataset(self, *args, **options):
            return super().get_dataset(*args, **options).map(lambda line: {"text": line})

    files = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, file in enumerate(files):
        file.write_text(f"{number}\n" * (400 + 300 * number))
    results = [x for i in range(3) for x in SourceShard(Mine({"train": list(map(str, files))}), i, 3, seed=3).get_dataset()]
    assert len(results) == 1_100 and set(results[0]) == {"text"}


def test_shares_of_few_long_records_would_be_uneven_and_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("t5x_lab.data.sources.sharding.LARGE", 1)
    (tmp_path / "books.txt").write_text(("x" * 30_000 + "\n") * 3)
    (tmp_path / "lines.txt").write_text("x\n" * 10_000)
    source = seqio.TextLineDataSource({"train": sorted(map(str, tmp_path.glob("*.txt")))})
    counts = [sum(1 for _ in SourceShard(source, shard, 16, seed=3).get_dataset()) for shard in range(16)]
    assert sum(counts) == 10_003 and max(counts) - min(counts) <= 1


def test_storage_that_fails_for_one_shard_does_not_split_a_text_in_two_ways(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x\n" * 1_000)

    def fails(name):
        raise tf.errors.UnavailableError(None, None, "503")

    monkeypatch.setattr(tf.io.gfile, "stat", fails)
    with pytest.raises(tf.errors.UnavailableError):
        sources.file_sizes([str(tmp_path / "a.txt")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, shards",
    [((10, 10, 10, 5_000), 4), ((1_257,) * 4, 4), exhaustive((40,), 4), exhaustive((3,), 16), ((7, 90, 2), 4)],
    ids=str,
)
def test_every_document_is_drawn_alike(sizes, shards, tmp_path):
    """Each document comes once per epoch, or once on average if shards do not divide the documents."""
    with registered(unequal=numbered("unequal", tmp_path, sizes)):
        documents, drawn = sum(sizes), read("unequal", shards, 3_136, 16).ravel()
        counts = np.bincount(drawn, minlength=documents + 1)[1:]
        expected = 50_176 / documents
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        # Of independent draws it would be the number of documents; of epochs it is less.
        assert chi_squared < documents + 5 * np.sqrt(2 * documents), (chi_squared, documents)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, exhaustive(16)])
def test_a_tiny_task_keeps_its_rate_and_each_shard_reads_it_in_an_order_of_its_own(shards, tmp_path):
    with registered(
        dict(tasks=[("tiny", 1.0), ("large", 1.0)]),
        tiny=numbered("tiny", tmp_path, (3,)),
        large=numbered("large", tmp_path, (4_000,), first=10),
    ):
        drawn = read("mixed", shards, 64 * 16, 50)
    assert np.mean(drawn < 10) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(drawn.size))
    counts = np.bincount(drawn[drawn < 10], minlength=4)[1:]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 3 + 5 * np.sqrt(6)
    by_shard = drawn[0].reshape(shards, -1)
    assert len({tuple(shard[shard < 10][:6]) for shard in by_shard}) > min(shards, 8) / 2


@pytest.mark.slow
@pytest.mark.parametrize("templates", [10, 20])
def test_templates_over_one_data_set_do_not_march_in_step(templates, tmp_path):
    """Ten tasks have a shuffle buffer each, twenty share one; a batch of 128 of 4,000 examples has 126 different ones by chance."""
    tasks = {f"template{n}": numbered("examples", tmp_path, (4_000,)) for n in range(templates)}
    for name, task in tasks.items():
        task._name = name
    with registered(dict(tasks=list(tasks), default_rate=1.0), **tasks):
        drawn = read("mixed", 2, 128, 40)
    distinct = [len(set(batch.tolist())) for batch in drawn]
    assert np.mean(distinct) > (120 if templates == 10 else 110), distinct


@pytest.mark.exhaustive
@pytest.mark.slow
def test_many_tasks_are_read_on_by_another_number_of_processes(tmp_path):
    """Shards that are saved together: by one process, then two, then one, all batches are those of one alone."""
    names = [f"many{n}" for n in range(20)]
    many = {name: numbered(name, tmp_path, (2, 30 + n), first=100 * n + 1) for n, name in enumerate(names)}
    with registered(dict(tasks=[(name, 1.0 + n % 3) for n, name in enumerate(names)]), **many):
        config = DataConfig("mixed", {"inputs": 1, "targets": 1}, 64, ByteVocabulary(), shards=4, pack=False)
        tasks = resolve_tasks(config, "encoder_decoder", 200_000)
        reader = lambda rows: SeqioBatches(tasks, config, 0, rows)
        alone = reader(Rows.all)
        expected = [next(alone) for _ in range(9)]
        held = [lambda size, half=half: Rows(half, half) for half in np.split(np.arange(64), 2)]
        before = None
        for part, processes in enumerate(([Rows.all], held, [Rows.all])):
            readers = [reader(rows) for rows in processes]
            directory = epath.Path(tmp_path / f"position{part}")
            directory.mkdir()
            for process_reader in readers:
                if before:
                    process_reader.restore(before, before)
            for batch in expected[3 * part : 3 * part + 3]:
                read = [next(process_reader) for process_reader in readers]
                for name, rows in batch.items():
                    np.testing.assert_array_equal(np.concatenate([part[name] for part in read]), rows)
            saved = {file.name for process_reader in readers for file in process_reader.save(directory)}
            assert {name for name in saved if name.endswith(".index")} == {"shard_0_1_2_3.index"}
            before = directory
        by_shard = np.stack([batch["decoder_target_tokens"] for batch in expected], axis=1).reshape(4, -1)
        assert len({tuple(shard[:20]) for shard in by_shard}) == 4
        with pytest.raises(
            UserError, match="holds the positions of 4 data shards, not of 2. DATA_SHARDS cannot change during a run"
        ):
            SeqioBatches(tasks, dataclasses.replace(config, shards=2), 0).restore(before, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_text_files_are_split_by_documents_and_each_is_parsed_once(kind, tmp_path, monkeypatch):
    """Files of 10 and 490 documents in 4 shards: 125 documents each, all of them in an epoch."""
    for file, (first, last) in enumerate([(0, 10), (10, 500)]):
        lines = [json.dumps({"text": f"{n:03d}"}) if kind == "jsonl" else f"{n:03d}" for n in range(first, last)]
        (tmp_path / f"{file}.{kind}").write_text("\n\n".join(lines))
    parsed = []
    monkeypatch.setattr(sources.json, "loads", lambda line: parsed.append(line) or json.JSONDecoder().decode(line.decode()))
    source = sources.text_files(TextFiles(train=str(tmp_path / f"*.{kind}"), lines_per_document=1))
    shards = [
        [example["text"].decode() for example in SourceShard(source, shard, 4, seed=3).get_dataset().as_numpy_iterator()]
        for shard in range(4)
    ]
    assert [len(shard) for shard in shards] == [125] * 4
    assert len(parsed) <= 1000, "each once, and some to see that there are many"
    assert sorted(sum(shards, [])) == [f"{n:03d}" for n in range(500)]
    assert source.num_input_examples("train") == 500


@pytest.mark.exhaustive
def test_a_text_that_changed_is_named_and_the_way_on_is_a_line(tmp_path, monkeypatch, capsys):
    """Between two runs of a directory; a copy of the text with other times is the same text."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {n} red and green" for n in range(200)))
    text = [
        "--gin.MIXTURE_OR_TASK_NAME=files_full_lm",
        '--gin.TASK_FEATURE_LENGTHS={"targets": 32}',
        "--gin.TextFiles.train=*.txt",
    ]
    train = lambda steps, model_dir="run", *more: main(flags("causal_decoder", text, model_dir, steps, *more))
    assert train(2) == 0
    os.utime(tmp_path / "one.txt", (0, 0))
    assert train(3) == 0
    original = (tmp_path / "two.txt").read_text()
    for change, says in (
        (lambda: (tmp_path / "three.txt").write_text("three\n" * 40), "three.txt is new"),
        (
            lambda: (tmp_path / "two.txt").write_text(original + "\nmore"),
            f"two.txt had {len(original):,} bytes and has {len(original) + 5:,}",
        ),
        (
            lambda: (tmp_path / "two.txt").write_text(original.replace("red", "RED")),
            "has the same size and another content",
        ),
        (lambda: (tmp_path / "two.txt").unlink(), "two.txt is missing"),
    ):
        change()
        assert train(4) == 2
        stderr = capsys.readouterr().err
        assert 'The text files changed since the checkpoint: in task "files_full_lm", ' in stderr and says in stderr, stderr
        assert "Traceback" not in stderr and "tensorflow" not in stderr.lower()
        (tmp_path / "three.txt").unlink(missing_ok=True)
        (tmp_path / "two.txt").write_text(original)
    (tmp_path / "two.txt").write_text(original + "\nmore")
    assert train(4) == 2
    way_on = re.search(r"in a new MODEL_DIR, with (.*) to keep optimizer", capsys.readouterr().err)
    assert way_on, "flags to copy"
    checkpoint, _, carry = shlex.split(way_on[1])
    assert train(4, "again", checkpoint.rstrip(","), carry) == 0
    assert t5x_lab.load("again").step == 4


class Reversed(seqio.Task):
    """A task class that reads in a way of its own."""

    def get_dataset(self, *args, **kwargs):
        dataset = super().get_dataset(*args, **kwargs)
        return dataset.map(lambda example: {**example, "targets": example["targets"] + 1000})


@pytest.mark.slow
def test_what_a_task_and_a_mixture_say_of_themselves_is_heeded(tmp_path):
    """A buffer of one keeps the order; a class's own get_dataset and a mixture's sample_fn are called."""
    in_turn = lambda datasets, rates, seed: tf.data.Dataset.choose_from_datasets(
        datasets, tf.data.Dataset.range(len(datasets)).repeat()
    )
    ordered = numbered("ordered", tmp_path, (50,), shuffle_buffer_size=1)
    own = numbered("own", tmp_path, (50,), first=100, kind=Reversed, shuffle_buffer_size=1)
    with registered(dict(tasks=[("ordered", 1.0), ("own", 9.0)], sample_fn=in_turn), ordered=ordered, own=own):
        drawn = read("mixed", 1, 8, 3).ravel().tolist()
        shuffled = read("ordered", 1, 8, 3, shuffle_buffer_size=50).ravel().tolist()
    assert drawn[::2] == list(range(1, 13)) and drawn[1::2] == list(range(1100, 1112))
    assert shuffled != sorted(shuffled)


@pytest.mark.slow
def test_splits_caches_and_order_are_the_users(tmp_path):
    """Another split, in the order of its files, from SeqIO's cache."""
    (tmp_path / "dev.txt").write_text("\n".join(str(n) for n in range(1, 41)))
    source = seqio.TextLineDataSource({"dev": str(tmp_path / "dev.txt")})
    steps = [number_of_line, seqio.CacheDatasetPlaceholder(), lambda dataset: dataset]
    ahead = seqio.Task("ahead", source, output_features=FEATURES, preprocessors=steps)
    with registered(ahead=ahead):
        drawn = read("ahead", 2, 8, 5, split="dev", shuffle=False)
        assert drawn[:, :4].ravel().tolist() == list(range(1, 41, 2)) and drawn[:, 4:].ravel().tolist() == list(range(2, 41, 2))
        with pytest.raises(
            UserError, match='no split "train" to train on; it has dev. Use another task, or set DataConfig.split'
        ):
            read("ahead", 1, 8, 1)
        with pytest.raises(UserError, match='The task "ahead" needs a cache, and there is none'):
            read("ahead", 1, 8, 1, split="dev", use_cached=True)

        with cached(tmp_path / "cache", "ahead", "dev", [range(1_000, 1_040)]):
            drawn = read("ahead", 2, 8, 5, split="dev", use_cached=True, shuffle=False)
        assert sorted(drawn.ravel()) == list(range(1_000, 1_040))


@contextlib.contextmanager
def cached(folder, name, split, files):
    """SeqIO's cache of a task of numbers."""
    cache = folder / name
    cache.mkdir(parents=True)
    (cache / "COMPLETED").touch()
    info = {
        "num_shards": len(files),
        "features": {name: {"dtype": "int32", "shape": [None]} for name in FEATURES},
        "seqio_version": "0.0.20",
    }
    (cache / f"info.{split}.json").write_text(json.dumps(info))
    (cache / f"stats.{split}.json").write_text(json.dumps({"examples": sum(map(len, files))}))
    for number, values in enumerate(files):
        with tf.io.TFRecordWriter(str(cache / f"{split}.tfrecord-{number:05d}-of-{len(files):05d}")) as file:
            for value in values:
                feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                features = tf.train.Features(feature=dict.fromkeys(FEATURES, feature))
                file.write(tf.train.Example(features=features).SerializeToString())
    seqio.set_global_cache_dirs([str(folder)])
    try:
        yield
    finally:
        seqio.set_global_cache_dirs([])


def interrupted(config, architecture, folder, processes, batches):
    """Batches of `processes[0]` processes, then of `processes[1]` that go on from what these saved, and so on."""
    tasks = resolve_tasks(config, architecture, 200_000)
    for part, number in enumerate(processes):
        parts = np.split(np.arange(config.batch_size), number)
        readers = [SeqioBatches(tasks, config, 0, lambda size, held=held: Rows(held, held)) for held in parts]
        for reader in readers if part else []:
            reader.restore(epath.Path(folder / f"position{part - 1}"), epath.Path(folder))
        for _ in range(batches):
            read = [next(reader) for reader in readers]
            yield {name: np.concatenate([of_process[name] for of_process in read]) for name in read[0]}
        (folder / f"position{part}").mkdir()
        for reader in readers:
            reader.save(epath.Path(folder / f"position{part}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [exhaustive("plain"), "ahead"])
def test_an_epoch_with_interruptions_meets_each_example_once(name, tmp_path):
    """Reads from a source or from SeqIO's cache. Files are uneven, and the number of processes changes after each interruption."""
    sizes = (5, 40, 19, 64)
    plain = numbered("plain", tmp_path, sizes)
    steps = [number_of_line, seqio.CacheDatasetPlaceholder(required=True), lambda dataset: dataset]
    ahead = seqio.Task("ahead", plain.source, output_features=FEATURES, preprocessors=steps)
    in_files = np.split(np.arange(1, 129), np.cumsum(sizes)[:-1])
    settings = dict(shards=4, pack=False, shuffle_buffer_size=1)  # a buffer draws from the next epoch before this one's end
    with registered(plain=plain, ahead=ahead), cached(tmp_path / "cache", "ahead", "train", in_files):
        config = DataConfig(name, {"inputs": 1, "targets": 1}, 16, ByteVocabulary(), **settings)
        drawn = [
            batch["decoder_target_tokens"][:, 0] for batch in interrupted(config, "encoder_decoder", tmp_path, [1, 4, 2, 1], 4)
        ]
    for epoch in (drawn[:8], drawn[8:]):
        assert sorted(np.concatenate(epoch)) == list(range(1, 129))


@pytest.mark.slow
def test_an_epoch_of_a_text_and_of_each_task_of_a_mixture_meets_all_once(tmp_path):
    """Documents of seven letters and an end token, four of them in a row."""
    for number, size in enumerate((100, 12, 272)):
        lines = (f"{sum((100, 12, 272)[:number]) + n:07d}" for n in range(size))
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    texts = {"whole": TextFiles(train=f"{tmp_path}/*.txt", lines_per_document=1)}
    settings = dict(shards=2, texts=texts, shuffle_buffer_size=1, objective="full_lm")
    config = DataConfig("whole", {"targets": 32}, 32, ByteVocabulary(), **settings)
    (tmp_path / "text").mkdir()
    read = np.concatenate(
        [b["decoder_target_tokens"] for b in interrupted(config, "causal_decoder", tmp_path / "text", [1, 2, 1], 1)]
    )
    documents = [int(text) for row in read for text in "".join(chr(t - 3) if t > 1 else " " for t in row).split()]
    assert sorted(documents) == list(range(384))

    sizes, first = {"small": 24, "large": 96}, {"small": 1_000, "large": 2_000}
    tasks = {name: numbered(name, tmp_path, (size // 8, size - size // 8), first[name]) for name, size in sizes.items()}
    settings = dict(shards=2, pack=False, shuffle_buffer_size=1)
    with registered(dict(tasks=[("small", 1.0), ("large", 4.0)]), **tasks):
        config = DataConfig("mixed", {"inputs": 1, "targets": 1}, 16, ByteVocabulary(), **settings)
        drawn = np.stack(
            [b["decoder_target_tokens"][:, 0] for b in interrupted(config, "encoder_decoder", tmp_path, [1, 2, 1], 8)]
        )
    by_shard = drawn.reshape(len(drawn), 2, 8).transpose(1, 0, 2).reshape(2, -1)
    for name, size in sizes.items():
        whole = range(first[name], first[name] + size)
        epoch = [n for shard in by_shard for n in [n for n in shard if n in whole][: size // 2]]
        assert sorted(epoch) == list(whole)


@pytest.mark.slow
@pytest.mark.parametrize("size, is_divided", [(21, False), (600, True)])
def test_an_epoch_of_each_of_many_tasks_meets_all_records_once(size, is_divided, tmp_path):
    """Twenty templates over one file. Each starts at another record of its shard, and the first records come last."""
    tasks = {f"template{n}": numbered("examples", tmp_path, (size,)) for n in range(20)}
    for name, task in tasks.items():
        task._name = name
    with registered(dict(tasks=list(tasks), default_rate=1.0), **tasks):
        config = DataConfig("mixed", {"inputs": 1, "targets": 1}, 64, ByteVocabulary(), shards=2, pack=False)
        mixture = resolve_tasks(config, "encoder_decoder", 10**6)
        components = mixture.train_components[:3]
        starts, of_shard = set(), size // 2 if is_divided else size  # a shard reads all of so few records
        for component in components:
            datasets = [task_shard(component, config, 0, shard, len(tasks)).take(2 * of_shard) for shard in range(2)]
            read = np.array([[x["targets"][0] for x in dataset.as_numpy_iterator()] for dataset in datasets])
            starts |= set(read[:, 0])
            for epoch in (read[:, :of_shard], read[:, of_shard:]):
                assert sorted(epoch.reshape(-1)) == sorted([*range(1, size + 1)] * (1 if is_divided else 2))
        assert len(starts) > 3


def breaks_at_7(dataset):
    def checked(n):
        if n == 7:
            raise ValueError("7 is no number of mine")
        return n

    check = lambda x: {**x, "targets": tf.ensure_shape(tf.numpy_function(checked, [x["targets"]], tf.int32), [1])}
    return dataset.map(check, num_parallel_calls=tf.data.AUTOTUNE)


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1, 17])
def test_the_record_that_breaks_a_task_is_named(others, tmp_path):
    """Tests one task, a mixture, and a mixture whose tasks share a graph."""
    source = numbered("broken", tmp_path, (4, 5)).source
    tasks = {f"whole_{n}": numbered(f"whole_{n}", tmp_path, (5,), first=100) for n in range(others)}
    tasks["broken"] = seqio.Task("broken", source, output_features=FEATURES, preprocessors=[number_of_line, breaks_at_7])
    says = r'The task "broken" fails at record 3 of .*/broken_001.txt \(.*7.*\): ValueError: 7 is no number of mine\.'
    with registered({"tasks": [(name, 1.0) for name in tasks]}, **tasks), pytest.raises(UserError, match=says):
        read("mixed" if others else "broken", 1, 4, 100)


@pytest.mark.slow
def test_a_source_and_a_line_that_break_are_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("1\n2\nthree\n4\n")
    source = seqio.TextLineDataSource({"train": str(tmp_path / "a.txt")})
    task = seqio.Task("no_numbers", source, output_features=FEATURES, preprocessors=[number_of_line])
    says = r'"no_numbers" fails at record 3 of .*a.txt \(b.three.\): .*could not correctly convert string: three\.'
    with registered(no_numbers=task), pytest.raises(UserError, match=says):
        read("no_numbers", 4, 4, 3)

    def numbers(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_generator(lambda: iter([1, 2, None]), output_signature=tf.TensorSpec([], tf.int32))

    token = lambda dataset: dataset.map(lambda n: {"inputs": [n], "targets": [n]})
    task = seqio.Task("yields", seqio.FunctionDataSource(numbers, ["train"]), output_features=FEATURES, preprocessors=[token])
    with registered(yields=task), pytest.raises(UserError, match=r'"yields" fails after record 2 \(2\): TypeError: .*None'):
        read("yields", 1, 4, 3)


def test_a_task_that_cannot_be_read_is_a_sentence(tmp_path):
    def broken(dataset):
        raise KeyError("label")

    def nothing(dataset):
        return dataset.map(lambda example: {"inputs": example["inputs"]})

    source = numbered("source", tmp_path, (5,)).source
    make = lambda name, *steps: seqio.Task(name, source, output_features=FEATURES, preprocessors=[number_of_line, *steps])
    cached = make("cached", seqio.CacheDatasetPlaceholder(required=True))
    with registered(broken=make("broken", broken), nothing=make("nothing", nothing), cached=cached):
        for name, says in (
            ("broken", r'The task "broken" cannot be read at the lengths .*: KeyError: label'),
            ("nothing", r'The preprocessors of task "nothing" do not make "targets", which its output_features'),
            ("cached", r'The task "cached" needs a cache, and there is none in the cache directories \(none is set\)'),
        ):
            with pytest.raises(UserError, match=says):
                read(name, 1, 4, 1)
