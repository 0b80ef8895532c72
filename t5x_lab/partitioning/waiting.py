"""Timeouts for waiting for other processes, so that a run does not hang silently, and what each process is doing meanwhile.

JAX's heartbeats detect a process that died, but not one that is alive and blocked, for example in a hook or by slow storage.
Every process therefore reports to the coordinator where it is, and one that waits for long says where the others are. The first
process also compares for how long each of them waits: the others wait for one that is slow.
"""

import atexit
import collections
import contextlib
import faulthandler
import itertools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed

from t5x_lab.config.log import log
from t5x_lab.config.user_code import is_user_file

_REPORTS = "t5x_lab/doing"  # folder of the coordinator's key-value store
SECONDS_BETWEEN_REPORTS = 5.0
_SILENCE = 3 * SECONDS_BETWEEN_REPORTS
_ANSWER_SECONDS = 5.0  # a coordinator that has died does not answer
_LAST = -1  # number of the report of a process that ends
_MOST_NAMED = 10  # processes in a sentence
_PACKAGE = str(pathlib.Path(__file__).parents[1])
_FIRST_WARNING = 60.0  # seconds of waiting after which the log says for whom

_COMPARED_SECONDS = 60.0  # over which waiting times are compared
_SLOW_SHARE = 0.25  # of these seconds that others wait more than a slow process

_limit_minutes = 30.0
_has_ended = threading.Event()
_event = ""  # what this process waits for
_since: float | None = None  # when it began to wait for other processes
_waited = 0.0  # seconds that it waited for them before


def limit_waiting(minutes: float) -> None:
    """Sets the timeout of all `waiting_for` blocks of this process."""
    global _limit_minutes
    _limit_minutes = minutes


@contextlib.contextmanager
def waiting_for(event: str, is_of_others: bool = True) -> Iterator[None]:
    """Exits this process if the block exceeds the timeout. A single process has no timeout.

    Args:
      event: the event, for messages.
      is_of_others: whether other processes take part in it.
    """
    global _event, _since, _waited
    if jax.process_count() == 1:
        yield
        return
    is_over = threading.Event()
    first = min(_FIRST_WARNING, _limit_minutes * 30)  # seconds
    timer = threading.Timer(first, _warn_and_exit, (event, first, is_over))
    timer.daemon = True
    before, _event = _event, event
    is_counted = is_of_others and _since is None  # not inside another wait
    if is_counted:
        _since = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        _event = before
        if is_counted and _since is not None:
            _waited, _since = _waited + time.monotonic() - _since, None
        is_over.set()
        timer.cancel()


def fetch(tree: Any, event: str) -> Any:
    """Calls `jax.device_get` on values that all processes compute together."""
    with waiting_for(event):
        return jax.device_get(tree)


def start_reports() -> None:
    """Reports every few seconds to the coordinator what this process does. Call it in the main thread.

    The first process also logs which of the others no longer report, and which the others wait for.
    """
    threads = [threading.Thread(target=_report, args=(threading.main_thread().ident,), name="reports", daemon=True)]
    if jax.process_index() == 0:
        threads.append(threading.Thread(target=_watch, name="watch", daemon=True))
    for thread in threads:
        thread.start()
    atexit.register(_end_reports, threads)  # before JAX's own end, which deletes the connection


def _end_reports(threads: Sequence[threading.Thread]) -> None:
    _has_ended.set()
    for thread in threads:
        thread.join(_ANSWER_SECONDS)


def _report(thread: int) -> None:
    for number in itertools.count():
        since = _since
        waited = _waited + (0.0 if since is None else time.monotonic() - since)
        is_busy = since is None
        _send({"number": number, "waits": _event, "line": _current_line(thread), "waited": waited, "is_busy": is_busy})
        if _has_ended.wait(SECONDS_BETWEEN_REPORTS):
            _send({"number": _LAST, "waits": "the end of the others", "line": ""})
            return


def _send(report: Mapping[str, Any]) -> None:
    with contextlib.suppress(Exception):  # of a coordinator that has ended
        _coordinator().key_value_set(f"{_REPORTS}/{jax.process_index()}", json.dumps(report), allow_overwrite=True)


def _watch() -> None:
    last: dict[int, tuple[int, float]] = {}  # numbers of reports, and when they were first read
    silent: set[int] = set()
    speeds = _Speeds()
    while not _has_ended.wait(SECONDS_BETWEEN_REPORTS):
        now, reports = time.monotonic(), _read_reports()
        for index, report in reports.items():
            if index not in last or last[index][0] != report["number"]:
                last[index] = report["number"], now
                silent.discard(index)
            elif report["number"] != _LAST and now - last[index][1] > _SILENCE and index not in silent:
                silent.add(index)
                log(f"Process {index} has sent no report for {now - last[index][1]:.0f} s. It was {_describe(report)}.")
        if message := speeds.compare(now, reports):
            log(message)


class _Speeds:
    """Waiting times of all processes over the last minute. The process that the others wait for waits least."""

    def __init__(self) -> None:
        self._before: collections.deque[tuple[float, dict[int, dict[str, Any]]]] = collections.deque()
        self._slow: list[int] = []

    def compare(self, now: float, reports: dict[int, dict[str, Any]]) -> str:
        """Returns a sentence when other processes than before are slow, "" otherwise.

        Args:
          now: time in seconds.
          reports: the latest reports.
        """
        self._before.append((now, reports))
        while len(self._before) > 1 and now - self._before[1][0] >= _COMPARED_SECONDS:
            self._before.popleft()
        began, first = self._before[0]
        if now - began < _COMPARED_SECONDS:
            return ""
        waited = {index: report["waited"] - first[index]["waited"] for index, report in reports.items() if index in first}
        slow = find_slow(waited, now - began)
        is_new, self._slow = slow != self._slow, slow
        if not slow or not is_new:
            return ""
        places = collections.Counter(
            _describe(report) for _, before in self._before for index, report in before.items()
            if index in slow and report["is_busy"]
        )  # fmt: skip
        place = f" Most often it was {places.most_common(1)[0][0]}." if places else ""
        return (
            f"Process {_join(slow)} slows the others: of the last {now - began:.0f} s it waited {waited[slow[0]]:.0f} s for "
            f"them, and they waited up to {max(waited.values()):.0f} s.{place}"
        )


def find_slow(waited: Mapping[int, float], seconds: float) -> list[int]:
    """Returns the processes that waited much less than the others, unless most did.

    Args:
      waited: seconds of waiting by process.
      seconds: seconds in which they waited.
    """
    most = max(waited.values(), default=0.0)
    slow = [index for index, own in sorted(waited.items()) if most - own > _SLOW_SHARE * seconds]
    return slow if 2 * len(slow) <= len(waited) else []


def _current_line(thread: int) -> str:
    """Returns the innermost line of a thread that is of a user's file, or else of this package."""
    frame, lines = sys._current_frames().get(thread), list[tuple[str, str]]()
    while frame:
        file = frame.f_code.co_filename
        lines.append((file, f"{frame.f_code.co_name} of {file}, line {frame.f_lineno}"))
        frame = frame.f_back
    for is_chosen in (is_user_file, lambda file: file.startswith(_PACKAGE)):
        for file, line in lines:
            if is_chosen(file):
                return line
    return lines[0][1] if lines else "no code"


def describe_others() -> str:
    """Returns sentences on the other processes: what they wait for, or the line of code where they are.

    Reads their reports twice, with time for another report in between, to see which of them no longer report.
    """
    before = _read_reports()
    time.sleep(SECONDS_BETWEEN_REPORTS + 1)
    reports = _read_reports()
    states: dict[str, list[int]] = {}
    for index in range(jax.process_count()):
        report = reports.get(index)
        if index == jax.process_index():
            continue
        if report is None:
            state = "sent no report"
        elif before.get(index, {}).get("number") == report["number"] != _LAST:
            state = f"no longer reports; it was {_describe(report)}"
        else:
            state = f"is {_describe(report)}"
        states.setdefault(state, []).append(index)
    return " ".join(f"Process {_join(indices)} {state}." for state, indices in states.items())


def _read_reports() -> dict[int, dict[str, Any]]:
    reports: dict[int, dict[str, Any]] = {}

    def read() -> None:
        with contextlib.suppress(Exception):  # of a coordinator that has ended
            for key, value in _coordinator().key_value_dir_get(f"{_REPORTS}/"):
                reports[int(key.rpartition("/")[2])] = json.loads(value)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(_ANSWER_SECONDS)
    return dict(reports)


def _coordinator() -> Any:
    return distributed.global_state.client


def _describe(report: Mapping[str, Any]) -> str:
    """Returns where a process is, the same text for all that wait for the same."""
    return f"waiting for {report['waits']}" if report["waits"] else f"in {report['line']}"


def _join(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _MOST_NAMED} more" if len(indices) > _MOST_NAMED else ""
    return ", ".join(map(str, indices[:_MOST_NAMED])) + more


def _warn_and_exit(event: str, seconds: float, is_over: threading.Event) -> None:
    """Logs where the others are, `seconds` after the start of waiting, and exits this process at the timeout."""
    end = time.monotonic() + _limit_minutes * 60 - seconds
    log(f"Process {jax.process_index()} has waited {seconds:.0f} s for {event}. {describe_others()}")
    if not is_over.wait(max(end - time.monotonic(), 0.0)):
        _exit(event)


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
