"""Abstract devices of TPU slices, for compiling programs without the hardware."""

import os
import re

from t5x_lab.config.errors import UserError

# Users mean 64 devices by `v4:4x4x4`. Without the megacore configuration each chip counts as two.
_MEGACORE = {"v4": {"chip_config_name": "megacore"}}
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Without these, libtpu searches for the hosts of its slice and logs errors.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
EXAMPLES = "v4:4x4x4, v5e:16x16, v5p:4x4x4, v6e:16x16"


def disable_accelerators() -> None:
    """Makes JAX ignore TPUs and allows several processes to compile at once. Call it before JAX is first used."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def topology_devices(name: str, num_slices: int = 1) -> list:
    """Returns the devices of `num_slices` TPU slices, such as "v5e:16x16".

    Raises:
      UserError: if libtpu is not installed, or the slice does not exist.
    """
    from jax.experimental import topologies

    if not re.fullmatch(r"\w+:[1-9]\d*(x[1-9]\d*)*", name):
        raise UserError(
            f'--topology is "{name}". It must be a TPU generation and the chips along each axis, such as {EXAMPLES}.'
        )
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise UserError("--topology needs libtpu, which is not installed. Run: pip install 't5x_lab[compile]'.") from None
    options: dict = _MEGACORE.get(name.split(":")[0], {})
    if num_slices > 1:
        options = {**options, "num_slices": num_slices}
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)
    except Exception as error:  # JaxRuntimeError for an unknown name, RuntimeError and others from libtpu
        reason = str(error).partition(chr(10))[0]
        raise UserError(f'libtpu has no slice "{name}" ({reason}). Examples of slices: {EXAMPLES}.') from error
