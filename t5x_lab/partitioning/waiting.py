"""Timeouts for waiting for other processes, so that a run does not hang silently, and what each process is doing meanwhile.

JAX's heartbeats detect a process that died, but not one that is alive and blocked, for example in a hook or by slow storage.
Every process therefore reports to the coordinator where it is, and one that waits for long says where the others are.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from t5x_lab.config.log import log

_REPORTS = "t5x_lab/doing"  # folder of the coordinator's key-value store
SECONDS_BETWEEN_REPORTS = 5.0
_SILENCE = 3 * SECONDS_BETWEEN_REPORTS
_ANSWER_SECONDS = 5.0  # a coordinator that has died does not answer
_FIRST_WARNING = 60.0  # seconds of waiting after which the log says for whom

_limit_minutes = 30.0
_event: tuple[str, float] | None = None  # what this process waits for, and since when


def limit_waiting(minutes: float) -> None:
    """Sets the timeout of all `waiting_for` blocks of this process."""
    global _limit_minutes
    _limit_minutes = minutes


@contextlib.contextmanager
def waiting_for(event: str) -> Iterator[None]:
    """Exits this process if the block exceeds the timeout. A single process has no timeout."""
    global _event
    if jax.process_count() == 1:
        yield
        return
    limit = _limit_minutes * 60
    timers = [threading.Timer(limit, _exit, (event,)), threading.Timer(min(_FIRST_WARNING, limit / 2), _warn, (event,))]
    before, _event = _event, (event, time.time())
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        _event = before
        for timer in timers:
            timer.cancel()


def fetch(tree: Any, event: str) -> Any:
    """Calls `jax.device_get` on values that all processes compute together."""
    with waiting_for(event):
        return jax.device_get(tree)


def start_reports() -> None:
    """Reports every few seconds to the coordinator what this process does. Call it in the main thread.

    The first process also logs which of the others no longer report.
    """
    threading.Thread(target=_report, args=(threading.main_thread().ident,), name="reports", daemon=True).start()
    if jax.process_index() == 0:
        threading.Thread(target=_watch, name="watch", daemon=True).start()


def _report(thread: int) -> None:
    while True:
        waits, since = _event or ("", 0.0)
        report = {"at": time.time(), "waits": waits, "since": since, "line": _current_line(thread)}
        with contextlib.suppress(Exception):  # of a coordinator that has ended
            _coordinator().key_value_set(f"{_REPORTS}/{jax.process_index()}", json.dumps(report), allow_overwrite=True)
        time.sleep(SECONDS_BETWEEN_REPORTS)


def _watch() -> None:
    last: dict[int, tuple[dict[str, Any], float]] = {}  # reports, and when they were first read
    silent: set[int] = set()
    while True:
        time.sleep(SECONDS_BETWEEN_REPORTS)
        now, reports = time.monotonic(), dict[int, dict[str, Any]]()
        _read_reports(reports)
        for index, report in reports.items():
            if index not in last or last[index][0] != report:
                last[index] = report, now
                silent.discard(index)
            elif now - last[index][1] > _SILENCE and index not in silent:
                silent.add(index)
                log(_describe(index, report))


def _current_line(thread: int) -> str:
    """Returns the innermost line of a thread that is not of an installed package."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_back and ("site-packages" in frame.f_code.co_filename or "<" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_name} of {frame.f_code.co_filename}, line {frame.f_lineno}" if frame else ""


def describe_others() -> str:
    """Returns a sentence for each other process: what it waits for, or the line of code where it is, and since when."""
    reports: dict[int, dict[str, Any]] = {}
    reader = threading.Thread(target=_read_reports, args=(reports,), daemon=True)
    reader.start()
    reader.join(_ANSWER_SECONDS)
    others = [index for index in range(jax.process_count()) if index != jax.process_index()]
    return " ".join(_describe(index, reports.get(index)) for index in others)


def _read_reports(reports: dict[int, dict[str, Any]]) -> None:
    with contextlib.suppress(Exception):  # of a coordinator that has ended
        for key, value in _coordinator().key_value_dir_get(f"{_REPORTS}/"):
            reports[int(key.rpartition("/")[2])] = json.loads(value)


def _coordinator() -> Any:
    return distributed.global_state.client


def _describe(index: int, report: dict[str, Any] | None) -> str:
    if report is None:
        return f"Process {index} has sent no report."
    where = f"in {report['line']}"
    if report["waits"]:
        where = f"waiting for {report['waits']} since {report['at'] - report['since']:.0f} s, {where}"
    silence = time.time() - report["at"]
    if silence > _SILENCE:
        return f"Process {index} has sent no report for {silence:.0f} s. Then it was {where}."
    return f"Process {index} is {where}."


def _warn(event: str) -> None:
    log(f"Process {jax.process_index()} has waited {_FIRST_WARNING:.0f} s for {event}. {describe_others()}")


def _exit(event: str) -> None:
    others = describe_others()
    faulthandler.dump_traceback(all_threads=True)
    print(
        f"t5x_lab: process {jax.process_index()} exits after waiting {_limit_minutes:g} minutes for {event}. Its stack is "
        f"above; the logs of the other processes have theirs. {others} Start all processes again with the same command to "
        "continue from the latest checkpoint. WAIT_MINUTES sets the timeout of training; other commands wait 30 minutes.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
