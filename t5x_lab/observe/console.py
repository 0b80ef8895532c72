"""Console output: a progress bar on a terminal, a line per minute in a log, and all evaluations."""

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
    """Hook that shows training progress.

    Args:
      seconds_between_lines: minimum time between lines of a log. The first steps are always shown.
    """

    def __init__(self, seconds_between_lines: float = 60.0):
        self._seconds = seconds_between_lines
        self._terminal = sys.stderr.isatty() and _width() > 0  # the width of some terminals is unknown
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
            used = len(f"{step}/{self._bar.total} 100%|          | [{self._bar_times(step)}], ") + 1
            self._bar.set_postfix_str(describe(metrics, _width() - used), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        text, now = describe(metrics), time.monotonic()
        if self._shown < 3 or now - self._last >= self._seconds or step == self._total:
            self._last, self._shown = now, self._shown + 1
            remaining = ""  # unknown after the first step, which is mostly compilation
            if self._first and step <= self._total:  # the total is an estimate for a token budget
                first_step, start = self._first
                remaining = f"  {duration((now - start) / max(step - first_step, 1) * (self._total - step))} left"
            log(f"step {step}/{self._total}  {text}{remaining}")
        self._first = self._first or (step, now)

    def _bar_times(self, step: int) -> str:
        """Returns the elapsed and remaining time as shown by the bar."""
        elapsed = self._bar.format_dict["elapsed"]
        remaining = elapsed * (self._bar.total - step) / max(1, step - self._bar.initial)
        return f"{tqdm.tqdm.format_interval(elapsed)}<{tqdm.tqdm.format_interval(remaining)}"

    def on_end(self, error: BaseException | None) -> None:
        if self._total:
            self._bar.close()


BAR = "{n_fmt}/{total_fmt} {percentage:3.0f}%|{bar:10}| [{elapsed}<{remaining}]{postfix}"
DROPPED_FIRST = ("lr ", "grad ", "accuracy ", "waits ", "MFU ")  # dropped in this order if the terminal is narrow


def _width() -> int:
    """Returns the width of the terminal in characters; 0 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def describe(metrics: Mapping[str, float | None], width: int | None = None) -> str:
    """Formats the most important metrics, as many as fit into `width`, or all metrics of a task."""
    if not {"loss", "accuracy"} <= metrics.keys():
        return "  ".join(f"{name} {_number(value, '.4g')}" for name, value in metrics.items())
    parts = [f"loss {_number(metrics['loss'], '.4f')}", f"accuracy {_number(metrics['accuracy'], '.3f')}"]
    if "learning_rate" in metrics:
        parts += [f"lr {_number(metrics['learning_rate'], '.2e')}", f"grad {_number(metrics['grad_norm'], '.3f')}"]
        parts += [f"{metrics['seconds_per_step']:.2f} s/step", f"{metrics['tokens_per_second']:,.0f} tok/s"]
    elif "tokens_processed" not in metrics:  # metrics of a task
        others = {name: value for name, value in metrics.items() if name not in ("loss", "accuracy")}
        parts += [f"{name} {_number(value, '.4g')}" for name, value in others.items()]
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if (metrics.get("data_wait_fraction") or 0.0) > 0.1:
        parts.append(f"waits for data {metrics['data_wait_fraction']:.0%}")
    for name in DROPPED_FIRST if width is not None else ():
        if len("  ".join(parts)) > (width or 0):
            parts = [part for part in parts if not part.startswith(name)]
    return "  ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Formats a duration as "1h02m" or "3m04s"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
