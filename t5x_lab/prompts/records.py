"""Records of labelled data sets, each with its fields as JSON, wherever the user has them.

A record is an object of JSON, {"record": its text}, as the field's own names have it.
"""

import csv
import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import seqio
import tensorflow as tf

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.data.sources import TOGETHER, OpenedFile, compression_of, read_on

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Records:
    """Where the records of a data set lie, or those of all data sets by one rule.

    Attributes:
      files: a pattern of .jsonl, .json (lines), .csv, .tsv, .parquet or .tfrecord files, or patterns by split; all but .parquet
        may be gzipped. "{dataset}" and "{split}" stand for the names, as in "corpora/{dataset}/{split}*.jsonl.gz".
      tfds: a name in TensorFlow Datasets, such as "glue/mrpc:2.0.0" or "huggingface:{dataset}".
      saved: a folder that Hugging Face's `datasets` saved (`save_to_disk`), by split.
      hub: a name on Hugging Face's hub, of its cache where that has it, such as "nyu-mll/glue:mrpc"; needs `datasets`.
      splits: what a split is called there, by its name here: {"validation": "dev_r1"}; others are called the same.
      integers: fields of .csv and .tsv files that are whole numbers.
      labels: fields whose values are names there and numbers in templates: {"label": ("entailment", "not_entailment")}.
      names: fields that are called otherwise there, by their names here: {"text": "sentence"}.
    """

    files: str | dict[str, str] | None = None
    tfds: str | None = None
    saved: str | None = None
    hub: str | None = None
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    integers: tuple[str, ...] = ("label",)
    labels: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_types(self)
        given = [name for name in ("files", "tfds", "saved", "hub") if getattr(self, name)]
        if len(given) != 1:
            raise UserError(
                f"Records has {' and '.join(given) or 'neither files, tfds, saved nor hub'}. Give exactly one of them, for "
                'example Records.files = "corpora/{dataset}/{split}.jsonl".'
            )

    def pattern(self, dataset: str, split: str) -> str:
        """Where the files of a split are; "" where nothing is said of it."""
        pattern = self.files.get(split, "") if isinstance(self.files, dict) else self.files or ""
        return pattern.format(dataset=dataset, split=self.splits.get(split, split))


def source_of(dataset: str, records: Records, splits: Sequence[str] = SPLITS) -> seqio.DataSource:
    """The source of a data set's records; `as_json` makes of its elements what templates read. Nothing is opened here.

    Args:
      dataset: its name, such as "super_glue/rte".
      records: where it lies.
      splits: those that it has.
    """
    named = {split: records.splits.get(split, split) for split in splits}
    if records.tfds:
        return seqio.TfdsDataSource(records.tfds.format(dataset=dataset), splits=named)
    if records.files is None:
        place = (records.saved or records.hub or "").format(dataset=dataset)
        rows = read_on(functools.partial(_of_datasets, is_saved=bool(records.saved)))
        return _Rows(lambda name: rows(name).unbatch(), {split: [f"{place}@{there}"] for split, there in named.items()})
    return _Files(dataset, records, splits)


class _Rows(seqio.FileDataSource):
    """Records that are read like a file's, of what is none."""

    def list_shards(self, split: str) -> list[str]:
        return list(self._split_to_filepattern[split])


class _Files(seqio.FileDataSource):
    """Records in files of one kind, which are looked for when something is read of them."""

    def __init__(self, dataset: str, records: Records, splits: Sequence[str]):
        patterns = {split: pattern for split in splits if (pattern := records.pattern(dataset, split))}
        self._dataset, self._is_rule = dataset, not isinstance(records.files, dict)
        super().__init__(_reader(dataset, patterns, records), patterns)

    @property
    def splits(self) -> list[str]:
        """Those said; of one pattern for all, those that there are files of."""
        said = list(self._split_to_filepattern)
        found = [split for split in said if tf.io.gfile.glob(self._split_to_filepattern[split])] if self._is_rule else said
        return found or said

    def list_shards(self, split: str) -> list[str]:
        files = sorted(tf.io.gfile.glob(self._split_to_filepattern[split]))
        if not files:
            raise NotHere(
                f'The data set "{self._dataset}" is not here: no file matches {self._split_to_filepattern[split]}. Put its '
                "records there, or say where they are with Records.files, .tfds, .saved or .hub."
            )
        return files


def _reader(dataset: str, patterns: Mapping[str, str], records: Records) -> Callable[[Any], tf.data.Dataset]:
    """f(file) -> its records: lines of JSON, or rows as JSON."""
    kinds = {_kind(pattern) for pattern in patterns.values()}
    if len(kinds) != 1 or None in kinds:
        said = ", ".join(dict.fromkeys(patterns.values())) or "not said"
        raise UserError(
            f'Records.files of the data set "{dataset}" are {said}; give files of one kind: '
            ".jsonl, .json, .csv, .tsv (or .gz of these), .parquet or .tfrecord."
        )
    (kind,) = kinds
    if kind == "jsonl":
        lines = lambda file: tf.data.TextLineDataset(file, compression_of(file))
        return lambda file: lines(file).filter(lambda line: tf.strings.length(tf.strings.strip(line)) > 0)
    if kind == "tfrecord":
        return lambda file: tf.data.TFRecordDataset(file, compression_of(file)).map(_json_of_example)
    separator = {"csv": ",", "tsv": "\t"}.get(kind or "")
    rows = functools.partial(_of_table, separator=separator, integers=records.integers) if separator else _of_parquet
    return lambda file: read_on(rows)(file).unbatch()


def _kind(pattern: str) -> str | None:
    name = pattern.removesuffix(".gz")
    ends = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
    return next((kind for end, kind in ends.items() if name.endswith(end)), "tfrecord" if ".tfrecord" in name else None)


def _of_table(file: str, separator: str, integers: Sequence[str]) -> Iterator[list[bytes]]:
    """Rows of a table whose first line names its columns, quoted as the csv module quotes."""
    with OpenedFile(file) as opened:
        stream = pa.CompressedInputStream(opened, "gzip") if file.endswith(".gz") else pa.PythonFile(opened, mode="r")
        lines = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")
        table = csv.DictReader(lines, delimiter=separator)
        rows = ({**row, **{name: int(row[name]) for name in integers if _is_whole(row.get(name))}} for row in table)
        while together := [_json(row) for row in itertools.islice(rows, TOGETHER)]:
            yield together


def _is_whole(text: str | None) -> bool:
    return text is not None and text.removeprefix("-").isdecimal()


def _of_parquet(file: str) -> Iterator[list[bytes]]:
    with OpenedFile(file) as opened:
        table = pyarrow.parquet.ParquetFile(opened)
        for rows in table.iter_batches(TOGETHER):
            yield [_json(row) for row in rows.to_pylist()]


def _of_datasets(place: str, is_saved: bool) -> Iterator[list[bytes]]:
    """Rows of a split that Hugging Face's `datasets` has: FOLDER@SPLIT, or NAME:CONFIG@SPLIT of its hub or cache."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Records.saved and Records.hub need datasets ({error}). Run: pip install 't5x_lab[datasets]'"
        ) from error
    name, split = place.rsplit("@", 1)
    try:
        if is_saved:
            table = datasets.load_from_disk(name)[split]
        else:
            path, _, config = name.partition(":")
            table = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # of the hub, of the network, of files
        raise NotHere(f"The split {split} of {name} cannot be read by datasets: {type(error).__name__}: {error}") from error
    for first in range(0, len(table), TOGETHER):
        columns = table[first : first + TOGETHER]
        yield [_json(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


@tf.autograph.experimental.do_not_convert
def _json_of_example(serialized: tf.Tensor) -> tf.Tensor:
    def encoded(serialized: bytes) -> bytes:
        features = tf.train.Example.FromString(serialized).features.feature
        values = {name: list(getattr(f, f.WhichOneof("kind") or "bytes_list").value) for name, f in sorted(features.items())}
        return _json({name: value[0] if len(value) == 1 else value for name, value in values.items()})

    return tf.ensure_shape(tf.numpy_function(encoded, [serialized], tf.string, stateful=False), [])


def as_json(records: tf.data.Dataset) -> tf.data.Dataset:
    """{"record": JSON} of what a source gives: JSON already, or structures of tensors (TensorFlow Datasets)."""
    spec = records.element_spec
    if isinstance(spec, tf.TensorSpec):
        return records.map(lambda record: {"record": record})

    @tf.autograph.experimental.do_not_convert
    def encoded(example: Any) -> dict[str, tf.Tensor]:
        flat = tf.nest.flatten(example, expand_composites=True)
        again = lambda *values: _json(tf.nest.pack_sequence_as(spec, values, expand_composites=True))
        return {"record": tf.ensure_shape(tf.numpy_function(again, flat, tf.string, stateful=False), [])}

    return records.map(encoded)


def _json(record: Any) -> bytes:
    return json.dumps(_plain(record), ensure_ascii=False, default=str).encode()


def _plain(value: Any) -> Any:
    """The same in what JSON has: texts, numbers, lists, objects."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, tf.RaggedTensor):
        return _plain(value.to_list())
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def fields_of(line: bytes, records: Records) -> dict[str, Any]:
    """The fields of a record by the names that templates know, with labels as numbers.

    Raises:
      UserError: for what is no object, and a label that is none of `Records.labels`.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"the record is no JSON: {line[:80]!r}") from error
    if not isinstance(record, dict):
        raise UserError(f"the record is no object with fields: {line[:80]!r}")
    for name, there in records.names.items():
        if there in record:
            record[name] = record.pop(there)
    for name, labels in records.labels.items():
        value = record.get(name)
        if isinstance(value, str | bool):
            if str(value) not in labels:
                raise UserError(f'the {name} "{value}" is none of {", ".join(labels)}')
            record[name] = labels.index(str(value))
    return record
