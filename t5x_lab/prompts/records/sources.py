"""Record sources of labelled data sets: files, TensorFlow Datasets, Hugging Face's `datasets`."""

import contextlib
import functools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.data.sources.file_types import RECORD_KINDS, check_regular_files, common_file_type
from t5x_lab.data.sources.resumable import READ_BATCH, numbered_chunks, resumable_reader
from t5x_lab.data.sources.sharding import file_sizes
from t5x_lab.data.sources.storage import list_matches, read_copies
from t5x_lab.data.sources.tables import example_values, read_rows, serialized_examples
from t5x_lab.data.sources.text_files import document_counts, line_reader
from t5x_lab.prompts.config import Records, fill_pattern
from t5x_lab.prompts.records.json_records import encode_json

SPLITS = ("train", "validation", "test")


def open_records(
    dataset: str, records: Records, splits: Sequence[str] = SPLITS, external_names: Mapping[str, str] = {}
) -> seqio.DataSource:
    """Returns the source of a data set's records, whose elements `json_records` converts. No file is opened yet.

    Args:
      dataset: name of the data set, such as "super_glue/rte".
      records: location.
      splits: splits that it has.
      external_names: values of names in braces: {"tfds": "super_glue/rte"}.
    """
    source_splits = {split: records.splits.get(split, split) for split in splits}
    if records.files is None:
        location = fill_pattern(records.tfds or records.saved or records.hub or "", dataset=dataset, **external_names)
        if records.tfds:
            return _TfdsRecords(dataset, location, source_splits)
        read = resumable_reader(numbered_chunks(functools.partial(_read_hf_dataset, is_saved=bool(records.saved))))
        tables = {split: [f"{location}@{name}"] for split, name in source_splits.items()}
        return _TableRecords(lambda name: read(name).unbatch(), tables)
    return _FileRecords(dataset, records, splits, external_names)


class _TfdsRecords(seqio.TfdsDataSource):
    """Records that TensorFlow Datasets has prepared."""

    def __init__(self, dataset: str, name: str, splits: dict[str, str]):
        self._dataset, self._name = dataset, name
        any_version = name if ":" in name else f"{name}:*.*.*"  # SeqIO requires a version
        super().__init__(any_version, splits=splits)

    def num_input_examples(self, split: str) -> int | None:
        with self._explain_missing():
            return super().num_input_examples(split)

    def list_shards(self, split: str) -> Sequence[str]:
        with self._explain_missing():
            return super().list_shards(split)

    def get_dataset(self, split="train", *args, **options) -> tf.data.Dataset:
        self.list_shards(split)  # raises before anything is downloaded
        return super().get_dataset(split, *args, **options)

    @contextlib.contextmanager
    def _explain_missing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # files, versions and names fail in different ways
            prepare = f"tfds build {re.sub(r':[0-9.*]+$', '', self._name)}"  # a version is the package's
            raise NotHere(
                f'The data set "{self._dataset}" is not available: TensorFlow Datasets has no prepared {self._name} '
                f"({_first_line(error)}). Set the environment variable TFDS_DATA_DIR to its folder, prepare it with: "
                f'{prepare}, or set the location of its records: DATA_SETS = {{"{self._dataset}": @x/Records()}}.'
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


class _TableRecords(seqio.FileDataSource):
    """Records of tables that are not files, read like files."""

    def list_shards(self, split: str) -> list[str]:
        return list(self._split_to_filepattern[split])


class _FileRecords(seqio.FileDataSource):
    """Records in files of one type. Patterns are expanded when a split is read."""

    def __init__(self, dataset: str, records: Records, splits: Sequence[str], external_names: Mapping[str, str]):
        patterns = {split: pattern for split in splits if (pattern := records.file_pattern(dataset, split, external_names))}
        self._dataset, self._has_one_pattern = dataset, not isinstance(records.files, dict)
        self._num_examples = records.num_examples
        super().__init__(_reader(dataset, patterns, records), patterns)

    @property
    def splits(self) -> list[str]:
        """The configured splits. With one pattern for all, those that have files."""
        splits = list(self._split_to_filepattern)
        if not self._has_one_pattern:
            return splits
        return [split for split in splits if list_matches(self._split_to_filepattern[split])] or splits

    must_read_to_count = reads_any_storage = True

    def list_shards(self, split: str) -> list[str]:
        files = list_matches(self._split_to_filepattern[split])
        if not files:
            raise NotHere(
                f'The data set "{self._dataset}" is not available: no file matches {self._split_to_filepattern[split]}. Put '
                "its records there, or set their location with Records.files, .tfds, .saved or .hub."
            )
        check_regular_files(files)
        return files

    def num_input_examples(self, split: str) -> int:
        """Returns `Records.num_examples` if set, else counts by reading, once for the same files."""
        if self._num_examples and split == "train":
            return self._num_examples
        files = self.list_shards(split)
        key = f"{zlib.crc32(json.dumps([files, file_sizes(files)]).encode()):08x}"
        if key not in document_counts:
            lines = self.get_dataset(split, shuffle=False).batch(READ_BATCH)
            document_counts[key] = int(lines.reduce(np.int64(0), lambda count, batch: count + tf.size(batch, tf.int64)))
        return document_counts[key]


def _reader(dataset: str, patterns: Mapping[str, str], records: Records) -> Callable[[Any], tf.data.Dataset]:
    """Returns f(file) -> dataset of records as JSON text."""
    if not patterns:
        raise UserError(f'Records.files of the data set "{dataset}" is not set for any split. Use a pattern for each split.')
    file_type = common_file_type(patterns.values(), RECORD_KINDS, f'Records.files of the data set "{dataset}"')
    if file_type.kind == "jsonl":
        read = line_reader(file_type.compression, 1)
    elif file_type.kind == "tfrecord":
        encode = functools.partial(_tfrecord_to_json, lists=records.lists)
        return read_copies(lambda file: serialized_examples(file, file_type).map(encode), [*patterns.values()])
    else:
        rows = lambda file: map(encode_json, read_rows(file, file_type, records.columns, records.numbers))
        read = resumable_reader(numbered_chunks(rows))
    return lambda file: read(file).unbatch()


def _read_hf_dataset(location: str, is_saved: bool) -> Iterator[bytes]:
    """Yields rows with Hugging Face's `datasets`, from FOLDER@SPLIT, or NAME:CONFIG@SPLIT of its hub or cache."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"Records.saved and Records.hub need datasets ({error}). Run: pip install 't5x_lab[datasets]'"
        ) from error
    name, split = location.rsplit("@", 1)
    try:
        if is_saved:
            table = datasets.load_from_disk(name)[split]
        else:
            path, _, config = name.partition(":")
            table = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # hub, network and files fail in different ways
        raise NotHere(f"The split {split} of {name} cannot be read by datasets: {type(error).__name__}: {error}") from error
    for first in range(0, len(table), READ_BATCH):
        columns = table[first : first + READ_BATCH]
        yield from (encode_json(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))


@tf.autograph.experimental.do_not_convert
def _tfrecord_to_json(serialized: tf.Tensor, lists: Sequence[str]) -> tf.Tensor:
    encode = lambda serialized: encode_json(example_values(serialized, lists))
    return tf.ensure_shape(tf.numpy_function(encode, [serialized], tf.string, stateful=False), [])
