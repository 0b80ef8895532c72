"""metrics.jsonl, one object a line, and the same numbers as TensorBoard events."""

import json
import math
import tempfile
import time
from collections.abc import Mapping

import tensorboardX
from etils import epath


class MetricWriter:
    """Appends to a run's metrics.

    Object stores cannot append: for a remote `model_dir` (gs://…) files are written locally and copied there once a minute.

    Args:
      model_dir: the run's directory.
      resume_step: lines of later steps, left by an interrupted run, are removed first.
    """

    def __init__(self, model_dir: str, resume_step: int = 0):
        lines = [line for line in read_metrics(model_dir) if line["step"] <= resume_step]
        self._remote = epath.Path(model_dir) if "://" in str(model_dir) else None
        self._local = epath.Path(tempfile.mkdtemp()) if self._remote else epath.Path(model_dir)
        self._file = (self._local / "metrics.jsonl").open("w")
        self._file.writelines(json.dumps(line) + "\n" for line in lines)
        self._events = tensorboardX.SummaryWriter(str(self._local), purge_step=resume_step + 1 if resume_step else None)
        self._copied = time.monotonic()

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Writes one line; `split` is "train", "eval/<task>" or "infer/<task>"."""
        clean = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "split": split, **clean}) + "\n")
        self._file.flush()
        for name, value in clean.items():
            if value is not None:
                self._events.add_scalar(f"{split}/{name}", value, step)
        if self._remote and time.monotonic() - self._copied > 60:
            self._copy()

    def _copy(self) -> None:
        for file in self._local.iterdir():
            file.copy(self._remote / file.name, overwrite=True)
        self._copied = time.monotonic()

    def close(self) -> None:
        self._file.close()
        self._events.close()
        if self._remote:
            self._copy()


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
    """The lines of a run's metrics.jsonl; a last line that was cut off by a crash is left out."""
    path = epath.Path(model_dir) / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
