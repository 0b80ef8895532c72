"""Multi-process runs: initialization, broadcasts, and exiting together."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_lab.config.errors import UserError
from t5x_lab.partitioning.waiting import start_reports, waiting_for

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FLAGS = ("--coordinator_address", "--num_processes", "--process_id")
_OWN_ERROR = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|out of memory", re.IGNORECASE)
HEARTBEAT_SECONDS = 30  # a process without heartbeat for this time counts as dead


def initialize(address: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Calls `jax.distributed.initialize` with the arguments, the environment `VARIABLES`, or JAX's own detection.

    JAX detects TPU pods, Slurm, Open MPI and Kubernetes.

    Args:
      address: address of the coordinator, "host:port".
      num_processes: number of processes.
      process_id: index of this process.

    Raises:
      UserError: if only some of the three are set, or nothing is detected.
    """
    arguments = (address, num_processes, process_id)
    values = [os.environ.get(name) if value is None else str(value) for name, value in zip(VARIABLES, arguments, strict=True)]
    names = [f"{flag} (or {name})" for flag, name in zip(FLAGS, VARIABLES, strict=True)]
    if any(values) and not all(values):
        missing = ", ".join(name for name, value in zip(names, values, strict=True) if not value)
        raise UserError(f"--distributed needs all of {', '.join(names)}. Missing: {missing}.")
    try:
        address, count, index = values
        if address and count and index:
            jax.distributed.initialize(address, int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        else:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        start_reports()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed could not connect to the other processes ({error}). TPU pods, Slurm, Open MPI and Kubernetes are "
            f"detected; otherwise pass {', '.join(names)}."
        ) from error


def broadcast(value: int) -> int:
    """Returns the first process's value, an int or a bool, in every process. All processes must call this."""
    if jax.process_count() == 1:
        return value
    with waiting_for("a decision of the first process"):
        return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def broadcast_text(text: str) -> str:
    """Returns the first process's text in every process. All processes must call this."""
    if jax.process_count() == 1:
        return text
    encoded = np.frombuffer(text.encode(), np.uint8)
    size = broadcast(len(encoded))
    with waiting_for("a text of the first process"):
        own = encoded if jax.process_index() == 0 else np.zeros(size, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes().decode()


@contextlib.contextmanager
def fail_together(*agreed: type[BaseException]) -> Iterator[None]:
    """Exits this process immediately with a message if it fails or another process has died.

    A single process raises as usual. One of several would wait for the others in a `finally` block, and the others for it.

    Args:
      agreed: exceptions that all processes raise after the same step, which are not caught.
    """
    try:
        yield
    except agreed:
        raise
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, UserError):
            reason = f": {error.sentence}"
        elif isinstance(error, jax.errors.JaxRuntimeError) and not _OWN_ERROR.search(str(error)):
            reason = (
                f" lost the connection to another process ({str(error)[:200]}). The log of that process has the reason. "
                "Start all processes again with the same command to continue from the latest checkpoint."
            )
        else:
            reason = " failed:\n" + "".join(traceback.format_exception(error))
        print(f"t5x_lab: process {jax.process_index()}{reason}", file=sys.stderr, flush=True)
        os._exit(error.status if isinstance(error, UserError) else 1)
