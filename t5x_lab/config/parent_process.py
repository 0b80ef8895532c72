"""Processes that end with the process that started them, also if that one is killed."""

import contextlib
import ctypes
import os
import signal

PARENT = "T5X_LAB_PARENT"  # variable with the id of the process that this one ends with
_PR_SET_PDEATHSIG = 1  # constant of Linux's prctl.h


def end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process when its parent dies, if the parent is in `PARENT`.

    A training saves a checkpoint then. Does nothing on systems other than Linux.

    Raises:
      SystemExit: if the parent has died already.
    """
    parent = os.environ.pop(PARENT, "")  # programs that this one starts do not inherit it
    if not parent:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        raise SystemExit(128 + signal.SIGTERM)
