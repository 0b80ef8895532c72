"""Files on any storage that Beam reads: local paths, gs://, s3://, hdfs://."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.reading.decompression import Damage, decompress, find_compression


def _file_systems():
    try:
        from apache_beam.io.filesystems import FileSystems
    except ImportError as error:
        raise UserError(f"t5x_lab corpus needs Apache Beam ({error}). Run: pip install 't5x_lab[corpus]'") from error
    return FileSystems


def match_files(pattern: str) -> list[tuple[str, int]]:
    """Returns (path, size in bytes) of the files that match a pattern, or that a folder holds at any depth, sorted by path."""
    if "://" not in pattern and os.path.exists(pattern):
        paths = _walk(pattern) if os.path.isdir(pattern) else [pattern]
        return sorted((path, os.path.getsize(path)) for path in paths if os.path.isfile(path))
    try:
        matches = _file_systems().match([pattern])[0].metadata_list
        if "://" in pattern and not matches:  # a folder
            matches = _file_systems().match([f"{pattern.rstrip('/')}/**"])[0].metadata_list
    except ValueError as error:
        raise UserError(
            f'"{pattern}" is on a storage that Beam does not read here: {str(error).partition(". Path")[0]}.'
        ) from error
    return sorted((str(match.path), int(match.size_in_bytes)) for match in matches if not os.path.isdir(match.path))


def _walk(top: str) -> list[str]:
    """Returns the files in a folder at any depth, behind links too, each folder once."""
    paths, visited = [], set()
    for folder, folders, names in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        paths += [os.path.join(folder, name) for name in names if name[:1] not in "._"]
    return paths


@contextlib.contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes as they are stored."""
    if "://" not in path:
        with open(path, "rb") as file:
            yield file
        return
    from apache_beam.io.filesystem import CompressionTypes

    with _file_systems().open(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
        yield file


def read_text_lines(pattern: str) -> Iterator[str]:
    """Yields the stripped lines of the text files that match a pattern.

    Raises:
      UserError: if there are none.
    """
    files = match_files(pattern)
    if not files:
        raise UserError(f'No file matches "{pattern}". Correct the path in the gin configuration.')
    for path, _ in files:
        with open_input(path) as file:
            start = file.read(4)
            file.seek(0)
            rest = b""
            for chunk in decompress(file, find_compression(start)):
                if isinstance(chunk, Damage):
                    raise UserError(f"{path} is damaged: {chunk.kind}. Copy it again.")
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode("utf-8", "replace").strip() for line in lines)
            if rest:
                yield rest.decode("utf-8", "replace").strip()


@contextlib.contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """Opens a file for writing. It gets its name when it is complete. Two workers may write the same file."""
    unfinished = f"{path}.unfinished-{uuid.uuid4().hex}"
    if "://" not in path:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        try:
            with open(unfinished, "wb") as file:
                yield file
            os.replace(unfinished, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(unfinished)
        return
    from apache_beam.io.filesystem import CompressionTypes

    systems = _file_systems()
    with systems.create(unfinished, compression_type=CompressionTypes.UNCOMPRESSED) as file:
        yield file
    systems.rename([unfinished], [path])


def exists(path: str) -> bool:
    return os.path.exists(path) if "://" not in path else _file_systems().exists(path)


def remove(path: str) -> None:
    """Removes a file if it exists."""
    if "://" not in path:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    elif exists(path):
        _file_systems().delete([path])
