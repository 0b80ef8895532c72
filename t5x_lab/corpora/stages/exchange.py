"""Files through which stages exchange rows: each holds rows for several buckets, and a bucket is read from all files.

Beam's own shuffle would do the same. This one survives a kill, needs no more memory than a bucket, and has the same order
whatever the number of workers: that of the files.
"""

import collections
import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page

FLUSH_BYTES = 1 << 27
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
_NUMBER = np.dtype("<u8")
_PART = np.dtype([("start", _NUMBER), ("size", _NUMBER)])
_FOOTER = struct.Struct("<QQ")
_ROW_BYTES = 64  # estimate of what a row needs besides its text

PAGES = pa.schema(
    [
        pa.field("key", pa.binary(16)),
        *[
            pa.field(name, pa.large_string())
            for name in ("url", "text", "timestamp", "content_type", "content_length", "language")
        ],
        pa.field("file", pa.int32()),
        pa.field("record", pa.int64()),
    ]
)


def page_row(page: Page) -> tuple:
    """Returns a page as a row of `PAGES`."""
    return (
        page.key, page.url, page.text, page.timestamp, page.content_type, page.content_length, page.language, *page.position
    )  # fmt: skip


def row_pages(batch: pa.RecordBatch) -> Iterator[tuple[bytes, Page]]:
    """Yields (key, page) of rows of `PAGES`."""
    columns = [batch.column(name).to_pylist() for name in PAGES.names]
    for key, url, text, timestamp, content_type, content_length, language, file, record in zip(*columns, strict=True):
        yield key, Page(url, text, timestamp, content_type, content_length, language, (file, record))


class BucketWriter:
    """Writes rows by bucket, a part of each bucket that has some whenever enough rows are held.

    A file is a sequence of Arrow streams, one for each part. At its end are the positions and sizes of the parts by bucket,
    where those of each bucket begin, and where these numbers begin, so that a bucket is found without reading about others.

    Args:
      file: output.
      schema: columns of a row.
      num_buckets: number of buckets.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, num_buckets: int = 1):
        self._file, self._schema, self._num_buckets = file, schema, num_buckets
        self._rows: dict[int, list[tuple]] = collections.defaultdict(list)
        self._parts: dict[int, list[tuple[int, int]]] = {}
        self._bytes = self._position = 0

    def add(self, bucket: int, row: tuple, size: int = 0) -> None:
        """Adds a row. `size` is the number of bytes of its texts."""
        self._rows[bucket].append(row)
        self._bytes += size + _ROW_BYTES
        if self._bytes > FLUSH_BYTES:
            self._flush()

    def add_columns(self, bucket: int, columns: Sequence[Any]) -> None:
        """Adds columns of rows."""
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        batch = pa.record_batch(arrays, schema=self._schema)
        if not batch.num_rows:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema, options=_OPTIONS) as stream:
            stream.write_batch(batch)
        content = sink.getvalue()
        self._file.write(content)
        self._parts.setdefault(bucket, []).append((self._position, content.size))
        self._position += content.size

    def _flush(self) -> None:
        for bucket, rows in sorted(self._rows.items()):
            self.add_columns(bucket, list(zip(*rows, strict=True)))
        self._rows.clear()
        self._bytes = 0

    def close(self) -> None:
        """Writes what is held, and where each bucket is."""
        self._flush()
        of_buckets = [self._parts.get(bucket, []) for bucket in range(self._num_buckets)]
        parts = np.array([part for own in of_buckets for part in own], _PART).reshape(-1)
        ends = np.cumsum([0, *map(len, of_buckets)]).astype("<u8")
        self._file.write(parts.tobytes() + ends.tobytes() + _FOOTER.pack(self._position, self._position + parts.nbytes))


def read_bucket(file: BinaryIO, bucket: int = 0) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a bucket, in the order in which they were added."""
    with _damage_in(file):
        parts_start, ends_start = _read_footer(file)
        file.seek(ends_start + bucket * _NUMBER.itemsize)
        first, last = np.frombuffer(file.read(2 * _NUMBER.itemsize), _NUMBER).tolist()
        file.seek(parts_start + first * _PART.itemsize)
        parts = np.frombuffer(file.read((last - first) * _PART.itemsize), _PART).tolist()
    yield from _read_parts(file, parts)


def read_buckets(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Yields the rows of all buckets, one bucket after the other."""
    with _damage_in(file):
        parts_start, ends_start = _read_footer(file)
        file.seek(parts_start)
        parts = np.frombuffer(file.read(ends_start - parts_start), _PART).tolist()
    yield from _read_parts(file, parts)


def _read_footer(file: BinaryIO) -> tuple[int, int]:
    file.seek(-_FOOTER.size, 2)
    return _FOOTER.unpack(file.read(_FOOTER.size))


def _read_parts(file: BinaryIO, parts: Sequence[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    for start, size in parts:
        file.seek(start)
        yield from pa.ipc.open_stream(file.read(size))


@contextlib.contextmanager
def _damage_in(file: BinaryIO) -> Iterator[None]:
    """Explains errors of a file without the numbers at its end."""
    try:
        yield
    except (OSError, ValueError, struct.error) as error:
        name = getattr(file, "name", "A file of the work folder")
        raise UserError(f"{name} is damaged ({error}). Remove the work folder, and run the command again.") from error
