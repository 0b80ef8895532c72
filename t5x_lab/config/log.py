"""Log lines for the user."""

import collections
import contextlib
import functools
import sys

import tqdm


def log(text: str) -> None:
    """Writes a line to stderr, above a progress bar if there is one. Write errors, such as a full disk, are ignored."""
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


@functools.cache
def log_once(text: str) -> None:
    """Writes a line unless this command has written it."""
    log(text)


def log_counted(event: str) -> None:
    """Counts an event that may be frequent. Writes a line for the first, tenth, hundredth and so on in this process."""
    _counts[event] += 1
    count = _counts[event]
    if count == 10 ** (len(str(count)) - 1):
        log(event if count == 1 else f"{event} ({count:,} times so far)")


_counts: collections.Counter[str] = collections.Counter()
