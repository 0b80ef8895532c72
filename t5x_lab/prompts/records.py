"""Records of labelled data sets, each with its fields as JSON, wherever the user has them.

A record is an object of JSON, {"record": its text}, as the field's own names have it.
"""

import contextlib
import csv
import functools
import io
import itertools
import json
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.user_code import tried
from t5x_lab.data.sources import TOGETHER, OpenedFile, compression_of, counted, read_on, sizes_of
from t5x_lab.prompts.config import Records, named

SPLITS = ("train", "validation", "test")


def source_of(
    dataset: str, records: Records, splits: Sequence[str] = SPLITS, elsewhere: Mapping[str, str] = {}
) -> seqio.DataSource:
    """The source of a data set's records; `as_json` makes of its elements what templates read. Nothing is opened here.

    Args:
      dataset: its name, such as "super_glue/rte".
      records: where it lies.
      splits: those that it has.
      elsewhere: what it is called there, for names in braces: {"tfds": "super_glue/rte"}.
    """
    there = {split: records.splits.get(split, split) for split in splits}
    if records.files is None:
        place = named(records.tfds or records.saved or records.hub or "", dataset=dataset, **elsewhere)
        if records.tfds:
            return _Tfds(dataset, place, there)
        rows = read_on(functools.partial(_of_datasets, is_saved=bool(records.saved)))
        return _Rows(lambda name: rows(name).unbatch(), {split: [f"{place}@{name}"] for split, name in there.items()})
    return _Files(dataset, records, splits, elsewhere)


class _Tfds(seqio.TfdsDataSource):
    """Records that TensorFlow Datasets has prepared."""

    def __init__(self, dataset: str, name: str, splits: dict[str, str]):
        self._dataset, self._name = dataset, name
        any_version = name if ":" in name else f"{name}:*.*.*"  # SeqIO wants one, and TensorFlow Datasets has it prepared
        super().__init__(any_version, splits=splits)

    def num_input_examples(self, split: str) -> int | None:
        with self._here():
            return super().num_input_examples(split)

    def list_shards(self, split: str) -> Sequence[str]:
        with self._here():
            return super().list_shards(split)

    def get_dataset(self, split="train", *args, **options) -> tf.data.Dataset:
        self.list_shards(split)  # nothing is downloaded on the way
        return super().get_dataset(split, *args, **options)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of files, of versions, of names
            prepare = f"tfds build {re.sub(r':[0-9.*]+$', '', self._name)}"  # a version is the package's
            raise NotHere(
                f'The data set "{self._dataset}" is not here: TensorFlow Datasets has no prepared {self._name} '
                f"({_first_line(error)}). Set the environment variable TFDS_DATA_DIR to where it is, prepare it with: "
                f'{prepare}, or say where its records are: DATA_SETS = {{"{self._dataset}": @x/Records()}}.'
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


class _Rows(seqio.FileDataSource):
    """Records that are read like a file's, of what is none."""

    def list_shards(self, split: str) -> list[str]:
        return list(self._split_to_filepattern[split])


class _Files(seqio.FileDataSource):
    """Records in files of one kind, which are looked for when something is read of them."""

    def __init__(self, dataset: str, records: Records, splits: Sequence[str], elsewhere: Mapping[str, str]):
        patterns = {split: pattern for split in splits if (pattern := records.pattern(dataset, split, elsewhere))}
        self._dataset, self._is_rule = dataset, not isinstance(records.files, dict)
        self._num_examples = records.num_examples
        super().__init__(_reader(dataset, patterns, records), patterns)

    @property
    def splits(self) -> list[str]:
        """Those said; of one pattern for all, those that there are files of."""
        said = list(self._split_to_filepattern)
        found = [split for split in said if tf.io.gfile.glob(self._split_to_filepattern[split])] if self._is_rule else said
        return found or said

    is_counted_by_reading = True

    def list_shards(self, split: str) -> list[str]:
        files = sorted(tf.io.gfile.glob(self._split_to_filepattern[split]))
        if not files:
            raise NotHere(
                f'The data set "{self._dataset}" is not here: no file matches {self._split_to_filepattern[split]}. Put its '
                "records there, or say where they are with Records.files, .tfds, .saved or .hub."
            )
        return files

    def num_input_examples(self, split: str) -> int:
        """Said by `Records.num_examples`, or counted by reading, once for the same files."""
        if self._num_examples and split == "train":
            return self._num_examples
        files = self.list_shards(split)
        key = f"{zlib.crc32(json.dumps([files, sizes_of(files)]).encode()):08x}"
        if key not in counted:
            lines = self.get_dataset(split, shuffle=False).batch(TOGETHER)
            counted[key] = int(lines.reduce(np.int64(0), lambda count, batch: count + tf.size(batch, tf.int64)))
        return counted[key]


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
    rows = functools.partial(_of_table, separator=separator, records=records) if separator else _of_parquet
    return lambda file: read_on(rows)(file).unbatch()


def _kind(pattern: str) -> str | None:
    name = pattern.removesuffix(".gz")
    ends = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
    return next((kind for end, kind in ends.items() if name.endswith(end)), "tfrecord" if ".tfrecord" in name else None)


def _of_table(file: str, separator: str, records: Records) -> Iterator[list[bytes]]:
    """Rows of a table, quoted as the csv module quotes; without names of columns given, its first line has them."""
    with OpenedFile(file) as opened:
        stream = pa.CompressedInputStream(opened, "gzip") if file.endswith(".gz") else pa.PythonFile(opened, mode="r")
        lines = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")
        named = records.columns or None
        # Files without names of columns, such as those of GLUE, do not quote either.
        table = csv.DictReader(lines, named, delimiter=separator, quoting=csv.QUOTE_NONE if named else csv.QUOTE_MINIMAL)
        rows = ({**row, **{name: _number(row[name]) for name in records.numbers if row.get(name)}} for row in table)
        while together := [_json(row) for row in itertools.islice(rows, TOGETHER)]:
            yield together


def _number(text: str) -> int | float | str:
    """A whole number, another one, or a text that is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


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


class OnlySplits(seqio.DataSource):
    """Some of a source's splits: those of these that it has; where it has none of them, these, which are then not here.

    Its elements are {split: record}, so that steps know of which split they are.

    Args:
      source: the whole.
      splits: which ones.
      dataset: its name, for messages.
    """

    def __init__(self, source: seqio.DataSource, splits: Sequence[str], dataset: str):
        self._source, self._only, self._dataset = source, splits, dataset
        super().__init__(splits=splits)
        self.least_kept = getattr(source, "least_kept", 1.0)

    @property
    def splits(self) -> list[str]:
        return [split for split in self._only if split in self._source.splits] or list(self._only)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return self._source.supports_arbitrary_sharding

    def list_shards(self, split: str) -> Sequence[str]:
        if split not in self._source.splits:
            raise NotHere(
                f'The data set "{self._dataset}" has no split "{split}" where its records are said to lie; they have '
                f"{', '.join(self._source.splits)}. Give its files too, or leave the task out."
            )
        return self._source.list_shards(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **options) -> tf.data.Dataset:
        self.list_shards(split)
        return self._source.get_dataset(split, shuffle, seed, shard_info, **options).map(lambda record: {split: record})

    def num_input_examples(self, split: str) -> int | None:
        return self._source.num_input_examples(split)


class FirstRecords(seqio.DataSource):
    """The first N of a source's training records, and all of its other splits."""

    def __init__(self, source: seqio.DataSource, first: int):
        super().__init__(splits=source.splits)
        self._source, self._first = source, first
        self.least_kept = getattr(source, "least_kept", 1.0)

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return self._source.list_shards(split) and [f"the first {self._first}" if split == "train" else split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        if split != "train":
            return self._source.get_dataset(split, shuffle, seed, shard_info)
        found = self._source.get_dataset(split, shuffle=False).take(self._first)
        return found.shard(shard_info.num_shards, shard_info.index) if shard_info else found

    def num_input_examples(self, split: str) -> int | None:
        number = self._source.num_input_examples(split)
        return min(number, self._first) if number is not None and split == "train" else number


def first_records(source: seqio.DataSource, records: Records, split: str, count: int) -> list[bytes]:
    """The first records of a split as JSON; read once of each source."""
    of_source = _first.setdefault(source, {})
    if (split, count) not in of_source:
        lines = as_json(source.get_dataset(split, shuffle=False), records).take(count)
        of_source[split, count] = [example["record"] for example in lines.as_numpy_iterator()]
    return of_source[split, count]


_first: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def as_json(dataset: tf.data.Dataset, records: Records | None = None) -> tf.data.Dataset:
    """{"record": JSON} of what a source gives: JSON already, or structures of tensors (TensorFlow Datasets)."""
    lines = _lines_of_json(dataset)
    if records is None or records.each is None:
        return lines
    several = functools.partial(_each, make=records.each)

    @tf.autograph.experimental.do_not_convert
    def made(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = tf.numpy_function(several, [example["record"]], tf.string, stateful=False)
        return {"record": tf.ensure_shape(found, [None])}

    return lines.batch(TOGETHER).map(made).unbatch()


def _each(lines: np.ndarray, make: Callable[[dict], Sequence[dict]]) -> np.ndarray:
    found = []
    for line in lines:
        made = tried("Records.each fails", lambda line=line: [*(make(json.loads(line)) or [])])
        found += [_json(record) for record in made]
    return np.array(found, object)


def _lines_of_json(records: tf.data.Dataset) -> tf.data.Dataset:
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
    given = {name: _given(record, there) for name, there in records.names.items()}
    record = {name: value for name, value in record.items() if name not in records.names.values()}
    record |= {name: value for name, value in given.items() if value is not None}
    for name, labels in records.labels.items():
        value = record.get(name)
        if isinstance(value, str | bool):
            if str(value) not in labels:
                raise UserError(f'the {name} "{value}" is none of {", ".join(labels)}')
            record[name] = labels.index(str(value))
    return record


def _given(record: Mapping[str, Any], there: str) -> Any:
    """What a record has under this name, in which dots may lead into objects."""
    value: Any = record
    for key in [there] if there in record else there.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
