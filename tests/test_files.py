"""Users' files: every reader accepts the same types, and reads the same text and the same rows from each."""

import csv
import gzip
import json
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from conftest import shared_data
from helpers import exhaustive
from synthetic_records import write_lines

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data.config import TextFiles
from t5x_lab.data.sources import text_files as sources
from t5x_lab.data.sources.file_types import file_type, read_lines
from t5x_lab.evaluation.inference.files import read_examples
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records.sources import open_records

TEXTS = ["first\n\nwith a blank line", "tab\there", '“quotes” " and , commas', "a\u2028b\x0bc\rd"]


def texts_of(pattern, **options):
    source = sources.text_files(TextFiles(train=str(pattern), **options))
    return [text.decode() for text in source.get_dataset(shuffle=False).map(lambda x: x["text"]).as_numpy_iterator()]


def records_of(path, **options):
    source = open_records("set", Records(files={"train": str(path)}, **options), ("train",))
    return [json.loads(line) for line in source.get_dataset("train", shuffle=False).as_numpy_iterator()]


def compress(path, kind):
    data = pathlib.Path(path).read_bytes()
    compressed = gzip.compress(data) if kind == ".gz" else pa.Codec("zstd").compress(data, asbytes=True)
    pathlib.Path(f"{path}{kind}").write_bytes(compressed)
    return f"{path}{kind}"


def write_tfrecord(path, rows, **options):
    bytes_list = lambda values: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode() for value in values]))
    with tf.io.TFRecordWriter(str(path), options=options.get("compression")) as writer:
        for row in rows:
            features = {name: bytes_list(value if isinstance(value, list) else [value]) for name, value in row.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def write_rows(path, kind, rows):
    if kind == "jsonl":
        write_lines(path, rows)
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "tsv":
        path.write_text("".join("\t".join(values) + "\n" for values in (rows[0], *(row.values() for row in rows))))
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_tfrecord(path, rows)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "tfrecord"])
def test_all_readers_read_the_same_rows_of_every_kind(kind, compression, tmp_path):
    """Reads them as texts, as records of a data set and as inputs of inference. A .tsv file has no tabs and line ends."""
    path = tmp_path / f"rows.{kind}"
    rows = [{"inputs": text, "label": str(n)} for n, text in enumerate(TEXTS[2:] if kind == "tsv" else TEXTS)]
    write_rows(path, kind, rows)
    path = compress(path, compression) if compression else path
    if (kind, compression) in (("parquet", ".gz"), ("parquet", ".zst"), ("tfrecord", ".zst")):
        for read in (texts_of, records_of, lambda path: list(read_examples(str(path), "predict"))):
            with pytest.raises(UserError, match="has an unsupported file type"):
                read(path)
        return
    expected = [row["inputs"] for row in rows]
    if kind == "csv":
        expected = [text.replace("\r\n", "\n") for text in expected]
    assert texts_of(path, text_key="inputs") == expected
    assert [record["inputs"] for record in records_of(path)] == expected
    assert [example.inputs for example in read_examples(str(path), "predict")] == expected


@pytest.mark.parametrize("compression", ["", exhaustive(".gz"), exhaustive(".zst")])
def test_a_text_file_is_a_document_and_a_long_one_is_divided_at_line_ends(compression, tmp_path):
    """Documents keep blank lines, U+2028 and lone carriage returns. Only line ends become one character."""
    long = "".join(f"line {n} {'x' * (n % 90)}\n" for n in range(3_000))
    contents = {"a": "\ufeffone\r\n\r\n  two\x85 \u2028 three\rfour\n", "b": long, "c": "\n \n"}
    for name, content in contents.items():
        path = tmp_path / f"{name}.txt"
        path.write_bytes(content.encode())
        if compression:
            compress(path, compression)
    documents = texts_of(tmp_path / f"*.txt{compression}")
    assert documents[0] == "one\n\n  two\x85 \u2028 three\rfour"
    assert len(documents) == 1 + -(-len(long) // 65_536) and all(len(text.encode()) <= 65_536 for text in documents)
    assert "\n".join(documents[1:]) == long.removesuffix("\n")
    assert texts_of(tmp_path / f"a.txt{compression}", lines_per_document=2) == ["one\n  two\x85 \u2028 three\rfour"]


@pytest.mark.parametrize("compression", ["", exhaustive(".gz"), exhaustive(".zst")])
def test_lines_are_read_on_from_every_position(compression, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n\nfour ü\nfive".encode())
    name = compress(path, compression) if compression else str(path)
    kind = file_type(name).compression
    lines = list(read_lines(name, kind))
    assert [line.decode() for line, _ in lines] == ["one", "two", "", "four ü", "five"]
    for number, (_, position) in enumerate(lines):
        assert list(read_lines(name, kind, position)) == lines[number + 1 :]


def test_what_a_crawl_has_is_corrected_and_counted(tmp_path, capsys):
    """The same in every format: missing texts are left out, invalid bytes and halves of surrogate pairs replaced."""
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": ""}\n{"text": "half \\ud83d of it"}\n{"text": "ok"}\n')
    pa.parquet.write_table(pa.table({"text": pa.array([None, "", "ok"]).dictionary_encode()}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert texts_of(tmp_path / "a.jsonl") == ["half \ufffd of it", "ok"]
    assert texts_of(tmp_path / "a.parquet") == ["ok"]
    assert texts_of(tmp_path / "a.txt") == ["caf\ufffd"]
    for folder, expected in (("null.jsonl", []), ("bom.jsonl", ["x"]), ("bom.txt", ["first\nsecond"])):
        assert texts_of(shared_data("bug_inputs", "text_files") / folder) == expected


@pytest.mark.parametrize(
    "name, write, says",
    [
        ("a.jsonl", lambda path: path.write_text('{"text": ["a", "b"]}\n'), r"\['a', 'b'\] instead of a text"),
        ("a.jsonl", lambda path: path.write_text('{"body": "a"}\n'), 'not an object with a text under "text"'),
        (
            "a.parquet",
            lambda path: pa.parquet.write_table(pa.table({"text": [1, 2]}), path),
            'column "text" of .* has values of the type int64, not texts',
        ),
        ("a.txt.gz", lambda path: path.write_bytes(b""), "has 0 bytes and is no gzip file"),
        ("a.txt.gz", lambda path: path.write_bytes(gzip.compress(b"some text " * 99)[:30]), "no valid gzip file: Truncated"),
        ("a.parquet", lambda path: path.write_bytes(b""), "no valid Parquet file"),
    ],
)
def test_what_is_no_text_is_refused(name, write, says, tmp_path):
    write(tmp_path / name)
    with pytest.raises((UserError, tf.errors.OpError), match=says):
        texts_of(tmp_path / name)


def test_quotes_of_glues_files_are_text():
    """GLUE's files have a header line and no quoting: six records, of which the quotes made three."""
    records = records_of(shared_data("bug_inputs", "glue_tsv") / "train.tsv")
    assert [record["label"] for record in records] == [1, 1, 0, 0, 0, 1] and records[3]["sentence"] == 'he called it " bold'
    (record,) = records_of(shared_data("bug_inputs", "text_files") / "newline_in_quotes.csv")
    assert record == {"inp": "two\nlines", "out": "b"}
    numbers = records_of(shared_data("bug_inputs", "text_files") / "numbers.tsv")
    assert [(record["label"], record["id"]) for record in numbers] == [(1, "007"), (1, "1e5")]


@pytest.mark.parametrize(
    "content, says",
    [
        ('a,b\n1,"never closed\n2,3\n', "line 3 is no row of a .csv file"),
        ("a,b\n1,2\n3\n", "line 3 has 1 fields instead of 2"),
        ("a,b\n1,2,3\n", "line 2 has 3 fields instead of 2"),
        ("a;b\n1;2\n", "Separate columns by commas"),
        ("a,a\n1,2\n", "two columns of the same name"),
    ],
)
def test_a_malformed_table_is_not_read_short(content, says, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises((UserError, tf.errors.OpError), match=says):
        records_of(tmp_path / "a.csv")


def test_lists_of_one_value_in_tfrecords_stay_lists(tmp_path):
    write_tfrecord(
        tmp_path / "a.tfrecord", [{"question": "who", "answers": ["me"]}, {"question": "what", "answers": ["a", "b"]}]
    )
    with pytest.raises(tf.errors.OpError, match=r'"answers" .* has 2 values. .* Records.lists = \("answers",\)'):
        records_of(tmp_path / "a.tfrecord")
    records = records_of(tmp_path / "a.tfrecord", lists=("answers",))
    assert records == [{"question": "who", "answers": ["me"]}, {"question": "what", "answers": ["a", "b"]}]


def test_vocab_names_its_own_flags_and_says_the_size_of_a_model(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    write_lines(
        tmp_path / "a.jsonl", [{"body": f"some words number {n} of a text that are enough for a few pieces"} for n in range(99)]
    )
    command = ["vocab", f"--output={tmp_path}/v.model", "--size=45"]
    for flags, says in (
        ([f"--input={tmp_path}/folder"], "--input = .* matches the folder"),
        ([f"--input={tmp_path}/none*.txt"], "No file matches --input"),
        ([f"--input={tmp_path}/a.jsonl"], "or set the field with --text_key=NAME"),
    ):
        assert main([*command, *flags]) == 2
        stderr = capsys.readouterr().err
        assert re.search(says, stderr) and "TextFiles" not in stderr, stderr
    assert main([*command, f"--input={tmp_path}/a.jsonl", "--text_key=body"]) == 0
    assert "45 pieces" in (printed := capsys.readouterr().out) and "--gin.TransformerConfig.vocab_size=256" in printed
