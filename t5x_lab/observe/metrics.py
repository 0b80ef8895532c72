"""metrics.jsonl: metrics of all steps and evaluations, one JSON object per line."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

from etils import epath

from t5x_lab.config.errors import write_error
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.config.steps import is_step
from t5x_lab.observe.folder import UNFINISHED, Folder
from t5x_lab.training.hooks import RunStart


class JsonLines:
    """Hook that appends to metrics.jsonl.

    Lines of an interrupted run after the first step are removed. If storage fails, lines stay in memory until it works again. A
    remote directory has further files metrics.1.jsonl, metrics.2.jsonl, and so on.
    """

    def __init__(self):
        self._folder: Folder | None = None
        self._file: IO | None = None
        self._number = 0
        self._pending: list[bytes] = []

    def on_start(self, run: RunStart) -> None:
        self._folder = Folder(run.model_dir)
        files, last = _metrics_files(run.model_dir), 0
        for number, path in files.items():
            last = number
            if any(line["step"] > run.first_step for line in _read_lines(path, [])):
                break
        lines = _read_lines(files[last], []) if files else ()
        self._open(last, (line for line in lines if line["step"] <= run.first_step))
        for number, path in files.items():
            if number > last:
                path.unlink()

    def _open(self, number: int, lines: Iterable[dict] = ()) -> None:
        """Opens the file with this number and the initial lines, which may be millions."""
        assert self._folder
        path = self._folder.local / _file_name(number)
        new = path.with_name(f"{path.name}{UNFINISHED}")
        try:
            with new.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            new.replace(path)  # atomic
            self._file, self._number = open(path, "ab", buffering=0), number
        except OSError as error:
            raise write_error(path, error) from error

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._write(step, "train", metrics)
        assert self._folder
        self._folder.copy()

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._write(step, split, metrics)
        assert self._folder
        self._folder.copy(seconds=0.0)  # a continued run does not evaluate again

    def _write(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._pending.append((json.dumps({"step": step, "split": split, **metrics}) + "\n").encode())
        self._append()

    def on_saving(self, step: int) -> None:
        assert self._folder
        self._folder.copy(seconds=0.0)

    def on_end(self, error: BaseException | None) -> None:
        if self._file is None or self._folder is None:
            return  # the run failed before it started
        try:
            if self._pending:
                self._append()
            self._file.close()
            self._folder.close()
        except Exception as failure:  # remote file systems raise various exceptions
            log(f"The last metrics could not be written: {failure}.")

    def _append(self) -> None:
        assert self._file
        end = self._file.seek(0, os.SEEK_END)
        data = b"".join(self._pending)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "a line was written only partly")
        except OSError:
            self._file.truncate(end)
            raise
        self._pending.clear()
        if self._folder and self._folder.is_full(end + len(data)):
            self._file.close()
            self._open(self._number + 1)


def read_metrics(model_dir: epath.PathLike) -> list[dict]:
    """Returns the lines of a run's metrics. Invalid lines, such as an incomplete last one, are skipped."""
    return list(iterate_metrics(model_dir))


def iterate_metrics(model_dir: epath.PathLike, damaged: list[str] | None = None) -> Iterator[dict]:
    """Yields the lines of a run's metrics. Locations of invalid lines are added to `damaged`."""
    for path in _metrics_files(model_dir).values():
        yield from _read_lines(path, [] if damaged is None else damaged)


def _read_lines(path: epath.Path, damaged: list[str]) -> Iterator[dict]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = parse_json(text)
            except ValueError:  # not JSON or UTF-8
                line = None
            if isinstance(line, dict) and is_step(line.get("step")) and isinstance(line.get("split"), str):
                yield line
            else:
                damaged.append(f"line {number} of {path.name}")


def _file_name(number: int) -> str:
    return f"metrics.{number}.jsonl" if number else "metrics.jsonl"


def _metrics_files(model_dir: epath.PathLike) -> dict[int, epath.Path]:
    """Returns the metrics files of a run by number, in order."""
    directory, files = epath.Path(model_dir), dict[int, epath.Path]()
    while is_regular_file(path := directory / _file_name(len(files))):
        files[len(files)] = path
    return files
