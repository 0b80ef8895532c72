"""Types of users' files by their names, and reading of their content: decompressed, by lines.

All readers of texts, records, inputs and tasks' data open files with this module, so they accept the same files.
"""

import codecs
import contextlib
import dataclasses
import io
import os
from collections.abc import Collection, Iterable, Iterator

import pyarrow as pa

from t5x_lab.config.errors import UserError
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.data.sources.storage import file_size, open_stored

MAX_LINE_BYTES = 1 << 26
_SUFFIXES = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_UNSUPPORTED = {("parquet", "gzip"), ("parquet", "zstd"), ("tfrecord", "zstd")}
RECORD_KINDS = ("jsonl", "csv", "tsv", "parquet", "tfrecord")
_BUFFER_BYTES = 1 << 18


@dataclasses.dataclass(frozen=True)
class FileType:
    """Type of a file.

    Attributes:
      kind: "txt", "jsonl" (also of .json), "csv", "tsv", "parquet" or "tfrecord".
      compression: "gzip", "zstd" or "".
    """

    kind: str
    compression: str = ""


def file_type(name: str, kinds: Collection[str] = ("txt", *RECORD_KINDS)) -> FileType:
    """Returns the type of a file or of a file pattern, by its name.

    Args:
      name: file name or pattern.
      kinds: kinds that the caller reads.

    Raises:
      UserError: for a type that cannot be read.
    """
    base = name.lower()
    suffix, compression = next(((s, c) for s, c in _COMPRESSIONS.items() if base.endswith(s)), ("", ""))
    base = base.removesuffix(suffix)
    kind = next((kind for end, kind in _SUFFIXES.items() if base.endswith(end)), "")
    if not kind and ".tfrecord" in os.path.basename(base):  # T5's files are called name.tfrecord-00000-of-01024
        kind = "tfrecord"
    if kind not in kinds or (kind, compression) in _UNSUPPORTED:
        endings = [f".{kind}" if kind != "jsonl" else ".jsonl or .json" for kind in kinds]
        raise UserError(
            f"{name} has an unsupported file type. Use {', '.join(endings)} files. All but .parquet may end in .gz, and all "
            "but .parquet and .tfrecord in .zst."
        )
    return FileType(kind, compression)


def common_file_type(names: Iterable[str], kinds: Collection[str], setting: str) -> FileType:
    """Returns the type of all these files. They are read by one reader.

    Raises:
      UserError: if they have several types, or an unsupported one.
    """
    types = {file_type(name, kinds): name for name in names}
    if len(types) != 1:
        examples = ", ".join(sorted(types.values())) or "none"
        raise UserError(f"{setting} has files of several types ({examples}). Use files of one type.")
    return next(iter(types))


def check_regular_files(names: Iterable[str]) -> None:
    """Raises a `UserError` for a named pipe or device, which cannot be read twice."""
    for name in names:
        if "://" not in name and os.path.exists(name) and not is_regular_file(name):
            raise UserError(f"{name} is not a file. It is read more than once, so it cannot be a pipe. Write it to a file.")


@contextlib.contextmanager
def open_file(name: str, compression: str = "", start: int = 0) -> Iterator[io.BufferedReader]:
    """Opens a file of any storage for reading bytes, decompressed.

    Args:
      name: file name.
      compression: "gzip", "zstd" or "".
      start: first byte of the decompressed content to read.

    Raises:
      UserError: if it is a pipe, or not a compressed file.
    """
    check_regular_files([name])
    with open_stored(name) as raw:
        if compression and file_size(name) == 0:
            raise UserError(f"{name} has 0 bytes and is no {compression} file. Copy it again, or remove it.")
        if compression:
            file = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression), _BUFFER_BYTES)
            while start > 0:
                start -= len(file.read(min(start, _BUFFER_BYTES))) or start
        else:
            raw.seek(start)
            file = io.BufferedReader(pa.PythonFile(raw, mode="r"), _BUFFER_BYTES)  # type: ignore[arg-type]
        try:
            yield file
        except OSError as error:
            if compression and error.errno is None:  # of pyarrow's decompression, not of the storage
                raise UserError(f"{name} is no valid {compression} file: {error}. Copy it again.") from error
            raise


def read_lines(name: str, compression: str = "", start: int = 0) -> Iterator[tuple[bytes, int]]:
    r"""Yields (line without its end, position after it) of a text file.

    Lines end with "\n" or "\r\n"; other characters, such as "\r" or U+2028, are part of a line. A byte order mark is removed.

    Args:
      name: file name.
      compression: "gzip", "zstd" or "".
      start: position of the first line to read: bytes of the decompressed content before it.

    Raises:
      UserError: for a line of more than `MAX_LINE_BYTES`, and see `open_file`.
    """
    with open_file(name, compression, start) as file:
        position = start
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"{name} has a line of more than {MAX_LINE_BYTES:,} bytes at byte {position}. Split or remove it."
                )
            position += len(line)
            if position == len(line):
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.endswith(b"\n"):
                line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
            yield line, position
