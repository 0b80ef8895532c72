"""Temporary folders, and local copies of remote ones for libraries that know disks only."""

import atexit
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

from etils import epath


def make_temporary_folder() -> pathlib.Path:
    """Returns a new folder, which is removed at the end of the process."""
    folder = tempfile.mkdtemp(prefix="t5x_lab_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


@contextlib.contextmanager
def written_locally(directory: epath.Path) -> Iterator[epath.Path]:
    """Yields a local folder. Files in it are in `directory` at the end, with the same names."""
    if "://" not in str(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="t5x_lab_") as folder:
        yield epath.Path(folder)
        copy_files(pathlib.Path(folder), directory)


def copy_files(folder: pathlib.Path, directory: epath.Path, last: str = "") -> None:
    """Copies all files of a local folder to a directory on object storage, those with the name `last` in the end."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: (file.name == last, -len(file.parts))):  # the one at the top as the very last
        (directory / file.relative_to(folder).as_posix()).write_bytes(file.read_bytes())


@contextlib.contextmanager
def read_locally(directory: epath.Path, is_needed: Callable[[str], bool]) -> Iterator[epath.Path]:
    """Yields a local folder with those files of `directory` whose names are needed."""
    if "://" not in str(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="t5x_lab_") as folder:
        for file in directory.iterdir():
            if is_needed(file.name):
                pathlib.Path(folder, file.name).write_bytes(file.read_bytes())
        yield epath.Path(folder)
