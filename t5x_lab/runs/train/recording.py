"""Recording of training steps and evaluations."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from t5x_lab.config.log import log
from t5x_lab.config.object_storage import modified_at
from t5x_lab.config.user_code import describe_error
from t5x_lab.observe.end import ended_at
from t5x_lab.observe.hardware import peak_flops
from t5x_lab.observe.plots import write_plots
from t5x_lab.report.page import FILE, write_report
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.training.clock import Clock
from t5x_lab.training.hooks import Hooks
from t5x_lab.training.state import COUNTERS, TrainState, read_counter


class Recorder:
    """Adds totals, MFU and goodput to the metrics of steps and passes them to the hooks.

    Args:
      run: configuration of the run.
      state: initial state, whose counters are continued.
      clock: clock of the run.
      task_names: names of the tasks whose tokens are counted separately.
      step_flops: function that returns the FLOPs of a step on all devices.
      flops: FLOPs of earlier steps, on all devices.
      hooks: hooks that receive the metrics.

    Attributes:
      flops: FLOPs of all steps so far, on all devices.
    """

    def __init__(
        self,
        run: RunConfig,
        state: TrainState,
        clock: Clock,
        task_names: list[str],
        step_flops: Callable[[int], float],
        flops: float,
        hooks: Hooks,
    ):
        self._model_dir, self._hooks = run.model_dir, hooks
        self._clock, self._task_names = clock, task_names
        self._eval_period, self._last_step = run.eval_period, run.train_steps  # steps at which counts per task are recorded
        self._totals = {name: read_counter(state.counters[name]) for name in COUNTERS}
        self._by_task = [read_counter(counter) for counter in state.counters["task_tokens"]]
        self._step_flops, self.flops = step_flops, flops
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()

    def step(self, step: int, metrics: dict) -> None:
        """Records a training step's metrics."""
        for name in COUNTERS:
            self._totals[name] += metrics[name]
        for task, tokens in enumerate(metrics.pop("task_tokens")):
            self._by_task[task] += tokens
        self.flops += self._step_flops(step)
        speed = self._step_flops(step) / metrics["seconds_per_step"]
        goodput = self._clock.add(metrics["seconds_per_step"])
        metrics = {**metrics, **self._totals, "flops": self.flops, "mfu": speed / self._peak if self._peak else None}
        metrics |= {"goodput": goodput, "seconds": self._clock.seconds}
        if len(self._task_names) > 1 and (step % self._eval_period == 0 or step == self._last_step):
            by_task = zip(self._task_names, self._by_task, strict=True)
            metrics |= {f"tokens_processed/{name}": tokens for name, tokens in by_task}
        self._hooks.step(step, _finite(metrics))

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Records the metrics of an evaluation by split."""
        for split, metrics in results.items():
            self._hooks.evaluation(step, split, _finite(metrics))

    def media(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Records images, texts and audio of an evaluation."""
        self._hooks.media(step, split, values)

    def close(self) -> None:
        write_pictures(self._model_dir)


def write_pictures(model_dir: str) -> None:
    """Writes the plots and the report page."""
    if jax.process_index() == 0:
        for name, write in {"plots": write_plots, "report": _report}.items():
            try:
                write(model_dir)
            except Exception as error:  # the run is saved and must not fail because of a plot
                log(f"The {name} could not be written: {describe_error(error)}. Try t5x_lab report {model_dir}.")


def is_report_outdated(model_dir: str) -> bool:
    """Returns whether a run ended after its report was written, or has none: it was killed in between."""
    report = epath.Path(model_dir) / FILE
    return not report.exists() or modified_at(report) < (ended_at(model_dir) or 0.0)


def _report(model_dir: str) -> None:
    write_report([model_dir], is_over=True)


def _finite(metrics: Mapping) -> dict[str, float | None]:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in metrics.items()}
