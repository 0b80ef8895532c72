"""TensorBoard events of all steps and evaluations."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import histogram, image, scalar, text

from t5x_lab.observe.folder import Folder
from t5x_lab.training.hooks import RunStart


class TensorBoard:
    """Hook that writes TensorBoard events to the run directory. Events are lost while storage fails."""

    def __init__(self):
        self._folder: Folder | None = None
        self._events: EventsWriter | None = None
        self._purge_step: int | None = None
        self._flushed, self._number = time.monotonic(), 0

    def on_start(self, run: RunStart) -> None:
        self._folder = Folder(run.model_dir)
        before = any(epath.Path(run.model_dir).glob("events.out*"))
        self._purge_step = run.first_step + 1 if before or run.first_step else None

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._write(step, "train", metrics)
        if time.monotonic() - self._flushed > 10:
            self._flush()

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._write(step, split, metrics)
        self._flush()

    def on_media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        summaries = [_summary(f"{split}/{name}", value) for name, value in values.items()]
        self._add(step, filter(None, summaries))
        self._flush()

    def on_saving(self, step: int) -> None:
        if self._events and self._folder:
            self._flush()
            self._folder.copy(seconds=0.0)

    def on_end(self, error: BaseException | None) -> None:
        if self._events:
            self._events.close()
        if self._folder:
            self._folder.close()

    def _write(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self._add(step, [scalar(f"{split}/{name}", value) for name, value in metrics.items() if value is not None])

    def _add(self, step: int, summaries: Iterable[Any]) -> None:
        assert self._folder
        if self._events is None:
            self._events = EventsWriter(str(self._folder.local / "events"), self._suffix)
            if self._purge_step is not None:  # hides events of an interrupted run after its checkpoint
                start = SessionLog(status=SessionLog.START)
                self._events.write_event(Event(step=self._purge_step, wall_time=time.time(), session_log=start))
                self._purge_step = None
        try:
            for summary in summaries:
                self._events.write_event(Event(step=step, wall_time=time.time(), summary=summary))
        except Exception:
            self._events = None  # a new file, once storage works again
            raise

    def _flush(self) -> None:
        assert self._events and self._folder
        try:
            self._events.flush()
        except Exception:
            self._events = None
            raise
        self._flushed = time.monotonic()
        written = sum(file.stat().length for file in self._folder.local.glob(f"events.out*{self._suffix}"))
        if self._folder.is_full(written):
            self._events.close()
            self._events, self._number = None, self._number + 1
        self._folder.copy()

    @property
    def _suffix(self) -> str:
        """Suffix of the file name. A remote run has several files."""
        return f".{self._number}" if self._folder and self._folder.remote else ""


def _summary(tag: str, value: Any) -> Any:
    """Returns the TensorBoard summary of a `seqio.metrics` value; None for unsupported types."""
    if hasattr(value, "textdata"):
        return text(tag, value.textdata.decode("utf-8", "replace") if isinstance(value.textdata, bytes) else value.textdata)
    if hasattr(value, "values"):
        return histogram(tag, np.asarray(value.values), value.bins or 30)
    if hasattr(value, "image"):
        images = np.asarray(value.image)  # [N, H, W, C] or [H, W, C]; TensorBoard shows one image per tag
        return image(tag, images[0] if images.ndim == 4 else images, dataformats="HWC")
    return None
