"""Temporary folders that are removed when the process ends."""

import atexit
import pathlib
import shutil
import tempfile


def make_temporary_folder() -> pathlib.Path:
    """Returns a new folder, which is removed at the end of the process."""
    folder = tempfile.mkdtemp(prefix="t5x_lab_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)
