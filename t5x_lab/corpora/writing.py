"""Formats of output files, each a writer of pages. The same pages make the same bytes."""

import gzip
import json
import struct
from collections.abc import Callable
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.page import Page

TFDS_VERSION = "3.1.0"
_ENDINGS = {"jsonl": "jsonl.gz", "parquet": "parquet", "tfrecord": "tfrecord"}
_ROW_GROUP = 1 << 24  # characters


def shard_name(corpus: Corpus, split: str, index: int, number: int) -> str:
    """Returns the name of an output file: that of TensorFlow Datasets, or `<split>-00000-of-00004.<ending>`."""
    if corpus.format == "tfds":
        return f"c4-{split}.tfrecord-{index:05d}-of-{number:05d}"
    return f"{split}-{index:05d}-of-{number:05d}.{_ENDINGS[corpus.format]}"


def corpus_dir(output: str, corpus: Corpus) -> str:
    """Returns the folder of the corpus: that of the data set `c4/<name>:3.1.0` under TFDS_DATA_DIR = output, or `output`."""
    return f"{output}/c4/{corpus.name}/{TFDS_VERSION}" if corpus.format == "tfds" else output


def check_output(corpus: Corpus, output: str) -> None:
    """Checks that TensorFlow Datasets can write to the storage of the output.

    Raises:
      UserError: if it cannot.
    """
    if corpus.format != "tfds" or "://" not in output:
        return
    from etils import epath

    try:
        epath.Path(output).exists()
    except Exception as error:  # each storage raises its own
        raise UserError(
            f"TensorFlow Datasets cannot write to {output} ({type(error).__name__}: {error}). Choose another --output_dir, or "
            "--gin.Corpus.format=jsonl."
        ) from error


class RecordWriter(Protocol):
    """Writer of an output file."""

    def add(self, page: Page) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """JSON objects with text, url, timestamp and language, a line each, compressed with gzip."""

    def __init__(self, file: BinaryIO):
        self._file = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)

    def add(self, page: Page) -> None:
        record = {"text": page.text, "url": page.url, "timestamp": page.timestamp}
        record |= {"language": page.language} if page.language else {}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class ParquetWriter:
    """Columns text, url, timestamp and language."""

    _SCHEMA = pa.schema([pa.field(name, pa.large_string()) for name in ("text", "url", "timestamp", "language")])

    def __init__(self, file: BinaryIO):
        self._writer = pq.ParquetWriter(file, self._SCHEMA, compression="zstd")
        self._rows: list[dict[str, str]] = []
        self._characters = 0

    def add(self, page: Page) -> None:
        self._characters += len(page.text)
        self._rows.append({"text": page.text, "url": page.url, "timestamp": page.timestamp, "language": page.language})
        if self._characters > _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, self._SCHEMA))
        self._rows.clear()
        self._characters = 0

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


class TfRecordWriter:
    """TFRecords of `tf.train.Example` with the features of TFDS's `c4`: url, text, timestamp, content-type, content-length."""

    def __init__(self, file: BinaryIO):
        try:
            from google_crc32c import value
        except ImportError as error:
            raise UserError(f"TFRecords need google-crc32c ({error}). Run: pip install 't5x_lab[corpus]'") from error
        self._file, self._crc32c = file, value

    def add(self, page: Page) -> None:
        record = encode_example(
            {
                "content-length": page.content_length,
                "content-type": page.content_type,
                "text": page.text,
                "timestamp": page.timestamp,
                "url": page.url,
            }
        )
        length = struct.pack("<Q", len(record))
        self._file.write(length + self._checksum(length) + record + self._checksum(record))

    def _checksum(self, data: bytes) -> bytes:
        """Returns the masked checksum of TFRecords."""
        value = self._crc32c(data)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def close(self) -> None:
        pass


def encode_example(features: dict[str, str]) -> bytes:
    """Returns the bytes of a `tf.train.Example` of texts, in the order of the dictionary, without TensorFlow."""
    entries = [
        _field(1, _field(1, name.encode()) + _field(2, _field(1, _field(1, value.encode()))))
        for name, value in features.items()
    ]
    return _field(1, b"".join(entries))


def _field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer with a length."""
    size, digits = len(content), bytearray([number << 3 | 2])
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    digits.append(size)
    return bytes(digits) + content


RECORD_WRITERS: dict[str, Callable[[BinaryIO], RecordWriter]] = {
    "tfds": TfRecordWriter,
    "tfrecord": TfRecordWriter,
    "jsonl": JsonLinesWriter,
    "parquet": ParquetWriter,
}


def write_tfds_info(output: str, corpus: Corpus, splits: dict[str, tuple[list[int], int]]) -> None:
    """Writes what makes a folder of TFRecords a data set of TensorFlow Datasets.

    Args:
      output: TFDS_DATA_DIR.
      corpus: the recipe.
      splits: (pages of each file, bytes of all files) by split.
    """
    import tensorflow_datasets as tfds

    builder = tfds.builder(f"c4/{corpus.name}:{TFDS_VERSION}", data_dir=output, try_gcs=False)
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=lengths,
            num_bytes=size,
            filename_template=tfds.core.ShardedFileTemplate(
                data_dir=builder.data_path, dataset_name="c4", split=split, filetype_suffix="tfrecord"
            ),
        )
        for split, (lengths, size) in splits.items()
    ]
    builder.info.set_splits(tfds.core.splits.SplitDict(infos))
    builder.info.write_to_directory(builder.data_path)
