"""The training loop: dispatches a step, reads the metrics of the previous one, and runs actions that are due."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.experimental import multihost_utils

from t5x_lab.partitioning.waiting import fetch, waiting_for
from t5x_lab.training.batches import Batches, HostBatch
from t5x_lab.training.clock import StartUp
from t5x_lab.training.state import TrainState

Record = Callable[[int, dict[str, float]], None]


class Preempted(Exception):
    """The process was asked to stop. The state is saved."""


class Diverged(Exception):
    """A loss, gradient or update was not finite. The state before it is saved, with the data position after it."""


@dataclasses.dataclass(frozen=True)
class Action:
    """Calls `run(step, state)` after every step that is `due`, and after the last one.

    Actions with `at_stop`, such as saving, also run when the loop ends early.
    """

    run: Callable[[int, TrainState], None]
    due: Callable[[int], bool]
    at_stop: bool = False


@dataclasses.dataclass
class Budget:
    """Length of training: until step number `steps`, or until `tokens` tokens are processed.

    Attributes:
      steps, tokens: limits counted from the start of the run. Infinite = no limit.
      processed: tokens processed so far.
      max_tokens: function that returns the maximum number of tokens of a step's batch.
    """

    steps: float = math.inf
    tokens: float = math.inf
    processed: int = 0
    max_tokens: Callable[[int], int] = lambda step: 0

    def is_spent(self, step: int) -> bool:
        return step >= self.steps or self.processed >= self.tokens

    def may_be_spent(self, step: int) -> bool:
        """Returns whether the budget may be spent after `step`, whose tokens are not known before it finishes."""
        return step >= self.steps or self.processed + self.max_tokens(step) >= self.tokens


def train(
    state: TrainState,
    batches: Batches,
    train_step: Callable,
    *,
    shard_batch: Callable[[HostBatch], dict[str, jax.Array]],
    budget: Budget,
    record: Record,
    actions: Sequence[Action] = (),
    bad_steps: int = 0,
    log: Callable[[str], None] = print,
    start_up: StartUp | None = None,
    max_minutes: float | None = None,
) -> TrainState:
    """Runs steps from `state.step` until the budget is spent.

    Args:
      state: initial state. It is donated; use the returned one.
      batches: iterator of host batches.
      train_step: compiled function (state, batch) -> (state, metrics).
      shard_batch: function that makes global arrays from this process's rows.
      budget: length of training.
      record: function (step, metrics), called one step late, so that the host does not wait for the device between steps.
      actions: actions between steps.
      bad_steps: number of consecutive non-finite steps that are skipped. `train_step` must skip them.
      log: function that logs a line.
      start_up: times of what came before.
      max_minutes: minutes since the command began, after which training stops as after SIGTERM. None = no limit.

    Raises:
      Preempted: after SIGTERM or `max_minutes`, when the current step and the `at_stop` actions are done.
      Diverged: after more than `bad_steps` consecutive non-finite steps. The state before them is saved under the number of
        batches read, so that a continued run reads new batches.
    """
    pending: _Pending | None = None
    start_up = start_up or StartUp()
    step = int(state.step)
    first_step = step + 1
    finished = _FinishedSteps(budget, record, actions, bad_steps, log, start_up)
    start_up.finish("hooks")
    with _StopSignal(None if max_minutes is None else 60 * max_minutes - start_up.seconds) as stop:
        while not budget.is_spent(step):
            step += 1
            is_first = step == first_step
            if is_first:
                log("Reading the first batch.")
            before = time.monotonic()
            with waiting_for(f"the data of step {step}", is_of_others=False):
                batch = next(batches)
            wait = time.monotonic() - before
            if is_first:
                start_up.finish("first batch")
                log(f"The first batch was read in {wait:.1f} s. Compiling the training step.")
            state, metrics = train_step(state, shard_batch(batch))
            if is_first:
                log(f"The training step was compiled in {start_up.finish('compilation'):.1f} s.")
            if pending:
                finished.record(pending, state, step)
            pending = _Pending(step, metrics, wait)
            due = [action for action in actions if action.due(step)]
            stopping = stop.reached(step - first_step)
            if due or stopping or budget.may_be_spent(step):
                finished.record(pending, state, step)
                pending = None
                if budget.is_spent(step):
                    due = list(actions)
            for action in due:
                action.run(step, state)
            if due and budget.is_spent(step):  # an action may have ended it
                for action in (action for action in actions if action not in due):
                    action.run(step, state)
            if due:
                finished.clock = time.monotonic()
            if stopping:
                _save(step, state, (action for action in actions if action not in due))
                raise Preempted(f"stopped by {stopping} after step {step}; everything is saved")
    return state


@dataclasses.dataclass(frozen=True)
class _Pending:
    step: int
    metrics: dict[str, jax.Array]
    data_wait: float


class _FinishedSteps:
    """Records the metrics of finished steps and stops training after too many bad ones.

    Args:
      budget, record, actions, bad_steps, log, start_up: see `train`.

    Attributes:
      clock: time when the last step finished.
    """

    def __init__(
        self,
        budget: Budget,
        record: Record,
        actions: Sequence[Action],
        bad_steps: int,
        log: Callable[[str], None],
        start_up: StartUp,
    ):
        self._start_up: StartUp | None = start_up
        self._budget, self._record, self._actions = budget, record, actions
        self._allowed, self._bad, self._log = bad_steps, 0, log
        self.clock = time.monotonic()

    def record(self, pending: _Pending, state: TrainState, batches_read: int) -> None:
        """Waits for a step, records its metrics, and stops training if there were too many non-finite steps."""
        arrays = fetch(pending.metrics, f"step {pending.step}, which all processes do together")
        metrics = {name: value.tolist() for name, value in arrays.items()}
        if self._start_up:
            self._start_up.finish("step")
            self._log(str(self._start_up))
            self._start_up = None
        now = time.monotonic()
        seconds, self.clock = max(now - self.clock, 1e-9), now
        healthy = metrics.pop("healthy")
        self._bad = 0 if healthy else self._bad + 1
        self._budget.processed += metrics["tokens_processed"] if healthy or self._allowed else 0
        self._record(
            pending.step,
            {
                **metrics,
                "seconds_per_step": seconds,
                "tokens_per_second": metrics["tokens_processed"] / seconds,
                "data_wait_fraction": min(pending.data_wait / seconds, 1.0),
            },
        )
        bad = f"step {pending.step} had loss {metrics['loss']} and gradient norm {metrics['grad_norm']}"
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            bad += ", but an update that is not finite"
        if self._bad > self._allowed:
            # Saved under the number of batches read: the checkpoint of the step before has the position before the bad batch.
            counted = dataclasses.replace(state, step=state.step + (batches_read - int(state.step)))
            _save(batches_read, counted, self._actions)
            subject = f"it is the last of {self._bad} in a row, none of which" if self._allowed else "it"
            raise Diverged(
                f"{bad}; {subject} changed any parameter. The state is saved as step {batches_read}. The same command "
                "continues from there with the next batches. Try a lower learning rate or a longer warm-up."
            )
        if not healthy:
            self._log(f"{bad}. It is skipped (bad step {self._bad} of at most {self._allowed} in a row).")


def _save(step: int, state: TrainState, actions: Iterable[Action]) -> None:
    for action in actions:
        if action.at_stop:
            action.run(step, state)


class _StopSignal:
    """Turns SIGTERM, the first Ctrl-C and the end of a time limit into a request to stop between two steps.

    Several processes must stop after the same step. For them JAX's preemption service handles SIGTERM and agrees on the step
    after the last that a process has named. Steps are counted from the start of the process: a service that has heard of none
    agrees on step 1.

    Args:
      seconds: the time limit. The first step may last longer. None = no limit.
    """

    def __init__(self, seconds: float | None = None):
        self._requested = ""
        self._is_single = jax.process_count() == 1
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds

    def reached(self, steps_before: int) -> str:
        """Returns what requests a stop after this step of the process, or ""."""
        if time.monotonic() >= self._deadline and not self._requested:
            self._requested = "MAX_MINUTES"
            if not self._is_single and jax.process_index() == 0:
                signal.raise_signal(signal.SIGTERM)  # as in `_request`
        if self._is_single:
            return self._requested
        return self._requested or "SIGTERM" if multihost_utils.reached_preemption_sync_point(steps_before) else ""

    def __enter__(self):
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT) if self._is_single else (signal.SIGINT,):
                self._old[number] = signal.signal(number, self._request)
        return self

    def _request(self, number, frame):
        del frame
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = signal.Signals(number).name
        if not self._is_single:
            signal.raise_signal(signal.SIGTERM)  # JAX handles it and informs the other processes

    def __exit__(self, *unused):
        for number, handler in self._old.items():
            signal.signal(number, handler)
