"""Worker process of Beam's local runner, which ends with the command that started it.

Beam starts workers through a shell, so the kernel does not tell them that the command was killed, and they would wait forever.
Ctrl-C, which the command answers, ends a worker without a word: Beam's tracebacks would follow.
"""

import contextlib
import logging
import os
import signal
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


def _main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    threading.Thread(target=_watch, args=(int(os.environ[COMMAND]),), name="command", daemon=True).start()
    logging.disable(logging.WARNING)
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main([])


if __name__ == "__main__":
    _main()
