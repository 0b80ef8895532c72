"""Settings of a command's process: environment, threads and memory allocator, each with its reason.

They are set before JAX and TensorFlow are imported. A variable that the user has set stays as it is. Huge pages cannot be
turned on from inside a process; the Makefile does it with GLIBC_TUNABLES (docs/scale.md).
"""

import contextlib
import ctypes
import hashlib
import importlib.abc
import importlib.util
import itertools
import os
import platform
import sys
from collections.abc import Sequence

from t5x_lab.config.threads import available_cores, num_xla_threads
from t5x_lab.data.environment import silence_stderr

M_ARENA_MAX = -8  # constant of glibc's malloc.h
MAX_PROGRAMS_BYTES = 2 << 30


def configure_process(argv: Sequence[str]) -> None:
    """Applies all settings to the process of a command with these arguments."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow otherwise logs its CPU features and missing GPUs
    os.environ.setdefault("NPROC", str(num_xla_threads(len(available_cores()), argv, os.environ)))  # size of XLA's thread pool
    _keep_compiled_programs()
    _silence_import_of_tensorflow()
    _limit_malloc_arenas()


def _keep_compiled_programs() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, so that a run that is resumed or repeated trains at once.

    JAX removes those that were not used for the longest time. A CPU's programs have its instructions, so that processors have
    folders of their own. JAX_COMPILATION_CACHE_DIR is another folder, or "" for none.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(user_cache, "t5x_lab", f"programs-{_processor()}")
    with contextlib.suppress(OSError):  # a home that cannot be written to
        os.makedirs(folder, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_PROGRAMS_BYTES))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def _processor() -> str:
    """Returns a digest of the first core's model and instructions."""
    lines = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        of_first_core = itertools.takewhile(str.strip, file)  # up to a blank line: a server has hundreds of cores
        lines = [line for line in of_first_core if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("".join(lines or platform.processor()).encode()).hexdigest()[:12]


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
