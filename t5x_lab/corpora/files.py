"""Files on any storage that Beam reads: local paths, gs://, s3://."""

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from t5x_lab.config.beam import import_beam
from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.corpora.reading.decompression import Damage, decompress, find_compression


def _file_systems():
    import_beam("corpus", "corpus")
    from apache_beam.io.filesystems import FileSystems

    return FileSystems


def set_options(options: Sequence[str]) -> None:
    """Passes Beam's flags to the storages, such as --s3_endpoint_url, before there is a pipeline."""
    file_systems = _file_systems()
    from apache_beam.options.pipeline_options import PipelineOptions

    file_systems.set_options(PipelineOptions(list(options)))


def match_files(pattern: str) -> list[tuple[str, int]]:
    """Returns (path, size in bytes) of files. See `match_files_with_times`."""
    return [(path, size) for path, size, _ in match_files_with_times(pattern)]


def match_files_with_times(pattern: str) -> list[tuple[str, int, float]]:
    """Returns (path, size in bytes, time of the last change) of the files that match a pattern, or that folders which match it
    hold, sorted by path. The time is 0 if the storage does not tell it.

    Raises:
      UserError: if the storage cannot be read.
    """
    if "://" in pattern:
        return _match_remote(pattern)
    paths: list[str] = []
    for match in [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True):
        paths += _walk(match) if os.path.isdir(match) else [match]
    existing = {path for path in paths if os.path.isfile(path)}
    for path in sorted({*paths} - existing):
        log(f"{path} is no file that can be read. It is left out.")
    return [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted(existing)]


def _match_remote(pattern: str) -> list[tuple[str, int, float]]:
    try:
        matches = _file_systems().match([pattern])[0].metadata_list
        if not matches:  # a folder
            matches = _file_systems().match([f"{pattern.rstrip('/')}/**"])[0].metadata_list
    except Exception as error:  # each storage raises its own
        raise UserError(f'"{pattern}" cannot be read: {str(error).partition(". Path")[0]}.') from error
    return sorted((str(m.path), int(m.size_in_bytes), float(m.last_updated_in_seconds or 0)) for m in matches)


def _walk(top: str) -> list[str]:
    """Returns the files in a folder at any depth, behind links too, each folder once."""
    paths, visited = [], set()
    report = lambda error: log(f"{error.filename} cannot be read ({error.strerror}). It is left out.")
    for folder, folders, names in os.walk(top, followlinks=True, onerror=report):
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
            line = bytearray()
            for chunk in decompress(file, find_compression(start)):
                if isinstance(chunk, Damage):
                    raise UserError(f"{path} is damaged: {chunk.kind}. Copy it again.")
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    yield (line + end).decode("utf-8", "replace").strip()
                    line.clear()
                line += rest
            if line:
                yield line.decode("utf-8", "replace").strip()


@contextlib.contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """Opens a file for writing. It gets its name when it is complete. Two workers may write the same file."""
    unfinished = f"{path}.unfinished-{uuid.uuid4().hex}"
    if "://" not in path:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{os.path.dirname(path)} cannot be a folder: a file has its name. Choose another folder."
            ) from error
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
    try:
        file = systems.create(unfinished, compression_type=CompressionTypes.UNCOMPRESSED)
    except ValueError as error:
        raise UserError(f"{path} cannot be written: {str(error).partition('. Path')[0]}.") from error
    try:
        with file:
            yield file
    except BaseException:
        with contextlib.suppress(Exception):  # of the storage
            systems.delete([unfinished])
        raise
    remove(path)  # some storages rename to no file that exists
    systems.rename([unfinished], [path])


def exists(path: str) -> bool:
    """Tells whether a file exists.

    Raises:
      UserError: if Beam does not know the storage.
    """
    if "://" not in path:
        return os.path.exists(path)
    try:
        return bool(_file_systems().exists(path))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {str(error).partition('. Path')[0]}.") from error


def move(source: str, target: str) -> None:
    """Moves a file, also to another storage. Within one it is renamed."""
    if "://" not in source and "://" not in target:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        with contextlib.suppress(OSError):  # of another disk
            os.replace(source, target)
            return
    elif source.split("/")[:3] == target.split("/")[:3]:  # the bucket
        remove(target)
        _file_systems().rename([source], [target])
        return
    with open_input(source) as file, open_output(target) as output:
        shutil.copyfileobj(file, output, 1 << 20)
    remove(source)


def remove(path: str) -> None:
    """Removes a file if it exists."""
    if "://" not in path:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    elif exists(path):
        _file_systems().delete([path])
