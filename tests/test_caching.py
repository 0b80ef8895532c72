"""Tasks prepared ahead: a training on a cache is the training without it, whoever made the cache and however often it was killed."""

import copy
import functools
import itertools
import json
import pathlib
import shutil
import sys

import commands
import numpy as np
import pytest
import seqio
import t5.data.preprocessors
import tensorflow as tf
from cached_tasks import BOTH, BYTES, KINDS, assert_equal, batches, cached, lines_of, of_lines, of_tfds, task_of
from helpers import exhaustive, set_max_separate_tasks
from known_task import write_task

from t5x_lab.config.errors import UserError
from t5x_lab.data.cache import reading as caches
from t5x_lab.data.cache import writing as caching
from t5x_lab.data.config import DataConfig, Mixing, TextFiles
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.vocabularies.config import ByteVocabulary


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """Registers tasks over a source of so many lines in each file, and forgets them."""
    names = []

    def register(name, sizes, steps=(), source=of_lines, make=seqio.Task):
        task = task_of(name, source(tmp_path, name, sizes), steps, make)
        seqio.TaskRegistry.add_provider(name, task)
        names.append(name)
        return task

    yield register
    for name in names:
        seqio.TaskRegistry.remove(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, shards", [((30, 900, 20), 2), exhaustive((200, 210, 190, 200), 4), exhaustive((5,), 2)], ids=str
)
def test_a_training_on_a_cache_is_the_training_without_it(sizes, shards, registered, tmp_path):
    """One file and many, alike and not, fewer records than shards: to the bit, also in a mixture and in evaluations."""
    folder = tmp_path / "caches"
    for name in ("first", "second"):
        examples = cached(registered(name, sizes), folder)
        assert examples == {"train": sum(sizes), "validation": sizes[0]}
    seqio.MixtureRegistry.add("first_and_second", [("first", 1.0), ("second", 3.0)])
    try:
        on_the_fly = batches("first_and_second", shards=shards)
        assert_equal(batches("first_and_second", shards=shards, use_cached=True, cache_dirs=(str(folder),)), on_the_fly)
    finally:
        seqio.MixtureRegistry.remove("first_and_second")


class ReadInItsOwnWay(seqio.Task):
    def get_dataset(self, *args, **kwargs):
        return super().get_dataset(*args, **kwargs).filter(lambda example: tf.size(example["targets"]) % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, sizes, shards, large",
    [
        exhaustive("lines", (3_000, 40, 2_000), 2, True),
        ("documents", (3_000, 40, 2_000), 2, True),
        exhaustive("documents", (400, 410, 150, 900), 2, False),
        exhaustive("documents", tuple((37 * i) % 300 + 1 for i in range(40)), 1, True),
        exhaustive("tfds", (400, 90, 310), 2, False),
        exhaustive("tfds", (400, 90, 310), 2, True),
        ("tfds of two ranges", (400, 90, 310), 4, False),
        ("function", (900,), 2, False),
        ("lines", (300, 290), "own", False),
        exhaustive("lines", (300, 290, 301), "many", False),
        ("tfds", (400, 90, 310), "many", False),
    ],
)
def test_every_source_is_read_as_it_would_be_without_a_cache(kind, sizes, shards, large, registered, tmp_path, monkeypatch):
    """Large files are shared by bytes; a class of one's own and the graph of many tasks read caches too."""
    if large:
        monkeypatch.setattr("t5x_lab.data.sources.sharding.LARGE", 1)
    if shards == "many":
        set_max_separate_tasks(monkeypatch, 0)
    make = ReadInItsOwnWay if shards == "own" else seqio.Task
    cached(registered("text", sizes, source=KINDS[kind], make=make), tmp_path / "caches")
    shards = shards if isinstance(shards, int) else 2
    on_the_fly = batches("text", shards=shards, number=8)
    assert_equal(batches("text", shards=shards, number=8, use_cached=True, cache_dirs=(str(tmp_path / "caches"),)), on_the_fly)
    assert len({row.tobytes() for batch in on_the_fly for row in batch["encoder_input_tokens"]}) > 20


@pytest.mark.exhaustive
def test_a_cache_needs_nothing_of_what_it_was_made_of(registered, tmp_path):
    """Also where rates are computed from numbers of examples, in a mixture of mixtures."""
    source_of = {"lines": of_lines, "set": of_tfds}
    for name, sizes in {"lines": (300, 200), "set": (90, 310)}.items():
        cached(registered(name, sizes, source=source_of[name]), tmp_path / "caches")
    rate = functools.partial(seqio.mixing_rate_num_examples, maximum=450)
    seqio.MixtureRegistry.add("inner", [(name, rate) for name in source_of])
    seqio.MixtureRegistry.add("outer", [("inner", 1.0), ("lines", 0.5)])
    options = dict(shards=2, use_cached=True, cache_dirs=(str(tmp_path / "caches"),))
    try:
        with_originals = batches("outer", **options)
        by_examples = batches("inner", mixing=Mixing(), **options)
        for path in tmp_path.glob("lines*.txt"):
            path.unlink()
        shutil.rmtree(tmp_path / "set")
        seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()
        assert_equal(batches("outer", **options), with_originals)
        assert_equal(batches("inner", mixing=Mixing(), **options), by_examples)
    finally:
        for name in ("outer", "inner"):
            seqio.MixtureRegistry.remove(name)


def of_questions(folder, name, sizes):
    """Files of so many questions, of three choices each."""
    files = lines_of(folder, name, sizes)
    return seqio.TextLineDataSource({"train": files, "validation": files})


def ranked(name, source):
    """A task whose rows before the placeholder are a question's choices, as T5's."""
    rows = functools.partial(
        t5.data.preprocessors.rank_classification_formatter, inputs_formats="{line}", targets_formats=["no", "yes", "perhaps"]
    )
    return seqio.Task(
        name, source,
        preprocessors=[
            lambda data: data.map(lambda line: {"line": line, "label": tf.strings.length(line) % 3}), rows,
            seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos,
        ],
        output_features={name: seqio.Feature(seqio.ByteVocabulary(100)) for name in BOTH},
    )  # fmt: skip


def test_what_is_made_of_one_record_stays_together(tmp_path):
    """The choices of a question, in a cache of several files."""
    task = ranked("ranked_lines", of_questions(tmp_path, "ranked_lines", (20, 21, 19)))
    assert cached(task, tmp_path / "caches")["validation"] == 180
    config = DataConfig(
        "ranked_lines", {name: 32 for name in BOTH}, 16, BYTES, use_cached=True, cache_dirs=(str(tmp_path / "caches"),)
    )
    read = caches.use_cache(task, config).get_dataset(config.task_feature_lengths, "validation", shuffle=False, num_epochs=1)
    rows = [(*example["idx"].tolist(), example["inputs_pretokenized"]) for example in read.as_numpy_iterator()]
    assert all(len({text for *_, text in rows[at : at + 3]}) == 1 for at in range(0, 180, 3))
    assert [choice for _, choice, _ in rows] == [0, 1, 2] * 60


def test_what_was_begun_with_something_else_is_not_gone_on_from(registered, tmp_path):
    folder, task = str(tmp_path / "caches"), registered("begun_otherwise", (30, 20))
    first = caching.begin(task, folder, BYTES)["train"][0]
    caching.write(first, task, folder)
    with pytest.raises(UserError, match=r"was begun with ByteVocabulary\(extra_ids=100\). Remove that folder"):
        caching.begin(task, folder, ByteVocabulary(extra_ids=50))
    with open(tmp_path / "begun_otherwise1.txt", "a") as file:
        file.write("more\n")
    with pytest.raises(UserError, match="was begun with other files"):
        caching.begin(task, folder, BYTES)


def test_two_writers_at_the_same_time_make_one_cache(registered, tmp_path):
    """A process has nothing to do for shards that it has not begun once another process has completed the cache."""
    folder, task = str(tmp_path / "caches"), registered("written_twice", (30, 20))
    pieces = [*itertools.chain(*caching.begin(task, folder, BYTES).values())]
    examples = cached(task, folder)
    before = {path: path.read_bytes() for path in (tmp_path / "caches").rglob("*") if path.is_file()}
    for piece in pieces:
        caching.write(piece, task, folder)
    assert caching.complete(task, folder, BYTES) == examples == {"train": 50, "validation": 30}
    assert {path: path.read_bytes() for path in (tmp_path / "caches").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "make_task, says",
    [
        (lambda line: {"image": tf.zeros([2], tf.uint8)}, '"image" of type uint8. Caches support bool, float32, int32, int64, string'),
        (lambda line: {"table": tf.zeros([1, tf.strings.length(line)])}, 'Only the first size may be unknown'),
        (lambda line: {"nested": {"line": line}}, '"nested", which is not a tensor'),
        (lambda line: line, "examples that are not dictionaries"),
    ],
)  # fmt: skip
def test_what_a_cache_cannot_hold_is_said_before_it_is_begun(make_task, says, tmp_path):
    steps = [lambda data: data.map(make_task), seqio.CacheDatasetPlaceholder()]
    task = seqio.Task("unheld", of_lines(tmp_path, "unheld", (3,)), preprocessors=steps, output_features={})
    with pytest.raises(UserError, match=says):
        cached(task, tmp_path / "caches")
    assert not (tmp_path / "caches").exists()


def test_shapes_that_are_not_known_are_those_of_the_examples(tmp_path):
    untold = lambda line: {"ids": tf.py_function(lambda line: tf.range(tf.strings.length(line)), [line], tf.int32), "n": 1.5}
    steps = [lambda data: data.map(untold), seqio.CacheDatasetPlaceholder()]
    features = {"ids": seqio.Feature(seqio.PassThroughVocabulary(10))}
    task = seqio.Task("untold", of_lines(tmp_path, "untold", (0, 3)), preprocessors=steps, output_features=features)
    cached(task, tmp_path / "caches")
    config = DataConfig("untold", {"ids": 32}, 16, ByteVocabulary(50), use_cached=True, cache_dirs=(str(tmp_path / "caches"),))
    read = caches.use_cache(task, config).get_dataset(None, "train", shuffle=False, num_epochs=1)  # no ids of a vocabulary
    assert [example["ids"].tolist() for example in read.as_numpy_iterator()] == [list(range(10))] * 3


def test_a_cache_of_another_text_is_refused(tmp_path):
    folder = str(tmp_path / "caches")
    config_of = lambda name: DataConfig(
        "files_full_lm", {"targets": 16}, 16, BYTES, use_cached=True, cache_dirs=(folder,),
        files=TextFiles(*2 * (lines_of(tmp_path, name, (90,))), lines_per_document=1),
    )  # fmt: skip
    from t5x_lab.data.tasks.names import find_members

    (first,) = find_members(config_of("one"))
    cached(first.task, folder)
    read = lambda config: SeqioBatches(resolve_tasks(config, "causal_decoder", 384), config, seed=0)
    assert next(read(config_of("one")))
    with pytest.raises(
        UserError, match=r"was made from TextFiles\(train='.*one0.txt'.*, but the run reads TextFiles\(train='.*two0.txt'"
    ):
        read(config_of("two"))


def test_many_tasks_read_seqios_own_caches(registered, tmp_path, monkeypatch):
    """Whose first example is looked at, outside the graph of many tasks."""
    set_max_separate_tasks(monkeypatch, 0)
    cached(registered("theirs", (300,)), tmp_path / "caches")
    (tmp_path / "caches" / "theirs" / caches.MANIFEST).unlink()
    assert len(batches("theirs", shards=2, use_cached=True, cache_dirs=(str(tmp_path / "caches"),))) == 6


def test_files_of_any_name_are_read(registered, tmp_path):
    """Names that look like patterns, and those of an interrupted cache of more files."""
    task = registered("odd", (30,))
    cached(task, tmp_path / "caches[1]")
    stale = tmp_path / "caches[1]" / "odd" / "train.tfrecord-00000-of-00011"
    stale.write_bytes(b"")
    read = batches("odd", shards=1, use_cached=True, cache_dirs=(str(tmp_path / "caches[1]"),))
    assert_equal(read, batches("odd", shards=1))


def test_examples_are_written_as_seqio_writes_them():
    examples = tf.data.Dataset.from_tensors(
        {
            "text": b"nul\0", "many": tf.constant(["a\0", "", "\xff"]), "ids": tf.constant([3, -1], tf.int32),
            "table": tf.constant([[1, 2], [3, 4]], tf.int64), "number": tf.constant(7, tf.int64),
            "weights": tf.constant([0.5, 1e-7]), "half": tf.constant([0.1], tf.bfloat16), "wide": tf.constant(0.1, tf.float64),
            "none": tf.zeros([0], tf.int32), "ragged": tf.ragged.constant([[[1], []], [[2, 3]]]),
        }
    )  # fmt: skip
    (example,) = examples
    (actual,) = examples.map(caching._flatten).as_numpy_iterator()
    expected = seqio.dict_to_tfexample(example).SerializeToString(deterministic=True)
    assert caching._serialize(actual) == expected
    truth = tf.train.Example.FromString(caching._serialize({"truth": np.array([True, False])}))  # which SeqIO fails at
    assert truth.features.feature["truth"].int64_list.value == [1, 0]


def test_what_was_begun_is_no_cache_and_is_gone_on_from(registered, tmp_path):
    task, folder = registered("begun", (30, 20, 10)), tmp_path / "caches"
    first, *others = itertools.chain(*caching.begin(task, str(folder), BYTES).values())
    caching.write(first, task, str(folder))
    written = caches.task_cache_dir(str(folder), "begun") / first.file
    before = written.stat().mtime, written.read_bytes()
    (written.parent / "parts" / f"{others[0].file}.0123").write_bytes(b"half")
    with pytest.raises(UserError, match="is not written. Run the same command again."):
        caching.complete(task, str(folder), BYTES)
    assert not caches.is_complete(str(folder), task, BYTES)
    config = DataConfig("begun", {"inputs": 8, "targets": 8}, 4, BYTES, use_cached=True, cache_dirs=(str(folder),))
    with pytest.raises(UserError, match='The task "begun" needs a cache, and there is none in the cache directories'):
        SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=0)
    for piece in (first, *others):
        caching.write(piece, task, str(folder))
    assert caching.complete(task, str(folder), BYTES) == {"train": 60, "validation": 30}
    assert (written.stat().mtime, written.read_bytes()) == before and caches.is_complete(str(folder), task, BYTES)
    stats = json.loads((written.parent / "stats.train.json").read_text())
    lengths = [len(f"begun {number} {line}") for number, lines in enumerate((30, 20, 10)) for line in range(lines)]
    assert stats == {
        "examples": 60, "inputs_tokens": sum(lengths), "inputs_max_tokens": max(lengths),
        "targets_tokens": sum(lengths), "targets_max_tokens": max(lengths),
    }  # fmt: skip
    with caches.register_cache_stats([(task, caches.CachedTaskSource(task, config))]):  # SeqIO itself reads it
        seqios = task.get_dataset({"inputs": 64, "targets": 64}, use_cached=True, shuffle=False)
        assert sum(1 for _ in seqios) == 60 and task.get_cached_stats("train") == stats
    assert task.cache_dir is None


def test_a_cache_of_another_vocabulary_is_refused(registered, tmp_path):
    folder = tmp_path / "caches"
    cached(registered("bytes", (30,)), folder)
    other = ByteVocabulary(extra_ids=50)
    config = DataConfig("bytes", {"inputs": 8, "targets": 8}, 4, other, use_cached=True, cache_dirs=(str(folder),))
    with pytest.raises(
        UserError, match=r"has ids of ByteVocabulary\(extra_ids=100\), but VOCABULARY is ByteVocabulary\(extra_ids=50\)"
    ):
        SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=0)
    with pytest.raises(UserError, match=r"has ids of ByteVocabulary\(extra_ids=100\), but VOCABULARY"):
        caches.is_complete(str(folder), seqio.TaskRegistry.get("bytes"), other)
    (caches.task_cache_dir(str(folder), "bytes") / caches.MANIFEST).unlink()  # as SeqIO's own have none
    task = copy.copy(seqio.TaskRegistry.get("bytes"))
    task._output_features = {n: seqio.Feature(_Shifted(100)) for n in ("inputs", "targets")}
    with pytest.raises(UserError, match='was made with another vocabulary: the tokens of its first "inputs" are not those of'):
        caches.CachedTaskSource(task, config).split_source("train")


class _Shifted(seqio.ByteVocabulary):
    def _encode(self, s):
        return [i + 1 for i in super()._encode(s)]


TASKS = """
import known_tasks
import seqio

for number in range(4):
    files = {"train": [f"{number}_{part}.tsv" for part in range(1 + number % 3)], "validation": ["known.tsv"]}
    seqio.TaskRegistry.add(
        f"task{number}", seqio.TextLineDataSource(files), preprocessors=known_tasks.steps, metric_fns=[known_tasks.exact],
        output_features={name: seqio.Feature(known_tasks.vocabulary) for name in ("inputs", "targets")},
    )
seqio.MixtureRegistry.add("four", [(f"task{number}", 1.0) for number in range(4)])
"""


@pytest.mark.exhaustive
def test_four_tasks_by_several_workers_killed_and_run_again(tmp_path, monkeypatch):
    """Beam's local runner with two processes; its portable runner gives the same bytes; SeqIO's own cache is trained on."""
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    (tmp_path / "four_tasks.py").write_text(TASKS)
    for number in range(4):
        for part in range(1 + number % 3):
            lines = (f"what is {number} {part} {line}?\tanswer {line % 7}\n" for line in range(20 + number))
            pathlib.Path(f"{number}_{part}.tsv").write_text("".join(lines))
    common = ["cache", "--gin_bindings=import four_tasks", "--gin.VOCABULARY=@ByteVocabulary()"]
    command = [*common, "--task=four", "--output_dir=caches"]
    killed = commands.Command(*command, log="log")
    killed.wait_until(lambda: len(list(pathlib.Path("caches").rglob("*.tfrecord-*-of-?????"))) >= 3)
    killed.kill()
    killed.wait()
    assert len(list(pathlib.Path("caches").rglob("COMPLETED"))) < 4
    done = commands.run(*command)
    assert done.returncode == 0, done.stderr
    assert "task2: 66 examples of train, 12 examples of validation" in done.stdout
    assert commands.run(*command).stderr.count("is cached already") == 4
    portable = "--pipeline_options=--runner=PortableRunner,--job_endpoint=embed,--environment_type=LOOPBACK"
    assert commands.run(*common, "--task=task2", "--output_dir=others", portable).returncode == 0
    for path in pathlib.Path("caches/task2").iterdir():
        assert path.read_bytes() == pathlib.Path("others/task2", path.name).read_bytes(), path
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("four_tasks")
    on_the_fly = batches("four", shards=4)
    assert_equal(batches("four", shards=4, use_cached=True, cache_dirs=("caches",)), on_the_fly)


def test_what_cannot_be_cached_is_said(capsys):
    from t5x_lab.cli.main import main

    cache = ["cache", "--output_dir=caches", "--gin.VOCABULARY=@ByteVocabulary()"]
    assert main(cache) == 2 and "There is no task to cache. Set --task=NAME" in capsys.readouterr().err
    assert main([*cache, "--task=sotu_full"]) == 2 and 'no task or mixture "sotu_full". Did you mean' in capsys.readouterr().err
    assert main([*cache, "--task=sotu"]) == 2 and "is plain text" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_cache_of_seqios_own_is_trained_on(tmp_path, monkeypatch):
    import subprocess

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_task(tmp_path)
    program = pathlib.Path(sys.executable).with_name("seqio_cache_tasks")
    argv = [str(program), "--module_import=known_tasks", "--tasks=known", "--output_cache_dir=theirs", "--min_shards=2"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    __import__("known_tasks")
    read = batches("known", number=4, shards=2, use_cached=True, cache_dirs=("theirs",))
    texts = lambda rows: sorted(row.tobytes() for batch in rows for row in batch["encoder_input_tokens"])
    assert len(read) == 5 and set(texts(read[-1:])) == set(texts(batches("known", number=4, shards=2)[-1:]))
