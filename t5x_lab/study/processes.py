"""Processes of a study's commands, each on its share of the CPU cores."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.config.threads import available_cores, num_xla_threads


def start_process(
    command: Sequence[str], slot: int = 0, jobs: int = 1, variables: Mapping[str, str] = {}, **options: Any
) -> subprocess.Popen:
    """Starts a command of t5x_lab on the cores of one of several processes, which would slow each other down if all used all.

    Args:
      command: words after `t5x_lab`.
      slot: number of the process among those that run at the same time.
      jobs: their number.
      variables: variables of its environment, besides those of this process.
      options: further arguments of `subprocess.Popen`.
    """
    cores = set(available_cores()[slot % len(available_cores()) :: jobs])
    environment = {**os.environ, **variables}
    environment["NPROC"] = str(num_xla_threads(len(cores), (), environment))
    argv = [sys.executable, "-m", "t5x_lab", *command]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, **options)
    with contextlib.suppress(ProcessLookupError, AttributeError):  # it has ended already, or this is not Linux
        os.sched_setaffinity(process.pid, cores)  # threads that it starts inherit this
    return process
