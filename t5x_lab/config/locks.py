"""Lock of a directory that one process at a time may work in."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from t5x_lab.config.errors import UserError

LOCK = "LOCK"


@contextlib.contextmanager
def hold_lock(directory: pathlib.Path, refusal: str) -> Iterator[None]:
    """Holds the lock of a local directory. It is free again when the process ends, however it ends.

    Args:
      directory: the directory. It is made if it does not exist.
      refusal: message if another process holds the lock.

    Raises:
      UserError: if another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(refusal) from error
        yield
