"""Cores of this process, and the number of threads that XLA should have on them."""

import os
from collections.abc import Mapping, Sequence

# XLA runs all virtual devices of a CPU on one thread pool. A collective keeps a thread until all devices have joined it, and a
# device may be in several, so with fewer threads the devices can wait for each other forever. A single device has no
# collectives, and more threads than cores make it slower, above all beside other programs.
THREADS_OF_COLLECTIVES, MIN_THREADS = 64, 2
_DISTRIBUTED_FLAGS = ("--distributed", "--coordinator_address", "--num_processes", "--process_id")


def available_cores() -> list[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_xla_threads(cores: int, argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the size of XLA's thread pool in a command: larger than `cores` if devices or processes may have collectives."""
    has_devices = "host_platform_device_count" in environment.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in environment
    has_processes = any(flag.startswith(_DISTRIBUTED_FLAGS) for flag in argv) or "JAX_COORDINATOR_ADDRESS" in environment
    return max(THREADS_OF_COLLECTIVES if has_devices or has_processes else MIN_THREADS, cores)
