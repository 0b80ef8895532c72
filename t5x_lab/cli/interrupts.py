"""Ctrl-C ends a command from its first moment on, also during imports, compilation and shutdown.

Python only raises `KeyboardInterrupt` when its main thread is back in the interpreter, and libraries swallow it in callbacks
or fail half imported. So an interrupt during an import ends the process at once, and any other one after a time of grace.
"""

import logging
import os
import signal
import threading
import time
from types import FrameType

GRACE_SECONDS = 4.0  # for cleaning up
INTERRUPTED = 130  # exit status of a process that Ctrl-C ended, in a shell's convention


class Interrupts:
    """State of Ctrl-C in a process."""

    def __init__(self) -> None:
        self.received = False
        self._program, self._stderr = "", 2

    def install(self, program: str) -> None:
        """Handles Ctrl-C in this process, which must be a command's own.

        Args:
          program: name for the message.
        """
        self._program, self._stderr = program, os.dup(2)  # libraries' messages may be silenced at that moment
        signals, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._end_after_grace, args=(signals,), daemon=True).start()

    def report(self) -> int:
        """Prints that the command was interrupted, once. Returns the exit status."""
        program, self._program = self._program, ""
        if program:
            os.write(self._stderr, f"{program}: interrupted\n".encode())
        return INTERRUPTED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number
        self.received = True
        threading.excepthook = lambda args: None  # what fails now in other threads and libraries is a consequence
        logging.disable()
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os._exit(self.report())
            frame = frame.f_back
        raise KeyboardInterrupt

    def _end_after_grace(self, signals: int) -> None:
        while number := os.read(signals, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) == self._handle:
                time.sleep(GRACE_SECONDS)
                os._exit(self.report())


interrupts = Interrupts()
