"""Joining the processes of one run into one JAX program, and ending them together."""

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
from t5x_lab.partitioning.waiting import waiting_for

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FLAGS = ("--coordinator_address", "--num_processes", "--process_id")
_OWN_FAULT = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|UNIMPLEMENTED|out of memory", re.IGNORECASE)
HEARTBEAT_SECONDS = 30  # a process that is silent for so long is taken for dead


def initialize(address: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Calls `jax.distributed.initialize`, from the arguments, else from `VARIABLES`, else from what JAX finds by itself.

    JAX recognises TPU pods, Slurm, Open MPI and Kubernetes.

    Raises:
      UserError: when only some of the three are given, or nothing was recognised.
    """
    given = (address, num_processes, process_id)
    values = [os.environ.get(name) if value is None else str(value) for name, value in zip(VARIABLES, given, strict=True)]
    names = [f"{flag} (or {name})" for flag, name in zip(FLAGS, VARIABLES, strict=True)]
    if any(values) and not all(values):
        missing = ", ".join(name for name, value in zip(names, values, strict=True) if not value)
        raise UserError(f"--distributed needs {', '.join(names)} together; missing: {missing}.")
    try:
        address, count, index = values
        if address and count and index:
            jax.distributed.initialize(address, int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        else:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed could not join the other processes ({error}). On a TPU pod, Slurm, Open MPI or Kubernetes nothing "
            f"more is needed; elsewhere give {', '.join(names)}."
        ) from error


def broadcast(value: int) -> int:
    """The first process's value (an int or a bool), in every process; all of them call this at the same point."""
    if jax.process_count() == 1:
        return value
    with waiting_for("what the first process has decided"):
        return int(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def broadcast_text(text: str) -> str:
    """The first process's text, in every process; all of them call this at the same point."""
    if jax.process_count() == 1:
        return text
    written = np.frombuffer(text.encode(), np.uint8)
    size = broadcast(len(written))
    with waiting_for("what the first process has read"):
        own = written if jax.process_index() == 0 else np.zeros(size, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes().decode()


@contextlib.contextmanager
def fail_together(*agreed: type[BaseException]) -> Iterator[None]:
    """Ends this process at once, with a message, when it fails or when another one has died.

    A process that is alone raises as usual. One of several that unwound its stack would wait for the others in a `finally`
    block, and the others for it. The exceptions `agreed` are those that all processes raise after the same step.
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
        elif isinstance(error, jax.errors.JaxRuntimeError) and not _OWN_FAULT.search(str(error)):
            reason = (
                f" lost another process of this run ({str(error)[:200]}); its own log says why it ended. Start all processes "
                "again with the same command: the run goes on from its latest checkpoint."
            )
        else:
            reason = " failed:\n" + "".join(traceback.format_exception(error))
        print(f"t5x_lab: process {jax.process_index()}{reason}", file=sys.stderr, flush=True)
        os._exit(error.status if isinstance(error, UserError) else 1)
