"""Files through which stages exchange rows: each holds rows for several buckets, and a bucket is read from all files.

Beam's own shuffle would do the same. This one survives a kill, needs no more memory than a bucket, and has the same order
whatever the number of workers: that of the files.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page

FLUSH_BYTES = 1 << 25
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
_LENGTH = struct.Struct("<Q")
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

    A file is a sequence of Arrow streams, one for each part, and an index of them by bucket at its end.

    Args:
      file: output.
      schema: columns of a row.
      num_buckets: number of buckets.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, num_buckets: int = 1):
        self._file, self._schema = file, schema
        self._rows: list[list[tuple]] = [[] for _ in range(num_buckets)]
        self._index: dict[int, list[tuple[int, int]]] = {}
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
        self._index.setdefault(bucket, []).append((self._position, content.size))
        self._position += content.size

    def _flush(self) -> None:
        for bucket, rows in enumerate(self._rows):
            if rows:
                self.add_columns(bucket, list(zip(*rows, strict=True)))
                rows.clear()
        self._bytes = 0

    def close(self) -> None:
        """Writes what is held, and the index."""
        self._flush()
        index = json.dumps(self._index).encode()
        self._file.write(index + _LENGTH.pack(len(index)))


def read_bucket(file: BinaryIO, bucket: int = 0) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a bucket, in the order in which they were added."""
    try:
        end = file.seek(-_LENGTH.size, 2)
        size = _LENGTH.unpack(file.read(_LENGTH.size))[0]
        file.seek(end - size)
        index = json.loads(file.read(size))
    except (OSError, ValueError, struct.error) as error:
        name = getattr(file, "name", "A file of the work folder")
        raise UserError(f"{name} is damaged ({error}). Remove the work folder, and run the command again.") from error
    for start, length in index.get(str(bucket), ()):
        file.seek(start)
        yield from pa.ipc.open_stream(file.read(length))
