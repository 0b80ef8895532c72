"""Output file of batch inference, on a disk or on object storage."""

import contextlib
import os
import pathlib
import tempfile
import time

from etils import epath

from t5x_lab.config.errors import UserError

SETTINGS = ".settings.json"
SECONDS_BETWEEN_PARTS = 60.0


class Output:
    """A file that grows by whole chunks, and its settings beside it.

    Object storage cannot append. There the file grows on the local disk, its new bytes are copied every minute to objects
    `path.part-00000`, `path.part-00001`, and so on, and at the end the whole file becomes `path` in place of them.

    Args:
      path: path of a .jsonl file.

    Attributes:
      local: the file that grows.
      settings: the file with the settings.
    """

    def __init__(self, path: str):
        self.path, self.local = path, path
        self._remote = epath.Path(path) if "://" in path else None
        self._parts: list[epath.Path] = []
        self._copied = 0  # bytes in the parts
        self._copied_at = time.monotonic()

    @property
    def settings(self) -> str:
        return self.local + SETTINGS

    def __enter__(self) -> "Output":
        if self._remote:
            self._folder = tempfile.TemporaryDirectory(prefix="t5x_lab_")
            self.local = os.path.join(self._folder.name, self._remote.name)
            self._download(self._remote)
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
        if self._remote and time.monotonic() - self._copied_at >= SECONDS_BETWEEN_PARTS:
            self._copy_part(self._remote)

    def truncate(self, size: int) -> None:
        """Removes the bytes after the first `size`."""
        if size == os.path.getsize(self.local):
            return
        os.truncate(self.local, size)
        for part in self._parts:  # they are written again
            part.unlink(missing_ok=True)
        self._parts, self._copied = [], 0

    def __exit__(self, kind: type | None, *unused) -> None:
        if not self._remote:
            return
        try:
            if kind is None:
                self._copy_settings(self._remote)
                self._remote.write_bytes(pathlib.Path(self.local).read_bytes())
                for part in self._parts:
                    part.unlink(missing_ok=True)
            elif os.path.exists(self.local):
                with contextlib.suppress(Exception):  # the error that ended inference is the one to report
                    self._copy_part(self._remote)
        finally:
            self._folder.cleanup()

    def _download(self, remote: epath.Path) -> None:
        settings = remote.with_name(remote.name + SETTINGS)
        if settings.exists():
            pathlib.Path(self.settings).write_bytes(settings.read_bytes())
        if remote.exists():
            pathlib.Path(self.local).write_bytes(remote.read_bytes())
            return
        while (part := self._part(remote, len(self._parts))).exists():
            with open(self.local, "ab") as file:
                file.write(part.read_bytes())
            self._parts.append(part)
        self._copied = os.path.getsize(self.local) if self._parts else 0

    def _copy_part(self, remote: epath.Path) -> None:
        self._copy_settings(remote)
        with open(self.local, "rb") as file:
            file.seek(self._copied)
            data = file.read()
        if data:
            part = self._part(remote, len(self._parts))
            part.write_bytes(data)
            self._parts.append(part)
            self._copied += len(data)
        self._copied_at = time.monotonic()

    def _copy_settings(self, remote: epath.Path) -> None:
        remote.with_name(remote.name + SETTINGS).write_bytes(pathlib.Path(self.settings).read_bytes())

    @staticmethod
    def _part(remote: epath.Path, number: int) -> epath.Path:
        return remote.with_name(f"{remote.name}.part-{number:05d}")
