"""metrics.jsonl, one object a line, and the same numbers as TensorBoard events."""

import json
import math
from collections.abc import Mapping

import tensorboardX
from etils import epath


class MetricWriter:
    """Appends to a run's metrics.

    Args:
      model_dir: the run's directory.
      resume_step: lines of later steps, left by an interrupted run, are removed first.
    """

    def __init__(self, model_dir: str, resume_step: int = 0):
        self.path = epath.Path(model_dir) / "metrics.jsonl"
        self._lines = [line for line in read_metrics(model_dir) if line["step"] <= resume_step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        self._file = self.path.open("a")
        self._events = tensorboardX.SummaryWriter(str(model_dir), purge_step=resume_step + 1 if resume_step else None)

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Writes one line; `split` is "train", "eval/<task>" or "infer/<task>"."""
        clean = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "split": split, **clean}) + "\n")
        self._file.flush()
        for name, value in clean.items():
            if value is not None:
                self._events.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()


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
