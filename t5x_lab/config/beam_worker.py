"""Plugin of the processes of Beam's local runner: a worker ends when the process of the command is gone.

Beam starts workers through a shell, so the kernel does not tell them that the command was killed, and they would wait forever.
Beam imports this module when a worker starts.
"""

import contextlib
import os
import threading
import time

COMMAND = "T5X_LAB_BEAM_COMMAND"  # variable with the id of the command's process
_SECONDS = 1.0


def _watch(pid: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.kill(pid, 0)
            time.sleep(_SECONDS)
    os._exit(1)


if os.environ.get(COMMAND, "").isdigit():
    threading.Thread(target=_watch, args=(int(os.environ[COMMAND]),), name="command", daemon=True).start()
