"""Ends TensorFlow's iterators before the interpreter ends.

An iterator whose dataset calls Python functions waits for them when it is deleted. If that happens after the interpreter has
stopped its threads, it waits forever, and so does the process.
"""

import atexit
import gc
import sys
import traceback
import weakref
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None:
        """Deletes the iterators of this object."""
        ...


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(reader: Closable) -> None:
    """Calls `reader.close()` when the process ends, however it ends."""
    _open.add(reader)


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)  # an uncaught exception keeps the variables of its functions
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    for reader in list(_open):
        reader.close()
    gc.collect()  # errors that were caught may be in cycles with the variables of their functions
