"""Settings of a command's process: environment, threads and memory allocator, each with its reason.

They are set before JAX and TensorFlow are imported. A variable that the user has set stays as it is. Huge pages cannot be
turned on from inside a process; the Makefile does it with GLIBC_TUNABLES (docs/scale.md).
"""

import contextlib
import ctypes
import os

# XLA runs all virtual devices of a CPU on one thread pool. A collective keeps a thread until all devices have joined it, and a
# device may be in several, so with fewer threads the devices can wait for each other forever.
MIN_XLA_THREADS = 64
M_ARENA_MAX = -8  # constant of glibc's malloc.h


def configure_process() -> None:
    """Applies all settings to this process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow otherwise logs its CPU features and missing GPUs
    os.environ.setdefault("NPROC", str(max(MIN_XLA_THREADS, os.cpu_count() or 1)))  # size of XLA's thread pool
    _limit_malloc_arenas()


def _limit_malloc_arenas() -> None:
    """Limits glibc to one arena per core.

    Eight per core, its default, keep hundreds of MiB of freed memory with many threads.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(M_ARENA_MAX, len(os.sched_getaffinity(0)))
