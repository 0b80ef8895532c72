"""Joining the processes of one run into one JAX program."""

import os

import jax

from t5x_lab.config.errors import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Calls `jax.distributed.initialize`, from `VARIABLES` where they are set, else from what JAX finds by itself.

    JAX recognises TPU pods, Slurm, Open MPI and Kubernetes.

    Raises:
      UserError: when only some variables are set, or nothing was recognised.
    """
    values = [os.environ.get(name) for name in VARIABLES]
    if any(values) and not all(values):
        missing = ", ".join(name for name, value in zip(VARIABLES, values, strict=True) if not value)
        raise UserError(f"--distributed needs {', '.join(VARIABLES)} together; missing: {missing}.")
    try:
        address, count, index = values
        if address and count and index:
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed could not join the other processes ({error}). On a TPU pod, Slurm, Open MPI or Kubernetes nothing "
            f"more is needed; elsewhere set {', '.join(VARIABLES)}."
        ) from error
