"""The device mesh: `replica` and `data` copy the model, `fsdp` splits it over the batch, `tensor` splits its matrices.

`replica` is the slow outer axis between slices, crossed once a step by the gradients; the others lie within a slice.
"""

import dataclasses
import math
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from t5x_lab.config.errors import UserError, did_you_mean

AXES = ("replica", "data", "fsdp", "tensor")
SLICES = "replica"
_EXAMPLE = 'write it like "data=2,fsdp=4,tensor=1", with -1 for what the others leave'


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each mesh axis; one of them may be -1, which takes what the others leave. `replica` counts slices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    replica: int | None = None

    @classmethod
    def parse(cls, mesh: object) -> "MeshShape":
        """Reads "fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2} or a `MeshShape`.

        `data` is -1 unless given, and 1 when another axis is -1; `replica` is the number of slices unless given.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        if not isinstance(mesh, str | dict):
            raise UserError(f"MESH is {mesh!r}; {_EXAMPLE}.")
        sizes = mesh if isinstance(mesh, dict) else _parse_text(mesh)
        for axis, size in sizes.items():
            if axis not in AXES:
                raise UserError(f'MESH names the axis "{axis}".{did_you_mean(axis, AXES)} The axes are {", ".join(AXES)}.')
            if not isinstance(size, int) or size == 0 or size < -1:
                raise UserError(f"MESH gives {axis}={size}; a size is a positive number, or -1 for what the others leave.")
        if -1 in sizes.values():
            sizes = {"data": 1, **sizes}
        return cls(**sizes)

    def resolve(self, num_devices: int, num_slices: int = 1) -> tuple[int, ...]:
        """Sizes along `AXES` whose product is `num_devices`.

        Raises:
          UserError: when they do not fit the devices or their slices.
        """
        sizes = [num_slices if self.replica is None else self.replica, self.data, self.fsdp, self.tensor]
        text = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if axis != "replica" or size != 1)
        if sizes.count(-1) > 1:
            raise UserError(f"MESH is {text}; only one axis may be -1.")
        fixed = math.prod(size for size in sizes if size != -1)
        if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
            raise UserError(
                f"MESH is {text}, which needs {'a multiple of ' if -1 in sizes else ''}{fixed} devices; there are "
                f"{num_devices}. Change the sizes so that their product is {num_devices}, or set one of them to -1."
            )
        resolved = tuple(num_devices // fixed if size == -1 else size for size in sizes)
        if resolved[0] % num_slices:
            raise UserError(
                f"MESH is {text}, but there are {num_slices} slices: replica, the axis between slices, must be a multiple of "
                f"that. Leave replica out, or set replica={num_slices}."
            )
        return resolved


def _parse_text(text: str) -> dict[str, int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    matches = [re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", part) for part in parts]
    found = [match for match in matches if match]
    if len(found) < len(parts):
        raise UserError(f'MESH is "{text}"; {_EXAMPLE}.')
    return {match[1]: int(match[2]) for match in found}


def make_mesh(shape: MeshShape, devices: list | None = None) -> Mesh:
    """A mesh over all devices, laid out so that `tensor` neighbours are physical neighbours where JAX knows them."""
    devices = jax.devices() if devices is None else devices
    slices = num_slices(devices)
    sizes = shape.resolve(len(devices), slices)
    if devices[0].platform == "cpu":
        array = np.asarray(devices).reshape(sizes)
    elif slices > 1:
        within = (sizes[0] // slices, *sizes[1:])
        array = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True)
    else:
        array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_slices(devices: list) -> int:
    """TPU slices that the devices belong to; devices of one slice, and others than TPUs, may know none."""
    return len({getattr(device, "slice_index", 0) for device in devices}) if devices[0].platform == "tpu" else 1
