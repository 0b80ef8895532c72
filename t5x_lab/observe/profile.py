"""A trace of some steps, for TensorBoard's or XProf's profile page."""

import importlib.util
import os
from collections.abc import Callable

import jax

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log

SKIPPED = 2  # steps that compile and warm up


def check_profiler() -> None:
    """Refuses to trace where JAX's profiler would take the process down."""
    if importlib.util.find_spec("libtpu") and not os.environ.get("JAX_PLATFORMS") and jax.default_backend() == "cpu":
        raise UserError(
            "PROFILE_STEPS would crash here: JAX's profiler also asks libtpu, which is installed, for the trace of a TPU that "
            "is not there. Set JAX_PLATFORMS=cpu in the environment."
        )


class Profiled:
    """A training step that traces its third to (2 + `steps`)th call into `directory`.

    Args:
      train_step: (state, batch) -> (state, metrics).
      directory: where `plugins/profile/…` is written.
      steps: how many.
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
        """Writes what was traced, where the run ended before its last traced step."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
        elif self._calls <= SKIPPED:
            log(f"PROFILE_STEPS wrote no trace: the run ended before its step {SKIPPED + 1}, the first to be traced.")
