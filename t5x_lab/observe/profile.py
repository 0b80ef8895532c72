"""Profiler traces of training steps, for TensorBoard or XProf."""

import importlib.util
import os
from collections.abc import Callable

import jax

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log

SKIPPED = 2  # compilation and warm-up steps


def check_profiler() -> None:
    """Raises a `UserError` if JAX's profiler would crash the process."""
    if importlib.util.find_spec("libtpu") and not os.environ.get("JAX_PLATFORMS") and jax.default_backend() == "cpu":
        raise UserError(
            "PROFILE_STEPS does not work here: libtpu is installed, so JAX's profiler would crash looking for a TPU. Set "
            "JAX_PLATFORMS=cpu in the environment."
        )


class Profiled:
    """Wraps a training step and traces `steps` calls, from the third on.

    Args:
      train_step: function (state, batch) -> (state, metrics).
      directory: directory for `plugins/profile/`.
      steps: number of steps to trace.
    """

    def __init__(self, train_step: Callable, directory: str, steps: int):
        self._train_step, self._directory, self._last = train_step, directory, SKIPPED + steps
        self._calls = 0
        self._tracing = False

    def __call__(self, state, batch):
        if self._calls == SKIPPED:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory)
            self._tracing = True
        self._calls += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=self._calls):
            state, metrics = self._train_step(state, batch)
        if self._calls == self._last:
            jax.block_until_ready(state)
            self.close()
        return state, metrics

    def close(self) -> None:
        """Writes the trace if the run ended before the last traced step."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
        elif self._calls <= SKIPPED:
            log(f"No trace was written: the run ended before step {SKIPPED + 1}, the first that PROFILE_STEPS traces.")
