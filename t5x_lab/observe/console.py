"""Progress on the console: a bar on a terminal, a line a minute in a log; and every evaluation."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import tqdm

from t5x_lab.config.log import log
from t5x_lab.config.user_code import shown
from t5x_lab.training.hooks import RunStart


class Console:
    """A hook that shows how far training is.

    Args:
      seconds_between_lines: in a log; the first steps are always shown, so that one sees that it runs.
    """

    def __init__(self, seconds_between_lines: float = 60.0):
        self._seconds = seconds_between_lines
        self._terminal = sys.stderr.isatty() and _width() > 0  # some terminals do not tell how wide they are
        self._last, self._shown, self._total = 0.0, 0, 0
        self._first: tuple[int, float] | None = None

    def on_start(self, run: RunStart) -> None:
        self._total = run.last_step
        self._bar = tqdm.tqdm(
            initial=run.first_step, total=run.last_step, bar_format=BAR, dynamic_ncols=True, disable=not self._terminal
        )

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        log(f"step {step}  {split}  {describe(metrics)}")

    def on_media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            text = getattr(value, "textdata", None)
            if text is not None:
                log(f"step {step}  {split}  {name}: {shown(text)}")

    def on_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        if self._terminal:
            self._bar.total = max(self._total, step)
            taken = len(f"{step}/{self._bar.total} 100%|          | [{self._left(step)}], ") + 1
            self._bar.set_postfix_str(describe(metrics, _width() - taken), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        text, now = describe(metrics), time.monotonic()
        if self._shown < 3 or now - self._last >= self._seconds or step == self._total:
            self._last, self._shown = now, self._shown + 1
            left = ""  # unknown at first: a run's first step is mostly compilation
            if self._first and step <= self._total:  # which is an estimate where tokens end the training
                done, began = self._first
                left = f"  {_duration((now - began) / max(step - done, 1) * (self._total - step))} left"
            log(f"step {step}/{self._total}  {text}{left}")
        self._first = self._first or (step, now)

    def _left(self, step: int) -> str:
        """About what the bar says of time."""
        elapsed = self._bar.format_dict["elapsed"]
        remaining = elapsed * (self._bar.total - step) / max(1, step - self._bar.initial)
        return f"{tqdm.tqdm.format_interval(elapsed)}<{tqdm.tqdm.format_interval(remaining)}"

    def on_end(self, error: BaseException | None) -> None:
        if self._total:
            self._bar.close()


BAR = "{n_fmt}/{total_fmt} {percentage:3.0f}%|{bar:10}| [{elapsed}<{remaining}]{postfix}"
LEFT_OUT_FIRST = ("lr ", "grad ", "accuracy ", "waits ", "MFU ")  # where a line is too narrow


def _width() -> int:
    """Of the terminal, in characters; 0 where it is not known."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def describe(metrics: Mapping[str, float | None], width: int | None = None) -> str:
    """The numbers worth reading at a glance, as many as fit into a width; of a task's own metrics, all."""
    if not {"loss", "accuracy"} <= metrics.keys():
        return "  ".join(f"{name} {_number(value, '.4g')}" for name, value in metrics.items())
    parts = [f"loss {_number(metrics['loss'], '.4f')}", f"accuracy {_number(metrics['accuracy'], '.3f')}"]
    if "learning_rate" in metrics:
        parts += [f"lr {_number(metrics['learning_rate'], '.2e')}", f"grad {_number(metrics['grad_norm'], '.3f')}"]
        parts += [f"{metrics['seconds_per_step']:.2f} s/step", f"{metrics['tokens_per_second']:,.0f} tok/s"]
    elif "tokens_processed" not in metrics:  # of a task's own
        others = {name: value for name, value in metrics.items() if name not in ("loss", "accuracy")}
        parts += [f"{name} {_number(value, '.4g')}" for name, value in others.items()]
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if (metrics.get("data_wait_fraction") or 0.0) > 0.1:
        parts.append(f"waits for data {metrics['data_wait_fraction']:.0%}")
    for name in LEFT_OUT_FIRST if width is not None else ():
        if len("  ".join(parts)) > (width or 0):
            parts = [part for part in parts if not part.startswith(name)]
    return "  ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
