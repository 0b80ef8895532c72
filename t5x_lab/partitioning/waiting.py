"""No process of several waits for the others for ever: what takes too long is said, and the process ends.

A process that died is found by JAX's heartbeats. One that lives and does something else is not: it sleeps in a hook of its own,
reads from storage that does not answer, or runs another program than the others. Those wait for it without a word.
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
    """Sets the limit of all `waiting_for` blocks of this process."""
    global _limit_minutes
    _limit_minutes = minutes


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Ends this process, one of several, when the block takes longer than the limit; a process that is alone may wait."""
    if jax.process_count() == 1:
        yield
        return
    timer = threading.Timer(_limit_minutes * 60, _give_up, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fetch(tree: Any, what: str) -> Any:
    """`jax.device_get` of what all processes compute together."""
    with waiting_for(what):
        return jax.device_get(tree)


def _give_up(what: str) -> None:
    faulthandler.dump_traceback(all_threads=True)
    print(
        f"t5x_lab: process {jax.process_index()} has waited for {what} for {_limit_minutes:g} minutes, and ends. Above is "
        "where it stands; the logs of the other processes say where they do. Start all processes again with the same command: "
        "a run goes on from its latest checkpoint. WAIT_MINUTES is the limit of training, and 30 minutes that of the rest.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
