"""Settings of a command's process: environment, threads and memory allocator, each with its reason.

They are set before JAX and TensorFlow are imported. A variable that the user has set stays as it is. Huge pages cannot be
turned on from inside a process; the Makefile does it with GLIBC_TUNABLES (docs/scale.md).
"""

import contextlib
import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence

from t5x_lab.config.threads import available_cores, num_xla_threads
from t5x_lab.data.environment import silence_stderr

M_ARENA_MAX = -8  # constant of glibc's malloc.h


def configure_process(argv: Sequence[str]) -> None:
    """Applies all settings to the process of a command with these arguments."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow otherwise logs its CPU features and missing GPUs
    os.environ.setdefault("NPROC", str(num_xla_threads(len(available_cores()), argv, os.environ)))  # size of XLA's thread pool
    _silence_import_of_tensorflow()
    _limit_malloc_arenas()


def _silence_import_of_tensorflow() -> None:
    """Discards what TensorFlow's libraries write while they load, which no log level prevents, whoever imports it first."""
    if "tensorflow" not in sys.modules and not any(isinstance(finder, _QuietTensorFlow) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietTensorFlow())


class _QuietTensorFlow(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as the other finders do, and silences stderr while it is imported."""

    def find_spec(self, name, path, target=None):
        if name != "tensorflow" or path is not None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                with silence_stderr():
                    run(module)

            spec.loader.exec_module = exec_module
        return spec


def _limit_malloc_arenas() -> None:
    """Limits glibc to one arena per core.

    Eight per core, its default, keep hundreds of MiB of freed memory with many threads.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(M_ARENA_MAX, len(available_cores()))
