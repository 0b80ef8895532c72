"""metrics.jsonl, one object a line, and the same numbers as TensorBoard events."""

import errno
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping

from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from t5x_lab.config.errors import UserError
from t5x_lab.observe.console import say


class MetricWriter:
    """Appends to a run's metrics.

    Storage that fails stops nothing: lines wait in memory until it works again, events of that time are lost. Object stores
    cannot append: for a remote `model_dir` (gs://…) files are written locally and copied there once a minute.

    Args:
      model_dir: the run's directory.
      resume_step: lines of later steps, left by an interrupted run, are removed first.
    """

    def __init__(self, model_dir: str, resume_step: int = 0):
        before = read_metrics(model_dir)
        lines = [line for line in before if line["step"] <= resume_step]
        self._remote = epath.Path(model_dir) if "://" in str(model_dir) else None
        self._local = epath.Path(tempfile.mkdtemp()) if self._remote else epath.Path(model_dir)
        path = self._local / "metrics.jsonl"
        kept = path.with_name("metrics.jsonl.new")
        try:
            kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
            kept.replace(path)  # at once, so that no moment is without the lines
            self._file = open(path, "ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}. Make room, or choose another MODEL_DIR.") from error
        self._waiting: list[bytes] = []
        self._purge_step = resume_step + 1 if before or resume_step else None
        self._events: EventsWriter | None = None
        self._failing = False
        self._flushed = self._copied = time.monotonic()

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Writes one line; `split` is "train", "eval/<task>" or "infer/<task>"."""
        clean = {name: _finite(value) for name, value in values.items()}
        self._waiting.append((json.dumps({"step": step, "split": split, **clean}) + "\n").encode())
        try:
            self._append()
            self._write_events(step, split, clean)
            if self._remote and time.monotonic() - self._copied > 60:
                self._copy()
            self._failing = False
        except Exception as error:  # a remote file system has errors of its own
            if not self._failing:
                say(f"Metrics of step {step} could not be written ({error}); they are kept and tried again.")
            self._failing, self._events = True, None

    def _append(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        data = b"".join(self._waiting)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of a line could be written")
        except OSError:
            self._file.truncate(end)
            raise
        self._waiting.clear()

    def _write_events(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        if self._events is None:
            self._events = EventsWriter(str(self._local / "events"))
            if self._purge_step is not None:  # hides what an interrupted run wrote after its checkpoint
                start = SessionLog(status=SessionLog.START)
                self._events.write_event(Event(step=self._purge_step, wall_time=time.time(), session_log=start))
        for name, value in values.items():
            if value is not None:
                summary = scalar(f"{split}/{name}", value)
                self._events.write_event(Event(step=step, wall_time=time.time(), summary=summary))
        if split != "train" or time.monotonic() - self._flushed > 10:
            self._events.flush()
            self._flushed = time.monotonic()

    def _copy(self) -> None:
        for file in self._local.iterdir():
            file.copy(self._remote / file.name, overwrite=True)
        self._copied = time.monotonic()

    def close(self) -> None:
        try:
            if self._waiting:
                self._append()
            self._file.close()
            if self._events:
                self._events.close()
            if self._remote:
                self._copy()
        except Exception as error:
            say(f"The last metrics could not be written: {error}.")


class NoWriter:
    """For processes other than the first: they compute the same numbers and write nothing."""

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        pass

    def close(self) -> None:
        pass


def _finite(value):
    """JSON has no NaN or infinity: they become null."""
    return None if value is None or not math.isfinite(value) else value


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
