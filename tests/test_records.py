"""Records of labelled data sets, from wherever they lie: the same fields from every kind of file and library."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records.json_records import json_records, record_fields
from t5x_lab.prompts.records.sources import open_records

RECORDS = [
    {"text": 'a "quoted", text\twith\nall', "label": 1, "answers": {"text": ["x", "y"], "start": [3, 4]}},
    {"text": "", "label": -1, "answers": {"text": [], "start": []}},
    {"text": "Größe 😀", "label": 0, "answers": {"text": ["z"], "start": [0]}},
] * 70
FLAT = [{"text": record["text"], "label": record["label"]} for record in RECORDS]

LINES = [{**record, "text": " ".join(record["text"].split())} for record in FLAT]


def opened(path, mode="wt"):
    return gzip.open(path, mode, encoding="utf-8") if path.suffix == ".gz" else open(path, mode, encoding="utf-8", newline="")


def write_jsonl(path):
    with opened(path) as file:
        file.writelines(json.dumps(record) + "\n\n" for record in RECORDS)


def write_table(path):
    with opened(path) as file:
        if ".tsv" in path.name:  # without quotes
            file.writelines(f"{record['text']}\t{record['label']}\n" for record in [{"text": "text", "label": "label"}, *LINES])
            return
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(FLAT)


def write_parquet(path):
    pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=50)


def write_examples(path):
    with tf.io.TFRecordWriter(str(path), "GZIP" if path.suffix == ".gz" else "") as writer:
        for record in FLAT:
            writer.write(seqio.dict_to_tfexample(record).SerializeToString())


KINDS = {
    "jsonl": write_jsonl, "jsonl.gz": write_jsonl, "json": write_jsonl, "csv": write_table, "csv.gz": write_table,
    "tsv": write_table, "parquet": write_parquet, "tfrecord": write_examples, "tfrecord.gz": write_examples,
}  # fmt: skip


def read(dataset, records, split="train"):
    lines = json_records(open_records(dataset, records).get_dataset(split, shuffle=False)).as_numpy_iterator()
    return [record_fields(line["record"], records) for line in lines]


@pytest.mark.parametrize("end", KINDS)
def test_every_kind_of_file_gives_the_same_records(end, tmp_path):
    (tmp_path / "mine" / "set").mkdir(parents=True)
    KINDS[end](tmp_path / "mine" / "set" / f"dev.{end}")
    records = Records(files=str(tmp_path / "{dataset}" / f"{{split}}.{end}"), splits={"validation": "dev"})
    source = open_records("mine/set", records)
    assert list(source.splits) == ["validation"]
    assert read("mine/set", records, "validation") == (
        RECORDS if end.startswith(("json", "parquet")) else LINES if end.startswith("tsv") else FLAT
    )
    with pytest.raises(NotHere, match=r'The data set "mine/set" is not available: no file matches .*mine/set/train\.'):
        source.list_shards("train")


def test_what_datasets_saved_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(str(tmp_path / "set"))
    records = Records(saved=str(tmp_path / "{dataset}"))
    assert read("set", records) == RECORDS
    with pytest.raises(tf.errors.OpError, match="The split test of .* cannot be read by datasets"):
        read("set", records, "test")


def test_what_tensorflow_datasets_prepared_is_read(tmp_path):
    """Texts, numbers, labels, lists and lists of objects."""
    features = tfds.features.FeaturesDict(
        {
            "text": tfds.features.Text(),
            "label": tfds.features.ClassLabel(num_classes=2),
            "answers": tfds.features.Sequence({"text": tfds.features.Text(), "start": tfds.features.Scalar(tf.int32)}),
        }
    )
    of_tfds = [{**record, "text": str(number)} for number, record in enumerate(RECORDS)]
    tfds.dataset_builders.store_as_tfds_dataset(
        "mine", version="1.0.0", features=features, data_dir=str(tmp_path), split_datasets={"train": enumerate(of_tfds)}
    )
    seqio.set_tfds_data_dir_override(str(tmp_path))
    try:
        result = read("mine", Records(tfds="{dataset}:1.0.0"))
        assert read("mine", Records(tfds="{dataset}")) == result  # no version: what is prepared
    finally:
        seqio.set_tfds_data_dir_override(None)
    assert sorted(result, key=lambda record: int(record["text"])) == of_tfds


def test_fields_and_labels_may_be_called_otherwise():
    records = Records(files="x.jsonl", names={"text": "sentence"}, labels={"label": ("no", "yes"), "truth": ("False", "True")})
    assert record_fields(b'{"sentence": "s", "label": "yes", "truth": false}', records) == {"text": "s", "label": 1, "truth": 0}
    assert record_fields(b'{"label": 1}', records) == {"label": 1}
    swapped = Records(files="x.jsonl", names={"text": "title", "title": "text", "author": "by.name"})
    assert record_fields(b'{"text": "t", "title": "n", "by": {"name": "a"}}', swapped) == {
        "text": "n", "title": "t", "author": "a", "by": {"name": "a"},
    }  # fmt: skip
    for line, says in (
        (b'{"label": "maybe"}', 'the label is "maybe"; it must be one of no, yes'),
        (b"[1]", "the record is not a JSON object"),
        (b"{", "the record is not JSON"),
    ):
        with pytest.raises(UserError, match=says):
            record_fields(line, records)


def test_what_is_wrong_with_records_is_said():
    with pytest.raises(UserError, match="Records has neither files, tfds, saved nor hub. Set exactly one"):
        Records()
    with pytest.raises(UserError, match="Records has files and hub"):
        Records(files="a.csv", hub="b")
    with pytest.raises(UserError, match="a.doc has an unsupported file type"):
        open_records("set", Records(files="a.doc"))
    with pytest.raises(UserError, match='Records.files of the data set "set" has files of several types .a.csv, b.tsv.'):
        open_records("set", Records(files={"train": "a.csv", "test": "b.tsv"}))
