"""metrics.jsonl: every step's and evaluation's numbers, one JSON object a line."""

import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

from etils import epath

from t5x_lab.config.errors import write_error
from t5x_lab.config.log import log
from t5x_lab.training.hooks import RunStart

PIECE_BYTES = 1 << 20  # of a file of a remote run, before the next one is begun
_UNFINISHED = ".new"  # the end of a file's name until it is whole


class Folder:
    """Where a hook's files are written. Object stores cannot append: a remote folder gets copies of local files.

    Whoever writes begins a new file after `PIECE_BYTES`, so that copies of what has changed are small. They are made in a
    thread of their own.

    Args:
      model_dir: the run's directory.
    """

    def __init__(self, model_dir: str):
        self.remote = epath.Path(model_dir) if "://" in str(model_dir) else None
        self.local = epath.Path(tempfile.mkdtemp()) if self.remote else epath.Path(model_dir)
        self._begun = time.monotonic()
        self._sizes: dict[str, int] = {}  # of the files that were copied, as they were then
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def is_full(self, size: int) -> bool:
        """Whether a file of that size is to be followed by another."""
        return self.remote is not None and size >= PIECE_BYTES

    def copy(self, seconds: float = 60.0) -> None:
        """Begins to copy what has changed, unless that was begun less than so many seconds ago; at 0 seconds, finishes it.

        Raises:
          Exception: what went wrong with the copies before; at 0 seconds, with this one.
        """
        if not self.remote or time.monotonic() - self._begun < seconds:
            return
        if self._thread and self._thread.is_alive() and seconds:
            return
        self._finish(heed=bool(seconds))
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._copy, name="metrics", daemon=True)
        self._thread.start()
        if not seconds:
            self._finish()

    def close(self) -> None:
        """Finishes the copies of a remote folder; the local files, where all are copied, go."""
        self.copy(seconds=0.0)
        if self.remote:
            shutil.rmtree(self.local, ignore_errors=True)

    def _finish(self, heed: bool = True) -> None:
        if self._thread:
            self._thread.join()
        error, self._error = self._error, None
        if error and heed:
            raise error

    def _copy(self) -> None:
        assert self.remote
        try:
            for file in sorted(self.local.iterdir()):
                if file.name.endswith(_UNFINISHED):
                    continue  # it may be gone at any moment
                size = file.stat().length
                if self._sizes.get(file.name) != size:
                    file.copy(self.remote / file.name, overwrite=True)
                    self._sizes[file.name] = size
        except Exception as error:  # a remote file system has errors of its own
            self._error = error


class JsonLines:
    """A hook that appends to a run's metrics.jsonl.

    Lines of steps after the first one, left by an interrupted run, are removed. Storage that fails stops nothing: lines wait in
    memory until it works again. In a remote directory metrics.1.jsonl, metrics.2.jsonl, … follow metrics.jsonl.
    """

    def __init__(self):
        self._folder: Folder | None = None
        self._file: IO | None = None
        self._number = 0
        self._waiting: list[bytes] = []

    def on_start(self, run: RunStart) -> None:
        self._folder = Folder(run.model_dir)
        pieces, last = _pieces(run.model_dir), 0
        for number, path in pieces.items():
            last = number
            if any(line["step"] > run.first_step for line in _lines(path, [])):
                break
        lines = _lines(pieces[last], []) if pieces else ()
        self._open(last, (line for line in lines if line["step"] <= run.first_step))
        for number, path in pieces.items():
            if number > last:
                path.unlink()

    def _open(self, number: int, lines: Iterable[dict] = ()) -> None:
        """Goes on in the piece of that number, which has these lines; they may be millions."""
        assert self._folder
        path = self._folder.local / _piece(number)
        kept = path.with_name(f"{path.name}{_UNFINISHED}")
        try:
            with kept.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            kept.replace(path)  # at once, so that no moment is without the lines
            self._file, self._number = open(path, "ab", buffering=0), number
        except OSError as error:
            raise write_error(path, error) from error

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
            self._folder.close()
        except Exception as failure:  # a remote file system has errors of its own
            log(f"The last metrics could not be written: {failure}.")

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
        if self._folder and self._folder.is_full(end + len(data)):
            self._file.close()
            self._open(self._number + 1)


def read_metrics(model_dir: epath.PathLike) -> list[dict]:
    """The lines of a run's metrics; those that are none, such as a last one cut off by a crash, are left out."""
    return list(lines_of(model_dir))


def lines_of(model_dir: epath.PathLike, damaged: list[str] | None = None) -> Iterator[dict]:
    """The same, one after the other; where those that are left out stand is added to `damaged`."""
    for path in _pieces(model_dir).values():
        yield from _lines(path, [] if damaged is None else damaged)


def _lines(path: epath.Path, damaged: list[str]) -> Iterator[dict]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError:  # no JSON, or no UTF-8
                line = None
            if isinstance(line, dict) and _is_step(line.get("step")) and isinstance(line.get("split"), str):
                yield line
            else:
                damaged.append(f"line {number} of {path.name}")


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _piece(number: int) -> str:
    return f"metrics.{number}.jsonl" if number else "metrics.jsonl"


def _pieces(model_dir: epath.PathLike) -> dict[int, epath.Path]:
    """The files of a run's metrics, by number, in order."""
    directory, found = epath.Path(model_dir), dict[int, epath.Path]()
    while (path := directory / _piece(len(found))).exists():
        found[len(found)] = path
    return found
