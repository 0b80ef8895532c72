"""Rows of .csv, .tsv, .parquet and TFRecord files as dictionaries."""

import contextlib
import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.parquet
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.sources.file_types import MAX_LINE_BYTES, FileType, open_file, read_lines
from t5x_lab.data.sources.resumable import READ_BATCH
from t5x_lab.data.sources.storage import copied

csv.field_size_limit(MAX_LINE_BYTES)  # Python's own limit, 131,072 characters, is less than a document


def read_rows(
    file: str, file_type: FileType, columns: Sequence[str] = (), numbers: Sequence[str] = (), lists: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file.

    Args:
      file: file name.
      file_type: its type. The kind is "csv", "tsv", "parquet" or "tfrecord".
      columns: column names of a .csv or .tsv file without a header line.
      numbers: columns of .csv and .tsv files that are numbers. Others are texts.
      lists: features of TFRecord examples that are lists. Others have one value.

    Raises:
      UserError: for a malformed row, with its line.
    """
    if file_type.kind == "parquet":
        yield from _read_parquet(file)
    elif file_type.kind == "tfrecord":
        for serialized in serialized_examples(copied(file), file_type).as_numpy_iterator():
            yield example_values(serialized, lists)
    else:
        yield from _read_separated(file, file_type, columns, numbers)


def _read_separated(file: str, file_type: FileType, columns: Sequence[str], numbers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a .csv file, whose fields may be quoted, or of a .tsv file, whose quotes are text as in GLUE's."""
    kind = file_type.kind
    rows = (_csv_rows if kind == "csv" else _tsv_rows)(file, file_type.compression)
    names = list(columns) or next(rows, ([], 0))[0]
    _check_header(file, names)
    for row, line in rows:
        if len(row) != len(names):
            raise UserError(
                f"{file}, line {line} has {len(row)} fields instead of {len(names)} ({', '.join(names)}): {_excerpt(row)}. "
                f"{_QUOTES[kind]}"
            )
        record: dict[str, Any] = dict(zip(names, row, strict=True))
        yield record | {name: _parse_number(record[name]) for name in numbers if name in record}


def _tsv_rows(file: str, compression: str) -> Iterator[tuple[list[str], int]]:
    """Yields (fields, line number) of each row. Empty lines are left out."""
    for number, (line, _) in enumerate(read_lines(file, compression), start=1):
        if line:
            yield line.decode(errors="replace").split("\t"), number


def _csv_rows(file: str, compression: str) -> Iterator[tuple[list[str], int]]:
    with open_file(file, compression) as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace", newline=""), strict=True)
        try:
            yield from ((row, rows.line_num) for row in rows if row)
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num} is no row of a .csv file: {error}. {_QUOTES['csv']}") from error


_QUOTES = {
    "csv": 'Quote fields that contain commas, quotes or line ends: "a, b". Double quotes inside of them: "he said ""no""".',
    "tsv": "Fields of a .tsv file are not quoted and contain no tabs or line ends. Correct the line, or use .csv or .jsonl.",
}


def _check_header(file: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise UserError(f"{file} has two columns of the same name ({', '.join(names)}). Rename one.")
    separator = next((s for s in (";", "\t", ",") if len(names) == 1 and s in names[0]), None)
    if separator:
        raise UserError(
            f"The header line of {file} is {names[0]!r}. Separate columns by commas in .csv files and by tabs in .tsv files."
        )


def _excerpt(row: Sequence[str]) -> str:
    text = repr(row)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _parse_number(text: str) -> int | float | str:
    """Returns the number in a text, or the text if it is not a finite number. "1.0" is 1."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        return int(number) if number.is_integer() else number if math.isfinite(number) else text
    return text


def _read_parquet(file: str) -> Iterator[dict[str, Any]]:
    with open_parquet(file) as table:
        for rows in table.iter_batches(READ_BATCH):
            yield from rows.to_pylist()


@contextlib.contextmanager
def open_parquet(file: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opens a Parquet file of any storage.

    Raises:
      UserError: if it is none.
    """
    with open_file(file) as raw:
        try:
            table = pyarrow.parquet.ParquetFile(raw)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file} is no valid Parquet file: {error} Copy it again.") from error
        yield table


def serialized_examples(file: Any, file_type: FileType) -> tf.data.Dataset:
    """Returns the serialized examples of a TFRecord file. The name may be a tensor."""
    return tf.data.TFRecordDataset(file, "GZIP" if file_type.compression else "")


def example_values(serialized: bytes, lists: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the features of a serialized `tf.train.Example`. A feature without values is None.

    Args:
      serialized: the serialized example.
      lists: features that are lists. Others have one value; the file does not tell a list of one from a value.

    Raises:
      UserError: for several values of a feature that is not a list.
    """
    features = tf.train.Example.FromString(serialized).features.feature
    decode = lambda value: value.decode(errors="replace") if isinstance(value, bytes) else value
    kind = lambda feature: getattr(feature, feature.WhichOneof("kind") or "bytes_list")
    values = {name: [decode(value) for value in kind(feature).value] for name, feature in sorted(features.items())}
    several = [name for name, value in values.items() if len(value) > 1 and name not in lists]
    if several:
        names = ", ".join(f'"{name}"' for name in several)
        raise UserError(
            f"the feature {names} of a TFRecord example has {len(values[several[0]])} values. Set which features are lists, so "
            f"that lists of one value are lists too: Records.lists = ({names},)"
        )
    return {name: value if name in lists else value[0] if value else None for name, value in values.items()}
