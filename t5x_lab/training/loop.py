"""The training loop: dispatch a step, read the metrics of the one before, let actions look at the state when they are due."""

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
from t5x_lab.training.state import TrainState

Record = Callable[[int, dict[str, float]], None]


class Preempted(Exception):
    """The process was asked to end; the state is saved."""


class Diverged(Exception):
    """A step's loss or gradient was not finite; what was before it is saved, with the position in the data after it."""


@dataclasses.dataclass(frozen=True)
class Action:
    """`run(step, state)` after every step that is `due`, and after the last one.

    `at_stop` actions (the one that saves) also run when the loop ends early.
    """

    run: Callable[[int, TrainState], None]
    due: Callable[[int], bool]
    at_stop: bool = False


@dataclasses.dataclass
class Budget:
    """When training ends: after step number `steps`, or after the first step that brings tokens processed to `tokens`.

    Attributes:
      steps, tokens: counted from the run's beginning; infinite where the other one counts.
      processed: tokens so far.
      most_per_step: tokens that a batch can have.
    """

    steps: float = math.inf
    tokens: float = math.inf
    processed: int = 0
    most_per_step: int = 0

    def is_spent(self, step: int) -> bool:
        return step >= self.steps or self.processed >= self.tokens

    def may_be_spent(self, step: int) -> bool:
        """Whether it may be when the tokens of `step` are added, which are not known before the step is done."""
        return step >= self.steps or self.processed + self.most_per_step >= self.tokens


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
) -> TrainState:
    """Runs steps from `state.step` until the budget is spent.

    Args:
      state: donated to the steps; use the returned one.
      batches: where host batches come from.
      train_step: compiled (state, batch) -> (state, metrics).
      shard_batch: makes global arrays of this process's rows.
      budget: when to stop.
      record: called with every step's number and metrics, one step late, so that the host never waits for the device
        between two steps.
      actions: what happens between steps.
      bad_steps: how many steps in a row may be skipped because their loss or gradient was not finite; then
        `train_step` must be one that skips them.
      say: prints a line.

    Raises:
      Preempted: after SIGTERM, when the running step and the `at_stop` actions are done.
      Diverged: after a step that was not finite, or more than `bad_steps` in a row. The state is saved as it was before, but
        under the number of batches that were read, one or two more: going on from there does not read the same ones again.
    """
    pending: _Pending | None = None
    step = int(state.step)
    finished = _FinishedSteps(budget, record, actions, bad_steps, log)
    with _StopSignal() as stop:
        while not budget.is_spent(step):
            step += 1
            before = time.monotonic()
            with waiting_for(f"the data of step {step}"):
                batch = next(batches)
            wait = time.monotonic() - before
            state, metrics = train_step(state, shard_batch(batch))
            if pending:
                finished.record(pending, state, step)
            pending = _Pending(step, metrics, wait)
            due = [action for action in actions if action.due(step)]
            stopping = stop.reached(step)
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
      budget, record, actions, bad_steps, log: see `train`.

    Attributes:
      clock: time when the last step finished.
    """

    def __init__(self, budget: Budget, record: Record, actions: Sequence[Action], bad_steps: int, log: Callable[[str], None]):
        self._budget, self._record, self._actions = budget, record, actions
        self._allowed, self._bad, self._log = bad_steps, 0, log
        self.clock = time.monotonic()

    def record(self, pending: _Pending, state: TrainState, batches_read: int) -> None:
        """Waits for a step, records its metrics, and stops training if there were too many non-finite steps."""
        arrays = fetch(pending.metrics, f"step {pending.step}, which all processes do together")
        metrics = {name: value.tolist() for name, value in arrays.items()}
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
        if self._bad > self._allowed:
            # Where the step before is saved already, with the position before the bad batch, this is another checkpoint.
            counted = dataclasses.replace(state, step=state.step + (batches_read - int(state.step)))
            _save(batches_read, counted, self._actions)
            many = f"it is the last of {self._bad} in a row, none of which" if self._allowed else "it"
            raise Diverged(
                f"{bad}; {many} changed no parameter, and everything is saved as step {batches_read}. Running again goes on "
                "from there, with the batches that come next. A lower learning rate or a longer warm-up is the usual "
                "cure."
            )
        if not healthy:
            self._log(f"{bad}: it changed nothing, and training goes on (bad step {self._bad} of {self._allowed} in a row).")


def _save(step: int, state: TrainState, actions: Iterable[Action]) -> None:
    for action in actions:
        if action.at_stop:
            action.run(step, state)


class _StopSignal:
    """Turns SIGTERM (and the first Ctrl-C) into a request that the loop sees between two steps.

    Several processes must stop after the same step: there JAX's preemption service, which hears SIGTERM itself and agrees on
    one, is asked instead.
    """

    def __init__(self):
        self._requested = ""
        self._alone = jax.process_count() == 1

    def reached(self, step: int) -> str:
        """The signal that asks to stop after this step, or ""."""
        if self._alone:
            return self._requested
        return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else ""

    def __enter__(self):
        self._old = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,):
                self._old[number] = signal.signal(number, self._request)
        return self

    def _request(self, number, frame):
        del frame
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = signal.Signals(number).name
        if not self._alone:
            signal.raise_signal(signal.SIGTERM)  # which JAX, having taken it over, tells the other processes

    def __exit__(self, *unused):
        for number, handler in self._old.items():
            signal.signal(number, handler)
