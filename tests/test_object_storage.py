"""Runs on gs:// and s3://, against servers of both on loopback, with the faults that object storage has."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import socket
import threading
import time

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
import tensorflow as tf
from cached_tasks import BYTES, assert_equal, cached, of_tfds, task_of
from commands import Command
from etils import epath
from helpers import exhaustive
from runs_of_text import FULL_LM, flags, losses
from storage_servers import storage

from t5x_lab.checkpoints.layout import finished_steps, read_info
from t5x_lab.config.errors import NotHere
from t5x_lab.config.object_storage import retry
from t5x_lab.config.temporary import copy_files
from t5x_lab.data.cache.reading import use_cache
from t5x_lab.data.config import DataConfig, TextFiles
from t5x_lab.data.tasks.names import documents, find_members
from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import SentencePieceVocabulary
from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece
from t5x_lab.evaluation.inference import output as output_module
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.convert.export_tokenizer import read_sentencepiece_bytes

pytestmark = pytest.mark.slow


def train(directory, steps=12, *more):
    return flags("rotary_decoder", FULL_LM, directory, steps, "--gin.CHECKPOINT_PERIOD=3", "--gin.EVAL_PERIOD=6", *more)


def faults(seed):
    """Returns a function for `Storage.fault`: 503s, slow replies, and connections that are closed before and within replies."""
    rng, lock = random.Random(seed), threading.Lock()

    def fault(method, path):
        with lock:
            kind = rng.random()
        if kind > 0.97:
            time.sleep(0.1)
        return {0: 503, 1: -1, 2: -2}.get(int(kind * 100))

    return fault


@pytest.mark.parametrize("scheme", ["s3", exhaustive("gs")])
def test_a_run_in_a_bucket_is_that_on_a_disk(scheme):
    """It is killed once, and three of a hundred requests fail."""
    assert Command(*train("whole")).wait() == 0
    with storage(scheme) as bucket:
        bucket.fault = faults(0)
        command = Command(*train(f"{bucket.url}/runs/a"), environment=bucket.environment)
        command.wait_until(lambda: "runs/a/checkpoints/3/commit_success.txt" in bucket.names("runs/a/checkpoints"))
        command.kill()
        command.wait()
        again = commands.run(*train(f"{bucket.url}/runs/a"), environment=bucket.environment)
        assert again.returncode == 0, again.stderr
        assert "Continuing after step" in again.stderr
        bucket.download("runs/a", "copy")
        assert losses("copy") == losses("whole") and len(losses("whole")) == 12
        assert finished_steps("copy")[-1] == 12
        info = [read_info(epath.Path(directory, "checkpoints/12").absolute())["checksums"] for directory in ("copy", "whole")]
        assert info[0] == info[1]

        pathlib.Path("prompts.txt").write_text("Fellow citizens\n")
        infer = lambda directory: [
            "infer", f"--model_dir={directory}", "--input=prompts.txt", f"--output={directory}/out.jsonl", "--max_tokens=8"
        ]  # fmt: skip
        convert = lambda directory, end, to: ["convert", f"--source={directory}", f"--target={directory}_{end}", f"--to={to}"]
        remote = f"{bucket.url}/runs/a"
        for argv in (
            infer("whole"),
            convert("whole", "hf", "hf"),
            infer(remote),
            convert(remote, "hf", "hf"),
            convert(remote, "again", "t5x_lab"),
            ["inspect", f"{remote}_hf"],
            ["report", remote],
            ["eval", f"--model_dir={remote}", f"--output={remote}/more"],
            ["eval", f"--model_dir={remote}_again", *FULL_LM, f"--output={remote}/of_copy"],
        ):
            done = commands.run(*argv, environment=bucket.environment)
            assert done.returncode == 0, done.stderr
        bucket.download("runs/a", "copy")
        bucket.download("runs/a_hf", "copy_hf")
        bucket.download("runs/a_again", "copy_again")
    for file in ("model.safetensors", "config.json"):
        assert pathlib.Path("copy_hf", file).read_bytes() == pathlib.Path("whole_hf", file).read_bytes()
    assert finished_steps("copy_again") == [12]
    assert pathlib.Path("copy/out.jsonl").read_text() == pathlib.Path("whole/out.jsonl").read_text()
    assert "<html" in pathlib.Path("copy/report.html").read_text()


@pytest.mark.parametrize("scheme", ["s3", exhaustive("gs")])
def test_mistakes_and_faults_are_sentences_with_the_path(scheme):
    """A bucket that does not exist; permissions that are missing from the start, and from the first checkpoint on."""
    with storage(scheme) as bucket:
        for directory, fault in ((f"{scheme}://absent/a", None), (f"{bucket.url}/a", 403)):
            bucket.fault = lambda method, path, fault=fault: fault
            done = commands.run(*train(directory, 3), environment=bucket.environment)
            last = done.stderr.strip().splitlines()[-1]
            path = directory if fault is None else bucket.url
            assert done.returncode in (1, 2) and path in last and "Traceback" not in done.stderr, done.stderr

        bucket.fault = lambda method, path: 403 if "checkpoints" in path and method in ("PUT", "POST") else None
        done = commands.run(*train(f"{bucket.url}/b", 6), environment=bucket.environment)
        assert done.returncode == 1 and "Retrying does not help" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("scheme", [exhaustive("s3"), exhaustive("gs")])
def test_saving_goes_on_when_credentials_are_renewed(scheme):
    """Requests are refused as expired while the second checkpoint is written, listings lag, and nothing is lost."""
    with storage(scheme) as bucket:
        expired = threading.Event()
        bucket.listing_lag = 1.0
        bucket.fault = lambda method, path: 401 if expired.is_set() else None
        command = Command(*train(f"{bucket.url}/a", 30), environment=bucket.environment)
        command.wait_until(lambda: "a/checkpoints/3/commit_success.txt" in bucket.names("a/checkpoints"))
        expired.set()
        command.wait_until(lambda: "Retrying in" in command.output())
        expired.clear()
        assert command.wait() == 0, command.output()
        assert "Saving works again" in command.output()
        bucket.download("a", "copy")
    assert list(losses("copy")) == list(range(1, 31)) and finished_steps("copy")[-1] == 30


def write_output(path, environment):
    """Writes an output that is interrupted, refused, continued and finished, twice. Returns what the folder had each time."""
    os.environ |= environment
    output_module.SECONDS_BETWEEN_PARTS = 0.0
    folder, contents = epath.Path(path).parent, []

    def write(lines, error=None, keep=None):
        with contextlib.suppress(KeyboardInterrupt), output_module.Output(path) as output:
            if not os.path.exists(output.settings):
                output.open_settings("w").write("{}")
            if keep is not None:
                output.truncate(keep)
            before = pathlib.Path(output.local).read_text() if os.path.exists(output.local) else ""
            for line in lines:
                output.append(line)
            if error:
                raise error
        whole = epath.Path(path).read_text() if epath.Path(path).exists() else None
        contents.append((before, whole, sum(".part-" in file.name for file in folder.iterdir())))

    write([b"one\n", b"two\n"], KeyboardInterrupt())
    write([], KeyboardInterrupt())  # as a refusal, which changes nothing
    write([b"three\n"], keep=4)
    write([b"four\n", b"five\n"], KeyboardInterrupt())
    write([b"six\n"], KeyboardInterrupt(), keep=14)
    write([b"seven\n"])
    write([b"2\n"], keep=4)
    return contents


@pytest.mark.parametrize("scheme", ["s3", exhaustive("gs")])
def test_an_output_grows_in_parts(scheme):
    """Compares what each attempt finds, the whole output after it, and the number of parts after it."""
    with storage(scheme) as bucket:
        contents = commands.call(write_output, f"{bucket.url}/out/x.jsonl", bucket.environment)
    assert contents == [
        ("", None, 2),
        ("one\ntwo\n", None, 2),
        ("one\n", "one\nthree\n", 0),
        ("one\nthree\n", "one\nthree\n", 2),
        ("one\nthree\nfour", "one\nthree\n", 1),
        ("one\nthree\nfoursix\n", "one\nthree\nfoursix\nseven\n", 0),
        ("one\n", "one\n2\n", 0),
    ]


@pytest.mark.parametrize(
    "path, error, calls",
    [
        ("s3://b/x", OSError(5, "The provided token has expired."), 7),
        ("s3://b/x", OSError("PERMISSION_DENIED: Error writing x: Unknown [http_response_code='401']"), 7),
        ("s3://b/x", OSError("PERMISSION_DENIED: Error writing x: Forbidden [http_response_code='403']"), 1),
        ("s3://b/x", PermissionError("Access Denied"), 1),
        ("gs://b/x", OSError("Forbidden: b/b/o\\nsomeone does not have storage.objects.create access"), 1),
        ("gs://b/x", TypeError("a mistake in the program"), 1),
        ("/x", OSError(5, "Input/output error"), 1),
    ],
)
def test_what_may_pass_is_tried_again(path, error, calls, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)

    def fail():
        tried.append(1)
        raise error

    tried: list[int] = []
    with pytest.raises(type(error)):
        retry(fail, path)
    assert len(tried) == calls and sum(pauses) == (60 if calls > 1 else 0)


def read_all(folder, environment):
    """Yields the examples of SeqIO's own sources, of TFDS, of caches of these, and of texts, all in one folder."""
    os.environ |= environment
    encode_example = lambda text: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
    lines = [[f"{file} {line} words" for line in range(120)] for file in range(2)]
    for number, texts in enumerate(lines):
        rows = [json.dumps({"text": text}) for text in texts]
        epath.Path(f"{folder}/lines{number}.txt").write_text("\n".join(texts))
        epath.Path(f"{folder}/rows{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
        pq.write_table(pa.table({"text": texts}), "table.parquet")
        with tf.io.TFRecordWriter("file.tfrecord") as writer:
            for text in texts:
                features = tf.train.Features(feature={"text": encode_example(text)})
                writer.write(tf.train.Example(features=features).SerializeToString())
        epath.Path(f"{folder}/table{number}.parquet").write_bytes(pathlib.Path("table.parquet").read_bytes())
        epath.Path(f"{folder}/records{number}.tfrecord").write_bytes(pathlib.Path("file.tfrecord").read_bytes())
    if "://" in folder:
        of_tfds(pathlib.Path.cwd() / "prepared", "news", (90, 30))
        copy_files(pathlib.Path("prepared/news"), epath.Path(folder, "news"))
        news = seqio.TfdsDataSource("news:1.0.0", folder, splits={"train": "train", "validation": "train[:10]"})
    else:
        news = of_tfds(pathlib.Path(folder), "news", (90, 30))
    both = lambda pattern: {"train": f"{folder}/{pattern}", "validation": f"{folder}/{pattern}"}
    records = seqio.TFExampleDataSource(both("records*"), {"text": tf.io.FixedLenFeature([], tf.string)})
    for source in (seqio.TextLineDataSource(both("lines*.txt")), records, news):
        task = task_of(type(source).__name__, source)
        seqio.TaskRegistry.add_provider(task.name, task)
        config = DataConfig(task.name, {}, 16, BYTES, use_cached=True, cache_dirs=(f"{folder}/caches",))
        (member,) = find_members(config)
        assert cached(member.task, f"{folder}/caches")["train"] in (120, 240)
        for task in (member.task, use_cache(member.task, config)):
            yield [*task.get_dataset({}, "train", seed=0, try_in_mem_cache=False).take(50).as_numpy_iterator()]
    epath.Path(f"{folder}/mine.gin").write_text("VOCABULARY = @ByteVocabulary()\n")
    assert GinConfig((f"{folder}/mine.gin",)).vocabulary() == BYTES
    for kind in ("lines*.txt", "rows*.jsonl.gz", "table*.parquet", "records*.tfrecord"):
        lines_per_document = 1 if kind.endswith("txt") else None
        texts = {"mine": TextFiles(f"{folder}/{kind}", lines_per_document=lines_per_document)}
        yield [{"text": text} for text in documents(DataConfig("mine", {}, 16, BYTES, texts=texts))]


def listed(function, *args):
    return list(function(*args))


@pytest.mark.parametrize("scheme", ["s3", exhaustive("gs")])
def test_texts_records_and_caches_are_read_from_a_bucket(scheme):
    pathlib.Path("local").mkdir()
    expected = commands.call(listed, read_all, "local", {})
    with storage(scheme) as bucket:
        fault = faults(1)  # Google's emulator forgets an upload whose last reply was lost
        bucket.fault = lambda method, path: fault(method, path) if method in ("GET", "HEAD") else None
        actual = commands.call(listed, read_all, f"{bucket.url}/data", bucket.environment)
        names = [name.removeprefix("data/") for name in bucket.names("data/caches")]
    local = pathlib.Path("local")
    assert sorted(names) == sorted(str(path.relative_to(local)) for path in local.glob("caches/**/*") if path.is_file())
    for examples, expected_examples in zip(actual, expected, strict=True):
        assert_equal(examples, expected_examples)


def encode(path, environment):
    os.environ |= environment
    return build_vocabulary(SentencePieceVocabulary(path=path, extra_ids=0)).encode("fellow citizens")


def test_a_vocabulary_is_read_from_a_bucket():
    train_sentencepiece(["fellow citizens of the senate", "of the house of representatives"] * 20, "local.model", 30)
    with storage("s3") as bucket:
        copied = commands.call(copy_to, "local.model", f"{bucket.url}/v/x.model", bucket.environment)
        assert (
            copied
            == commands.call(encode, "local.model", {})
            == commands.call(encode, f"{bucket.url}/v/x.model", bucket.environment)
        )


def test_without_a_network_nobody_waits_for_the_published_vocabulary(monkeypatch):
    def fail(host, port):
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    hosts: list[str] = []
    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("etils.epath.Path", None)  # whoever asks for the file itself, fails otherwise
    with pytest.raises(NotHere, match="gs://t5-data/.* cannot be read"):
        build_vocabulary(SentencePieceVocabulary())
    assert read_sentencepiece_bytes(SentencePieceVocabulary()) is None
    assert hosts == ["storage.googleapis.com"] * 2


def copy_to(source, target, environment):
    os.environ |= environment
    epath.Path(target).write_bytes(pathlib.Path(source).read_bytes())
    return encode(target, {})
