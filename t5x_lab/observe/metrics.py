"""metrics.jsonl: every step's and evaluation's numbers, one JSON object a line."""

import errno
import json
import os
import tempfile
import time
from collections.abc import Mapping
from typing import IO

from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.observe.console import say
from t5x_lab.training.hooks import RunStart


class Folder:
    """Where a hook's files are written. Object stores cannot append: a remote folder gets copies of local files.

    Args:
      model_dir: the run's directory.
    """

    def __init__(self, model_dir: str):
        self._remote = epath.Path(model_dir) if "://" in str(model_dir) else None
        self.local = epath.Path(tempfile.mkdtemp()) if self._remote else epath.Path(model_dir)
        self._copied = time.monotonic()

    def copy(self, seconds: float = 60.0) -> None:
        """Copies the files, unless that was done less than so many seconds ago."""
        if self._remote and time.monotonic() - self._copied >= seconds:
            for file in self.local.iterdir():
                file.copy(self._remote / file.name, overwrite=True)
            self._copied = time.monotonic()


class JsonLines:
    """A hook that appends to a run's metrics.jsonl.

    Lines of steps after the first one, left by an interrupted run, are removed. Storage that fails stops nothing: lines wait in
    memory until it works again.
    """

    def __init__(self):
        self._folder: Folder | None = None
        self._file: IO | None = None
        self._waiting: list[bytes] = []

    def on_start(self, run: RunStart) -> None:
        self._folder = Folder(run.model_dir)
        lines = [line for line in read_metrics(run.model_dir) if line["step"] <= run.first_step]
        path = self._folder.local / "metrics.jsonl"
        kept = path.with_name("metrics.jsonl.new")
        try:
            kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
            kept.replace(path)  # at once, so that no moment is without the lines
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}. Make room, or choose another MODEL_DIR.") from error

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.on_evaluation(step, "train", metrics)

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._waiting.append((json.dumps({"step": step, "split": split, **metrics}) + "\n").encode())
        self._append()
        assert self._folder
        self._folder.copy()

    def on_end(self, error: BaseException | None) -> None:
        if self._file is None or self._folder is None:
            return  # the run ended before it began
        try:
            if self._waiting:
                self._append()
            self._file.close()
            self._folder.copy(seconds=0.0)
        except Exception as failure:  # a remote file system has errors of its own
            say(f"The last metrics could not be written: {failure}.")

    def _append(self) -> None:
        assert self._file
        end = self._file.seek(0, os.SEEK_END)
        data = b"".join(self._waiting)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of a line could be written")
        except OSError:
            self._file.truncate(end)
            raise
        self._waiting.clear()


def read_metrics(model_dir: str | epath.Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; those that are none, such as a last one cut off by a crash, are left out."""
    path = epath.Path(model_dir) / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and {"step", "split"} <= found.keys():
            lines.append(found)
    return lines
