"""Output file of batch inference, on a disk or on object storage."""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import time

from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import is_object_storage, retry
from t5x_lab.config.temporary import copy_file

SETTINGS = ".settings.json"
SECONDS_BETWEEN_PARTS = 60.0


class Output:
    """A file that grows by whole chunks, and its settings beside it.

    Object storage cannot append. There the file grows on the local disk. Every minute its new bytes are copied to an object
    `path.part-N`, where N is the position of its first byte. At the end the whole file becomes `path`, and the parts are
    removed.

    Args:
      path: path of a .jsonl file.

    Attributes:
      local: the file that grows.
      settings: the file with the settings.
    """

    def __init__(self, path: str):
        self.path, self.local = path, path
        self._remote = epath.Path(path) if is_object_storage(path) else None
        self._base = 0  # bytes in `path`
        self._copied = 0  # bytes in `path` and the parts
        self._copied_at = time.monotonic()
        self._has_grown = False

    @property
    def settings(self) -> str:
        return self.local + SETTINGS

    def __enter__(self) -> "Output":
        if self._remote:
            self._folder = tempfile.mkdtemp(prefix="t5x_lab_")
            self.local = os.path.join(self._folder, self._remote.name)
            retry(self._download, self.path)
        return self

    def open(self, mode: str):
        """Opens the file.

        Raises:
          UserError: if it cannot be written.
        """
        return self._open(self.local, mode)

    def open_settings(self, mode: str):
        """Opens the file with the settings. See `open`."""
        return self._open(self.settings, mode)

    def _open(self, file: str, mode: str):
        try:
            return open(file, mode)
        except OSError as error:
            raise UserError(f"The output {self.path} cannot be written: {error.strerror}. Set another --output.") from error

    def append(self, data: bytes) -> None:
        """Writes bytes to the end of the file, to the disk."""
        with self.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._has_grown = True
        if self._remote and time.monotonic() - self._copied_at >= SECONDS_BETWEEN_PARTS:
            retry(self._copy_part, self.path)

    def truncate(self, size: int) -> None:
        """Removes the bytes after the first `size`. What object storage has of them is replaced when the file grows."""
        if size == os.path.getsize(self.local):
            return
        os.truncate(self.local, size)
        if self._remote:
            retry(self._remove_parts, self.path)
            if size < self._base:
                self._remote.unlink(missing_ok=True)
                self._base = 0
            self._copied = self._base

    def __exit__(self, kind: type | None, *unused) -> None:
        if not self._remote:
            return
        if kind is None:
            try:
                retry(self._copy_whole, self.path)
            except Exception:
                log(f"The whole output is in {self.local}, and could not be copied to {self.path}.")
                raise
        elif self._has_grown:
            with contextlib.suppress(Exception):  # the error that ended inference is the one to report
                self._copy_part()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _download(self) -> None:
        assert self._remote
        for failed in pathlib.Path(self._folder).iterdir():  # of an attempt before
            failed.unlink()
        settings = self._remote.with_name(self._remote.name + SETTINGS)
        if settings.exists():
            copy_file(settings, epath.Path(self.settings))
        if self._remote.exists():
            copy_file(self._remote, epath.Path(self.local))
            self._base = self._copied = os.path.getsize(self.local)
        for start, part in self._parts():
            if start != self._copied:
                continue  # `path` has the bytes of this part
            with open(self.local, "ab") as file, part.open("rb") as copy:
                shutil.copyfileobj(copy, file)
            self._copied = os.path.getsize(self.local)

    def _copy_part(self) -> None:
        assert self._remote
        self._copy_settings()
        with open(self.local, "rb") as file:
            file.seek(self._copied)
            data = file.read()
        if data:
            self._remote.with_name(f"{self._remote.name}.part-{self._copied:015d}").write_bytes(data)
            self._copied += len(data)
        self._copied_at = time.monotonic()

    def _copy_whole(self) -> None:
        assert self._remote
        self._copy_settings()
        copy_file(epath.Path(self.local), self._remote)
        self._remove_parts()

    def _copy_settings(self) -> None:
        assert self._remote
        copy_file(epath.Path(self.settings), self._remote.with_name(self._remote.name + SETTINGS))

    def _remove_parts(self) -> None:
        for _, part in self._parts():
            part.unlink(missing_ok=True)

    def _parts(self) -> list[tuple[int, epath.Path]]:
        """Returns the parts by the position of their first byte, in order."""
        assert self._remote
        folder, name = self._remote.parent, re.compile(rf"{re.escape(self._remote.name)}\.part-(\d+)")
        matches = [(name.fullmatch(file.name), file) for file in (folder.iterdir() if folder.exists() else ())]
        return sorted((int(match[1]), file) for match, file in matches if match)
