"""`Saver`: saves a run when it is due, and retries when storage fails."""

import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from t5x_lab.checkpoints.config import SaveCheckpointConfig
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.config.errors import UserError
from t5x_lab.config.object_storage import is_permanent
from t5x_lab.partitioning.waiting import waiting_for
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

# Agreeing on the time needs a broadcast between all processes.
STEPS_BETWEEN_AGREEMENTS = 10
_MAX_PAUSE = 60.0  # seconds

_GO_ON = " To train without saving meanwhile, set --gin.SaveCheckpointConfig.on_failure=go_on."


class SaveFailed(UserError):
    """A run could not be saved, and retrying has ended or does not help."""

    status = 1  # a storage failure, not a user error


@contextlib.contextmanager
def suppress_event_loop_errors() -> Iterator[None]:
    """Suppresses "Event loop is closed" messages after a failed save, which is reported separately.

    The first failed write ends Orbax's event loop; TensorStore's other writes then report to it in vain.
    """
    original = sys.unraisablehook

    def report(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            original(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = original


class Saver:
    """Saves a run when it is due, asynchronously.

    A single process that cannot save continues training, retries, and raises after `SaveCheckpointConfig.retry_minutes`. One of
    several processes raises at once, because the others would wait for it.

    Args:
      checkpoints: checkpoints of the run.
      config: when to save.
      batches: batches whose position is saved.
      notes: function that returns additional info of a checkpoint.
      saving, saved: functions called with the step of each checkpoint before it is written, and when it is on disk.
      agree: function that returns the first process's bool in all processes.
      log: function that logs a line.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: SaveCheckpointConfig,
        batches: Batches,
        *,
        notes: Callable[[], Mapping[str, Any]] = dict,
        saving: Callable[[int], None] = lambda step: None,
        saved: Callable[[int], None] = lambda step: None,
        agree: Callable[[bool], int] = bool,
        log: Callable[[str], None] = print,
    ):
        self._checkpoints, self._config, self._batches = checkpoints, config, batches
        self._notes, self._saving, self._saved, self._agree, self._log = notes, saving, saved, agree, log
        self._is_single = jax.process_count() == 1
        self._last: tuple[int, TrainState] | None = None  # state that may not be on disk yet
        self._reported: int | None = None
        self._is_saving = False
        self._saved_at = time.monotonic()
        self._failing_since: float | None = None
        self._give_up_at = math.inf
        self._pause = 0.0
        self._next_try = 0.0

    def due(self, step: int) -> bool:
        """Returns whether to save the state after `step`, the same in all processes. Called after every step."""
        self._poll()
        config = self._config
        if step % config.period == 0 or (config.keep_period and step % config.keep_period == 0):
            return True
        if self._failing_since is not None:
            return not self._is_saving and time.monotonic() >= self._next_try
        if config.minutes is None:
            return False
        is_late = time.monotonic() - self._saved_at >= config.minutes * 60
        return is_late if self._is_single else step % STEPS_BETWEEN_AGREEMENTS == 0 and bool(self._agree(is_late))

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving. A failure is logged and retried later.

        Raises:
          SaveFailed: after the last retry.
        """
        if self._is_saving:
            try:
                self._wait()  # Orbax waits for the previous save, too
                self._succeeded()
            except Exception as error:
                self._failed(error)
        try:
            self._last = (step, state)
            self._saving(step)
            self._start(step, state)
            self._saved_at, self._is_saving = time.monotonic(), True
        except Exception as error:
            self._failed(error)

    def finish(self, seconds: float | None = None) -> None:
        """Waits until the last saved state is on disk, and retries if that fails.

        Args:
          seconds: time of retrying. None = `SaveCheckpointConfig.retry_minutes`.

        Raises:
          SaveFailed: after the last retry.
        """
        if seconds is not None:
            self._give_up_at = time.monotonic() + seconds
        while self._last:
            step, state = self._last
            try:
                self._wait()
                self._start(step, state)
                self._wait()
                self._succeeded()
            except Exception as error:
                self._failed(error, at_end=True)
                time.sleep(self._pause)

    def _advice(self) -> str:
        """Returns the settings that would have gone on."""
        if self._give_up_at < math.inf:
            return " After SIGTERM, SaveCheckpointConfig.grace_seconds limits the retries."
        return f"{_GO_ON} Or increase --gin.SaveCheckpointConfig.retry_minutes."

    def _start(self, step: int, state: TrainState) -> None:
        with waiting_for(f"all processes to start the checkpoint of step {step}"):
            self._checkpoints.save(step, state, self._batches, self._notes())

    def _wait(self) -> None:
        with waiting_for("all processes to write the checkpoint"):
            self._checkpoints.wait()

    def _poll(self) -> None:
        """Handles the result of the current save, if it has finished."""
        if self._is_single and self._is_saving and not self._checkpoints.is_busy():
            try:
                self._checkpoints.wait()
                self._succeeded()
            except Exception as error:
                self._failed(error)

    def _succeeded(self) -> None:
        if self._failing_since is not None and self._last:
            self._log(f"Saving works again: step {self._last[0]} is saved.")
        if self._last and self._last[0] != self._reported:
            self._reported = self._last[0]
            self._saved(self._reported)
        self._last, self._is_saving, self._failing_since, self._pause = None, False, None, 0.0

    def _failed(self, error: Exception, at_end: bool = False) -> None:
        now = time.monotonic()
        self._is_saving = False
        step = self._last[0] if self._last else 0
        message = re.sub(r"\{\{.*?\}\}", "", str(error)).strip().partition("\n")[0]  # TensorFlow starts with the name of a node
        reason = f"Step {step} could not be saved in {self._checkpoints.directory} ({type(error).__name__}: {message[:300]})."
        if not self._is_single:
            raise SaveFailed(f"{reason} Free disk space or repair the storage, and start all processes again.") from error
        may_stop = at_end or self._config.on_failure == "stop"
        if may_stop and is_permanent(error):
            raise SaveFailed(
                f"{reason} Retrying does not help. Earlier checkpoints are intact. Correct MODEL_DIR or the permissions, and "
                f"run the same command again.{_GO_ON if self._config.on_failure == 'stop' else ''}"
            ) from error
        self._failing_since = now if self._failing_since is None else self._failing_since
        end = min(self._failing_since + self._config.retry_minutes * 60, self._give_up_at)
        if may_stop and now >= end:
            raise SaveFailed(
                f"{reason} Saving was retried for {(now - self._failing_since) / 60:.3g} minutes. Earlier checkpoints are "
                f"intact. Free disk space or repair the storage, and run the same command again.{self._advice()}"
            ) from error
        self._pause = min(max(2 * self._pause, 1.0), _MAX_PAUSE, max(self._give_up_at - now, 0.0))
        self._next_try = now + self._pause
        self._log(f"{reason} Retrying in {self._pause:.0f} s.")
        try:
            self._checkpoints.recover()
        except Exception as recovery_error:  # the directory is not accessible; the next retry reports it again
            self._log(f"{type(recovery_error).__name__}: {str(recovery_error)[:300]}")
