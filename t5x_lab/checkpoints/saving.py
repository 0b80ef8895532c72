"""When a run is saved, and what is done when storage fails for a while."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from t5x_lab.checkpoints.config import SaveCheckpointConfig
from t5x_lab.checkpoints.manager import Checkpoints
from t5x_lab.config.errors import UserError
from t5x_lab.partitioning.waiting import waiting_for
from t5x_lab.training.batches import Batches
from t5x_lab.training.state import TrainState

# Processes agree on the time by asking the first one, which costs a message between all of them.
STEPS_BETWEEN_AGREEMENTS = 10
_LONGEST_PAUSE = 60.0  # seconds


class SaveFailed(UserError):
    """A run could not be saved, for longer than it is allowed to go on like that."""

    status = 1  # the storage's fault, not the user's


@contextlib.contextmanager
def without_abandoned_writes() -> Iterator[None]:
    """Keeps off the console what writes say that a failed save has left behind; that it failed is said in a sentence.

    The first write that fails ends Orbax's event loop, to which TensorStore's other writes then report in vain.
    """
    before = sys.unraisablehook

    def tell(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = before


class Saver:
    """Saves a run when it is due, while it goes on.

    Alone, a process that cannot save trains on, tries again, and gives up after `SaveCheckpointConfig.retry_minutes`. One of
    several ends at once: the others would wait for it.

    Args:
      checkpoints: where to.
      config: when.
      batches: whose position is saved.
      notes: () -> what is written into a checkpoint's info.
      saved: called with a step, once its checkpoint is on disk.
      agree: makes the first process's bool everyone's.
      say: prints a line.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: SaveCheckpointConfig,
        batches: Batches,
        *,
        notes: Callable[[], Mapping[str, Any]] = dict,
        saved: Callable[[int], None] = lambda step: None,
        agree: Callable[[bool], int] = bool,
        log: Callable[[str], None] = print,
    ):
        self._checkpoints, self._config, self._batches = checkpoints, config, batches
        self._notes, self._saved, self._agree, self._say = notes, saved, agree, log
        self._alone = jax.process_count() == 1
        self._last: tuple[int, TrainState] | None = None  # of which it is not yet known that it is on disk
        self._announced: int | None = None
        self._under_way = False
        self._saved_at = time.monotonic()
        self._failing_since: float | None = None
        self._pause = 0.0
        self._next_try = 0.0

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved. All processes ask after every step, and get the same answer."""
        self._look()
        config = self._config
        if step % config.period == 0 or (config.keep_period and step % config.keep_period == 0):
            return True
        if self._failing_since is not None:
            return not self._under_way and time.monotonic() >= self._next_try
        if config.minutes is None:
            return False
        late = time.monotonic() - self._saved_at >= config.minutes * 60
        return late if self._alone else step % STEPS_BETWEEN_AGREEMENTS == 0 and bool(self._agree(late))

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving. A failure is announced and tried again later.

        Raises:
          SaveFailed: after the last try.
        """
        try:
            if self._under_way:
                self._wait()  # as saving would anyway
                self._succeeded()
            self._last = (step, state)
            self._start(step, state)
            self._saved_at, self._under_way = time.monotonic(), True
        except Exception as error:
            self._failed(error)

    def finish(self) -> None:
        """Returns when the state that was saved last is on disk; where that fails, it is tried again here.

        Raises:
          SaveFailed: after the last try.
        """
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

    def _start(self, step: int, state: TrainState) -> None:
        with waiting_for(f"the checkpoint of step {step} to be begun by all processes"):
            self._checkpoints.save(step, state, self._batches, self._notes())

    def _wait(self) -> None:
        with waiting_for("the checkpoint under way to be written by all processes"):
            self._checkpoints.wait()

    def _look(self) -> None:
        """Learns how the save under way ended, if it has."""
        if self._alone and self._under_way and not self._checkpoints.is_busy():
            try:
                self._checkpoints.wait()
                self._succeeded()
            except Exception as error:
                self._failed(error)

    def _succeeded(self) -> None:
        if self._failing_since is not None and self._last:
            self._say(f"Saving works again: step {self._last[0]} is saved.")
        if self._last and self._last[0] != self._announced:
            self._announced = self._last[0]
            self._saved(self._announced)
        self._last, self._under_way, self._failing_since, self._pause = None, False, None, 0.0

    def _failed(self, error: Exception, at_end: bool = False) -> None:
        now = time.monotonic()
        self._under_way = False
        step = self._last[0] if self._last else 0
        what = re.sub(r"\{\{.*?\}\}", "", str(error)).strip().partition("\n")[0]  # TensorFlow begins with a node's name
        reason = f"Step {step} could not be saved in {self._checkpoints.directory} ({type(error).__name__}: {what[:300]})."
        if not self._alone:
            raise SaveFailed(f"{reason} Make room or repair the storage, and start all processes again.") from error
        self._failing_since = now if self._failing_since is None else self._failing_since
        over = now - self._failing_since >= self._config.retry_minutes * 60
        if over and (at_end or self._config.on_failure == "stop"):
            raise SaveFailed(
                f"{reason} It was tried for {self._config.retry_minutes:g} minutes. Checkpoints made before are whole. Make "
                "room or repair the storage and run the same command again. To train on meanwhile, set "
                "--gin.SaveCheckpointConfig.on_failure=go_on or more --gin.SaveCheckpointConfig.retry_minutes."
            ) from error
        self._pause = min(max(2 * self._pause, 1.0), _LONGEST_PAUSE)
        self._next_try = now + self._pause
        self._say(f"{reason} Trying again in {self._pause:.0f} s.")
        try:
            self._checkpoints.forget_failure()
        except Exception as again:  # the directory cannot even be looked at; the next try says so again
            self._say(f"{type(again).__name__}: {str(again)[:300]}")
