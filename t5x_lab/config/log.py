"""Log lines for the user."""

import contextlib
import sys

import tqdm


def log(text: str) -> None:
    """Writes a line to stderr, above a progress bar if there is one. Write errors, such as a full disk, are ignored."""
    with contextlib.suppress(OSError):
        tqdm.tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
