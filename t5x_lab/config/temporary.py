"""Temporary folders, and local copies of remote ones for libraries that know disks only."""

import atexit
import contextlib
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

from etils import epath

from t5x_lab.config.object_storage import check_network, is_object_storage, retry


def make_temporary_folder() -> pathlib.Path:
    """Returns a new folder, which is removed at the end of the process."""
    folder = tempfile.mkdtemp(prefix="t5x_lab_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


@contextlib.contextmanager
def written_locally(directory: epath.Path) -> Iterator[epath.Path]:
    """Yields a local folder. Files in it are in `directory` at the end, with the same names."""
    if not is_object_storage(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="t5x_lab_") as folder:
        yield epath.Path(folder)
        copy_files(pathlib.Path(folder), directory)


@contextlib.contextmanager
def read_locally(directory: epath.Path, is_needed: Callable[[str], bool]) -> Iterator[epath.Path]:
    """Yields a local folder with those files of `directory` whose names are needed."""
    if not is_object_storage(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="t5x_lab_") as folder:
        for file in directory.iterdir():
            if is_needed(file.name):
                copy_file(file, epath.Path(folder) / file.name)
        yield epath.Path(folder)


def copy_files(folder: pathlib.Path, directory: epath.Path, last: str = "") -> None:
    """Copies all files of a local folder to a directory on object storage, those with the name `last` in the end."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.name == last, -len(file.parts))):  # the one at the top as the very last
        target = directory / file.relative_to(folder).as_posix()
        retry(lambda: copy_file(epath.Path(file), target), directory)


def copy_file(source: epath.Path, target: epath.Path) -> None:
    """Copies a file with a few megabytes in memory. An object is visible when all of it is there."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 4 << 20)


@functools.cache
def local_copy(path: str) -> str:
    """Returns the path of a file or folder on a disk: itself, or a copy of one on object storage, read once per process."""
    if not is_object_storage(path):
        return path
    check_network(path)
    source, folder = epath.Path(path), epath.Path(make_temporary_folder())
    files = [file for file in source.iterdir() if file.is_file()] if source.is_dir() else [source]
    target = folder / source.name if files != [source] else folder
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        copy_file(file, target / file.name)
    return str(folder / source.name)
