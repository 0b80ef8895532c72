"""Folder of the files that hooks write. Files of a remote run are written locally and copied."""

import shutil
import threading
import time

from etils import epath

from t5x_lab.config.object_storage import retry
from t5x_lab.config.temporary import make_temporary_folder

FILE_BYTES = 1 << 20  # size after which a remote run starts a new file
UNFINISHED = ".new"  # suffix of incomplete files


class Folder:
    """Folder for a hook's files. Object stores cannot append, so a remote folder receives copies of local files.

    Copies are made in a thread. Writers start a new file after `FILE_BYTES`, so that copies of changed files are small.

    Args:
      model_dir: run directory.
    """

    def __init__(self, model_dir: str):
        self.remote = epath.Path(model_dir) if "://" in str(model_dir) else None
        self.local = epath.Path(make_temporary_folder()) if self.remote else epath.Path(model_dir)
        self._last_copy = time.monotonic()
        self._sizes: dict[str, int] = {}  # sizes of copied files
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def is_full(self, size: int) -> bool:
        """Returns whether a new file must follow a file of this size."""
        return self.remote is not None and size >= FILE_BYTES

    def copy(self, seconds: float = 60.0) -> None:
        """Starts copying changed files, if the last copy is older than `seconds`. With 0, waits for the copy.

        Raises:
          Exception: the error of the previous copy; with 0 seconds, of this one.
        """
        if not self.remote or time.monotonic() - self._last_copy < seconds:
            return
        if self._thread and self._thread.is_alive() and seconds:
            return
        self._finish(raise_error=bool(seconds))
        self._last_copy = time.monotonic()
        self._thread = threading.Thread(target=self._copy, name="metrics", daemon=True)
        self._thread.start()
        if not seconds:
            self._finish()

    def close(self) -> None:
        """Finishes the copies of a remote folder and deletes the local files."""
        retry(lambda: self.copy(seconds=0.0), self.remote or self.local)
        if self.remote:
            shutil.rmtree(self.local, ignore_errors=True)

    def _finish(self, raise_error: bool = True) -> None:
        if self._thread:
            self._thread.join()
        error, self._error = self._error, None
        if error and raise_error:
            raise error

    def _copy(self) -> None:
        assert self.remote
        try:
            for file in sorted(self.local.iterdir()):
                if file.name.endswith(UNFINISHED):
                    continue  # it may be renamed at any moment
                size = file.stat().length
                if self._sizes.get(file.name) != size:
                    file.copy(self.remote / file.name, overwrite=True)
                    self._sizes[file.name] = size
        except Exception as error:  # remote file systems raise various exceptions
            self._error = error
