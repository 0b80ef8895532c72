"""Regular files, as opposed to named pipes and devices, whose readers would wait forever."""

import os

from etils import epath


def is_regular_file(path: epath.PathLike) -> bool:
    """Returns whether a path is a regular file, or an object of remote storage."""
    text = os.fspath(path)
    return epath.Path(path).is_file() if "://" in text else os.path.isfile(text)
