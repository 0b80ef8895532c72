"""Progress on the console: a bar on a terminal, a line a minute in a log."""

import contextlib
import sys
import time
from collections.abc import Mapping

import tqdm


class Progress:
    """Shows how far training is.

    Args:
      start, total: first and last step.
      seconds_between_lines: in a log; the first steps are always shown, so that one sees that it runs.
    """

    def __init__(self, start: int, total: int, seconds_between_lines: float = 60.0):
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(initial=start, total=total, unit="step", disable=not self._terminal)
        self._total, self._seconds = total, seconds_between_lines
        self._last, self._shown = 0.0, 0
        self._first: tuple[int, float] | None = None

    def show(self, step: int, metrics: Mapping[str, float | None]) -> None:
        text = describe(metrics)
        if self._terminal:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._shown < 3 or now - self._last >= self._seconds or step == self._total:
            self._last, self._shown = now, self._shown + 1
            left = ""  # unknown at first: a run's first step is mostly compilation
            if self._first:
                done, began = self._first
                left = f"  {_duration((now - began) / max(step - done, 1) * (self._total - step))} left"
            say(f"step {step}/{self._total}  {text}{left}")
        self._first = self._first or (step, now)

    def close(self) -> None:
        self._bar.close()


def describe(metrics: Mapping[str, float | None]) -> str:
    """The numbers worth reading at a glance; of a task's own metrics, all."""
    if not {"loss", "accuracy"} <= metrics.keys():
        return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    parts = [f"loss {metrics['loss']:.4f}", f"accuracy {metrics['accuracy']:.3f}"]
    if "learning_rate" in metrics:
        parts += [f"lr {metrics['learning_rate']:.2e}", f"grad {metrics['grad_norm']:.3f}"]
        parts += [f"{metrics['seconds_per_step']:.2f} s/step", f"{metrics['tokens_per_second']:,.0f} tok/s"]
    if metrics.get("mfu") is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if (metrics.get("data_wait_fraction") or 0.0) > 0.1:
        parts.append(f"waits for data {metrics['data_wait_fraction']:.0%}")
    return "  ".join(parts)


def say(text: str) -> None:
    """One line to stderr, under the progress bar if there is one. A log on a full disk stops nothing."""
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
