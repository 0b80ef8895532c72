"""Devices of TPU slices that are not there: enough of them to compile a program for, not to run it."""

import os
import re

from t5x_lab.config.errors import UserError

# `v4:4x4x4` means 64 chips to those who write it; without the megacore configuration each counts as two devices.
_MEGACORE = {"v4": {"chip_config_name": "megacore"}}
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # libtpu looks for the hosts of its slice, and says at length that it finds none.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
EXAMPLES = "v4:4x4x4, v5e:16x16, v5p:4x4x4, v6e:16x16"


def without_accelerator() -> None:
    """Makes JAX look for no TPU, and lets several processes of a machine compile at once. Before JAX is first used."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def topology_devices(name: str, num_slices: int = 1) -> list:
    """The devices of `num_slices` TPU slices, such as "v5e:16x16".

    Raises:
      UserError: without libtpu, or for a slice that there is none of.
    """
    from jax.experimental import topologies

    if not re.fullmatch(r"\w+:[1-9]\d*(x[1-9]\d*)*", name):
        raise UserError(f'--topology is "{name}"; it is a generation and its chips along each axis, such as {EXAMPLES}.')
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise UserError("--topology compiles with libtpu, which is not installed: pip install 't5x_lab[compile]'.") from None
    options: dict = _MEGACORE.get(name.split(":")[0], {})
    if num_slices > 1:
        options = {**options, "num_slices": num_slices}
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)
    except Exception as error:  # JaxRuntimeError for an unknown name, RuntimeError and others from libtpu's start
        reason = str(error).partition(chr(10))[0]
        raise UserError(f'libtpu knows no slices "{name}" ({reason}). Some that it knows: {EXAMPLES}.') from error
