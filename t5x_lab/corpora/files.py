"""Files on disks, gs:// and s3://, and on other storage that fsspec reads."""

import contextlib
import datetime
import glob
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import open_file_system, open_object, retry
from t5x_lab.corpora.reading.decompression import Damage, decompress, find_compression


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
    system, path = open_file_system(pattern)
    try:
        matches = retry(lambda: system.glob(path, detail=True), pattern)
        files = {name: info for name, info in matches.items() if info["type"] == "file"}
        for folder in matches.keys() - files.keys():
            in_folder = retry(lambda: system.find(folder, detail=True), pattern)
            files |= {name: info for name, info in in_folder.items() if os.path.basename(name)[:1] not in "._"}
    except Exception as error:  # each storage raises its own
        raise UserError(f'"{pattern}" cannot be read: {error}.') from error
    return sorted((system.unstrip_protocol(name), int(info["size"]), _modified(info)) for name, info in files.items())


def _modified(info: Mapping[str, Any]) -> float:
    """Returns the time of the last change in fsspec's description of a file, which each storage names in its own way."""
    value = next((info[name] for name in ("LastModified", "mtime", "updated") if info.get(name)), 0)
    value = datetime.datetime.fromisoformat(value) if isinstance(value, str) else value
    return value.timestamp() if isinstance(value, datetime.datetime) else float(value)


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
    with open_object(path) as file:
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
    system, name = open_file_system(path)
    with tempfile.TemporaryDirectory(prefix="t5x_lab_") as folder:  # an interrupted upload would leave a part of the file
        local = os.path.join(folder, "output")
        with open(local, "wb") as file:
            yield file
        retry(lambda: system.put_file(local, name), path)


def exists(path: str) -> bool:
    """Tells whether a file exists.

    Raises:
      UserError: if its storage is unknown.
    """
    if "://" not in path:
        return os.path.exists(path)
    system, name = open_file_system(path)
    return retry(lambda: system.exists(name), path)


def move(source: str, target: str) -> None:
    """Moves a file, also to another storage."""
    if "://" not in source and "://" not in target:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        with contextlib.suppress(OSError):  # of another disk
            os.replace(source, target)
            return
    elif source.split("/")[:3] == target.split("/")[:3]:  # the bucket
        system, name = open_file_system(source)
        retry(lambda: system.cp_file(name, open_file_system(target)[1]), target)
        remove(source)
        return
    with open_input(source) as file, open_output(target) as output:
        shutil.copyfileobj(file, output, 1 << 20)
    remove(source)


def remove(path: str) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if "://" not in path:
            os.remove(path)
        else:
            system, name = open_file_system(path)
            retry(lambda: system.rm_file(name), path)
