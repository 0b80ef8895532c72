"""Profiler traces of training steps, for TensorBoard or XProf."""

import importlib.util
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import describe_problem, is_object_storage
from t5x_lab.config.temporary import copy_files, make_temporary_folder

SKIPPED = 2  # compilation and warm-up steps
STEPS_ON_REQUEST = 5  # without PROFILE_STEPS


def check_profiler() -> None:
    """Raises a `UserError` if JAX's profiler would crash the process."""
    if importlib.util.find_spec("libtpu") and not os.environ.get("JAX_PLATFORMS") and jax.default_backend() == "cpu":
        raise UserError(
            "Steps cannot be traced here: libtpu is installed, so JAX's profiler would crash looking for a TPU. Set "
            "JAX_PLATFORMS=cpu in the environment."
        )


class Profiled:
    """Wraps a training step and traces calls of it: from the third on, and whenever the process receives SIGUSR1.

    Used as a context, in the main thread. Each process traces its own devices.

    Args:
      train_step: function (state, batch) -> (state, metrics).
      directory: directory for `plugins/profile/`.
      steps: number of steps to trace from the third on. 0 = only on request.
    """

    def __init__(self, train_step: Callable, directory: str, steps: int):
        self._train_step, self._directory, self._steps = train_step, directory, steps
        self._local = directory
        self._calls = 0
        self._last: int | None = None  # call after which the trace is written, while there is one
        self._is_requested = False
        self._old_handler: Any = None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGUSR1, self._request)
        return self

    def _request(self, number, frame):
        del number, frame
        self._is_requested = True

    def __call__(self, state, batch):
        is_planned = self._steps > 0 and self._calls == SKIPPED
        if is_planned or (self._is_requested and self._calls >= SKIPPED):
            self._start(state)
        self._calls += 1
        if self._last is None:
            return self._train_step(state, batch)
        with jax.profiler.StepTraceAnnotation("train", step_num=self._calls):
            state, metrics = self._train_step(state, batch)
        if self._calls >= self._last:
            jax.block_until_ready(state)
            self._write()
        return state, metrics

    def _start(self, state) -> None:
        was_requested, self._is_requested = self._is_requested, False
        if self._last is not None:
            return  # a trace is being taken
        steps = self._steps or STEPS_ON_REQUEST
        if was_requested:
            try:
                check_profiler()
            except UserError as error:
                log(error.sentence)
                return
            log(f"SIGUSR1: tracing {steps} steps into {self._directory}.")
        jax.block_until_ready(state)
        self._local = str(make_temporary_folder()) if is_object_storage(self._directory) else self._directory
        jax.profiler.start_trace(self._local)
        self._last = self._calls + steps

    def _write(self) -> None:
        jax.profiler.stop_trace()
        self._last = None
        if self._local != self._directory:
            try:
                copy_files(pathlib.Path(self._local), epath.Path(self._directory))
            except Exception as error:  # training goes on
                log(f"The trace could not be copied: {describe_problem(error) or error}")
            shutil.rmtree(self._local, ignore_errors=True)

    def __exit__(self, *unused):
        """Writes the trace if the run ended before the last traced step."""
        if self._old_handler is not None:
            signal.signal(signal.SIGUSR1, self._old_handler)
        if self._last is not None:
            self._write()
        elif self._steps and self._calls <= SKIPPED:
            log(f"No trace was written: the run ended before step {SKIPPED + 1}, the first that PROFILE_STEPS traces.")
