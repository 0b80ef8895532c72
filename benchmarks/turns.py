"""Sides of a comparison, each in a process of its own that sleeps while the others work."""

import os
import subprocess
import sys
import time
from collections.abc import Callable


class Worker:
    """A process that runs `script --side=…` and answers a line with a line."""

    def __init__(self, script: str, *flags: str, huge_pages: bool = True):
        pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {}
        self._process = subprocess.Popen(
            [sys.executable, script, *flags],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **pages},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, line: str = "") -> str:
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().rstrip("\n")
        if not answer:
            raise RuntimeError(f"{' '.join(self._process.args)} died; run it by itself to see why.")
        time.sleep(0.5)  # threads that wait for more work give up
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve(answer: Callable[[str], object]) -> None:
    """Runs the process of a `Worker`."""
    for line in sys.stdin:
        print(answer(line.rstrip("\n")), flush=True)
