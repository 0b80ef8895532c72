"""Tasks prepared ahead: a training on a cache is the training without it, whoever made the cache and however often it was killed."""

import json
import pathlib
import sys

import commands
import numpy as np
import pytest
import seqio
from known_task import write_task

from t5x_lab.config.errors import UserError
from t5x_lab.data import caching, sources
from t5x_lab.data.config import ByteVocabulary, DataConfig
from t5x_lab.data.pipeline import EvalBatches, SeqioBatches, resolve_tasks

BYTES = ByteVocabulary()


def text_of(name, files, steps=()):
    return seqio.Task(
        name,
        seqio.TextLineDataSource({"train": files, "validation": files[:1]}),
        preprocessors=[
            lambda data: data.map(lambda line: {"inputs": line, "targets": line}),
            seqio.preprocessors.tokenize,
            *steps,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos,
        ],
        output_features={name: seqio.Feature(seqio.ByteVocabulary(100)) for name in ("inputs", "targets")},
    )


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """Registers tasks over files of so many lines, and forgets them."""
    names = []

    def register(name, sizes, steps=()):
        files = [tmp_path / f"{name}{number}.txt" for number in range(len(sizes))]
        for number, (file, lines) in enumerate(zip(files, sizes, strict=True)):
            file.write_text("".join(f"{name} {number} {line}\n" for line in range(lines)))
        task = text_of(name, list(map(str, files)), steps)
        seqio.TaskRegistry.add_provider(name, task)
        names.append(name)
        return task

    yield register
    for name in names:
        seqio.TaskRegistry.remove(name)


def cached(task, folder, vocabulary=BYTES):
    for piece in caching.pieces_of(task):
        caching.write(piece, task, str(folder))
    return caching.complete(task, str(folder), vocabulary)


def batches(name, number=3, **options):
    config = DataConfig(name, {"inputs": 16, "targets": 16}, 16, BYTES, **options)
    tasks = resolve_tasks(config, "encoder_decoder", 384)
    read = SeqioBatches(tasks, config, seed=3)
    trained = [next(read) for _ in range(number)]
    return [*trained, *(batch for part in tasks.parts for batch in EvalBatches(tasks, part, config, most=3))]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.slow
@pytest.mark.parametrize("sizes, shards", [((200, 210, 190, 200), 4), ((30, 900, 20), 2), ((5,), 2)], ids=str)
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


@pytest.mark.slow
def test_shares_of_large_files_are_those_of_the_text(registered, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGE", 1)
    cached(registered("large", (3_000, 40, 2_000)), tmp_path / "caches")
    on_the_fly = batches("large", shards=4, number=8)
    assert_equal(batches("large", shards=4, number=8, use_cached=True, cache_dirs=(str(tmp_path / "caches"),)), on_the_fly)


def test_what_was_begun_is_no_cache_and_is_gone_on_from(registered, tmp_path):
    task, folder = registered("begun", (30, 20, 10)), tmp_path / "caches"
    first, *others = caching.pieces_of(task)
    caching.write(first, task, str(folder))
    written = caching.folder_of(str(folder), "begun") / first.file
    before = written.stat().mtime, written.read_bytes()
    (written.parent / "parts" / f"{others[0].file}.0123").write_bytes(b"half")
    with pytest.raises(UserError, match="is not written. Run the same command again."):
        caching.complete(task, str(folder), BYTES)
    assert not caching.is_complete(str(folder), "begun", BYTES)
    config = DataConfig("begun", {"inputs": 8, "targets": 8}, 4, BYTES, use_cached=True, cache_dirs=(str(folder),))
    with pytest.raises(UserError, match='"begun" is read from a cache alone, and there is none in SeqIO'):
        SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=0)
    for piece in (first, *others):
        caching.write(piece, task, str(folder))
    assert caching.complete(task, str(folder), BYTES) == {"train": 60, "validation": 30}
    assert (written.stat().mtime, written.read_bytes()) == before and caching.is_complete(str(folder), "begun", BYTES)
    stats = json.loads((written.parent / "stats.train.json").read_text())
    lengths = [len(f"begun {number} {line}") for number, lines in enumerate((30, 20, 10)) for line in range(lines)]
    assert stats == {
        "examples": 60, "inputs_tokens": sum(lengths), "inputs_max_tokens": max(lengths),
        "targets_tokens": sum(lengths), "targets_max_tokens": max(lengths),
    }  # fmt: skip
    seqios = caching.find_cache(task, [str(folder)]).get_dataset(
        {"inputs": 64, "targets": 64}, use_cached=True, shuffle=False
    )  # SeqIO itself reads it
    assert sum(1 for _ in seqios) == 60


def test_a_cache_of_another_vocabulary_is_refused(registered, tmp_path):
    folder = tmp_path / "caches"
    cached(registered("bytes", (30,)), folder)
    other = ByteVocabulary(extra_ids=50)
    config = DataConfig("bytes", {"inputs": 8, "targets": 8}, 4, other, use_cached=True, cache_dirs=(str(folder),))
    with pytest.raises(UserError, match=r"holds the ids of ByteVocabulary\(extra_ids=100\); the run's VOCABULARY"):
        SeqioBatches(resolve_tasks(config, "encoder_decoder", 384), config, seed=0)
    with pytest.raises(UserError, match="holds the ids of"):
        caching.is_complete(str(folder), "bytes", other)
    (caching.folder_of(str(folder), "bytes") / caching.MANIFEST).unlink()  # as SeqIO's own have none
    task = seqio.TaskRegistry.get("bytes")
    task = caching.find_cache(task, [str(folder)])
    task._output_features = {n: seqio.Feature(_Shifted(100)) for n in ("inputs", "targets")}
    with pytest.raises(UserError, match='was made with another vocabulary: its first "inputs"'):
        caching.cached_source(task, "train", BYTES)


class _Shifted(seqio.ByteVocabulary):
    def _encode(self, s):
        return [i + 1 for i in super()._encode(s)]


TASKS = """
import known_tasks
import seqio

for number in range(10):
    files = {"train": [f"{number}_{part}.tsv" for part in range(1 + number % 3)], "validation": ["known.tsv"]}
    seqio.TaskRegistry.add(
        f"task{number}", seqio.TextLineDataSource(files), preprocessors=known_tasks.steps, metric_fns=[known_tasks.exact],
        output_features={name: seqio.Feature(known_tasks.vocabulary) for name in ("inputs", "targets")},
    )
seqio.MixtureRegistry.add("ten", [(f"task{number}", 1.0) for number in range(10)])
"""


@pytest.mark.slow
def test_ten_tasks_by_several_workers_killed_and_run_again(tmp_path, monkeypatch):
    """Beam's local runner with two processes; its portable runner gives the same bytes; SeqIO's own cache is trained on."""
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path)
    (tmp_path / "ten_tasks.py").write_text(TASKS)
    for number in range(10):
        for part in range(1 + number % 3):
            lines = (f"what is {number} {part} {line}?\tanswer {line % 7}\n" for line in range(20 + number))
            pathlib.Path(f"{number}_{part}.tsv").write_text("".join(lines))
    common = ["cache", "--gin_bindings=import ten_tasks", "--gin.VOCABULARY=@ByteVocabulary()"]
    command = [*common, "--task=ten", "--output_dir=caches"]
    killed = commands.Command(*command, log="log")
    killed.wait_until(lambda: len(list(pathlib.Path("caches").rglob("*.tfrecord-*-of-?????"))) >= 3)
    killed.kill()
    killed.wait()
    assert len(list(pathlib.Path("caches").rglob("COMPLETED"))) < 10
    done = commands.run(*command)
    assert done.returncode == 0, done.stderr
    assert "task2: 66 examples of train, 12 examples of validation" in done.stdout
    assert commands.run(*command).stderr.count("is cached already") == 10
    portable = "--pipeline_options=--runner=PortableRunner,--job_endpoint=embed,--environment_type=LOOPBACK"
    assert commands.run(*common, "--task=task2", "--output_dir=others", portable).returncode == 0
    for path in pathlib.Path("caches/task2").iterdir():
        assert path.read_bytes() == pathlib.Path("others/task2", path.name).read_bytes(), path
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("ten_tasks")
    on_the_fly = batches("ten", shards=4)
    assert_equal(batches("ten", shards=4, use_cached=True, cache_dirs=("caches",)), on_the_fly)


def test_what_cannot_be_cached_is_said(capsys):
    from t5x_lab.cli.main import main

    cache = ["cache", "--output_dir=caches", "--gin.VOCABULARY=@ByteVocabulary()"]
    assert main(cache) == 2 and "Say which task or mixture to cache: --task=NAME" in capsys.readouterr().err
    assert main([*cache, "--task=sotu_full"]) == 2 and 'no task or mixture "sotu_full". Did you mean' in capsys.readouterr().err
    assert main([*cache, "--task=sotu"]) == 2 and "is plain text" in capsys.readouterr().err


@pytest.mark.slow
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
    texts = lambda found: sorted(row.tobytes() for batch in found for row in batch["encoder_input_tokens"])
    assert len(read) == 5 and set(texts(read[-1:])) == set(texts(batches("known", number=4, shards=2)[-1:]))
