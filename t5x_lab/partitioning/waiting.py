"""Timeouts for waiting for other processes, so that a run does not hang silently.

JAX's heartbeats detect a process that died, but not one that is alive and blocked, for example in a hook or by slow storage.
"""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

_limit_minutes = 30.0


def limit_waiting(minutes: float) -> None:
    """Sets the timeout of all `waiting_for` blocks of this process."""
    global _limit_minutes
    _limit_minutes = minutes


@contextlib.contextmanager
def waiting_for(event: str) -> Iterator[None]:
    """Exits this process if the block exceeds the timeout. A single process has no timeout."""
    if jax.process_count() == 1:
        yield
        return
    timer = threading.Timer(_limit_minutes * 60, _exit, (event,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fetch(tree: Any, event: str) -> Any:
    """Calls `jax.device_get` on values that all processes compute together."""
    with waiting_for(event):
        return jax.device_get(tree)


def _exit(event: str) -> None:
    faulthandler.dump_traceback(all_threads=True)
    print(
        f"t5x_lab: process {jax.process_index()} exits after waiting {_limit_minutes:g} minutes for {event}. Its stack is "
        "above; the logs of the other processes have theirs. Start all processes again with the same command to continue "
        "from the latest checkpoint. WAIT_MINUTES sets the timeout of training; other commands wait 30 minutes.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
