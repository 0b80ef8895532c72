"""Files through which stages exchange rows: each holds rows for several buckets, and a bucket is read from all files.

Beam's own shuffle would do the same. This one survives a kill, needs no more memory than a bucket, and has the same order
whatever the number of workers: that of the files.
"""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from t5x_lab.corpora.page import Page

FLUSH_BYTES = 1 << 25
_BUCKETS = b"buckets"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
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
    """Writes rows by bucket, a part of each bucket whenever enough rows are held.

    Args:
      file: output.
      schema: columns of a row.
      num_buckets: number of buckets.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, num_buckets: int = 1):
        self._schema = schema.with_metadata({_BUCKETS: str(num_buckets)})
        self._file = pa.ipc.new_file(file, self._schema, options=_OPTIONS)
        self._rows: list[list[tuple]] = [[] for _ in range(num_buckets)]
        self._bytes = 0

    def add(self, bucket: int, row: tuple, size: int = 0) -> None:
        """Adds a row. `size` is the number of bytes of its texts."""
        self._rows[bucket].append(row)
        self._bytes += size + _ROW_BYTES
        if self._bytes > FLUSH_BYTES:
            self._flush()

    def add_columns(self, columns: Sequence[Sequence[Any]]) -> None:
        """Adds a part of each bucket: columns by bucket."""
        for arrays in columns:
            typed = [pa.array(column, field.type) for column, field in zip(arrays, self._schema, strict=True)]
            self._file.write_batch(pa.record_batch(typed, schema=self._schema))

    def _flush(self) -> None:
        self.add_columns([list(zip(*rows, strict=True)) or [()] * len(self._schema) for rows in self._rows])
        for rows in self._rows:
            rows.clear()
        self._bytes = 0

    def close(self) -> None:
        if any(self._rows):
            self._flush()
        self._file.close()


def read_bucket(file: BinaryIO, bucket: int = 0) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a bucket, in the order in which they were added."""
    reader = pa.ipc.open_file(file)
    for number in range(bucket, reader.num_record_batches, int(reader.schema.metadata[_BUCKETS])):
        batch = reader.get_batch(number)
        if batch.num_rows:
            yield batch
