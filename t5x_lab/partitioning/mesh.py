"""The device mesh: `replica` and `data` replicate the model, `fsdp` shards parameters, `sequence` texts, `tensor` matrices.

All but `sequence` and `tensor` shard the batch. `replica` is the slow outer axis between slices, used once per step for the
gradients.
"""

import dataclasses
import math
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from t5x_lab.config.errors import UserError, did_you_mean

AXES = ("replica", "data", "fsdp", "sequence", "tensor")
SLICES = "replica"
_NAMED_IF_USED = ("replica", "sequence")
_EXAMPLE = 'Write it as "data=2,fsdp=4,tensor=1", with -1 for the remaining devices'


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes. One of them may be -1, for the remaining devices. `replica` is the number of slices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    replica: int | None = None
    sequence: int = 1

    @classmethod
    def parse(cls, mesh: object) -> "MeshShape":
        """Reads "fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2} or a `MeshShape`.

        `data` defaults to -1, or to 1 if another axis is -1. `replica` defaults to the number of slices.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        if not isinstance(mesh, str | dict):
            raise UserError(f"MESH is {mesh!r}. {_EXAMPLE}.")
        sizes = mesh if isinstance(mesh, dict) else _parse_text(mesh)
        for axis, size in sizes.items():
            if axis not in AXES:
                raise UserError(f'MESH has the axis "{axis}".{did_you_mean(axis, AXES)} The axes are {", ".join(AXES)}.')
            if not isinstance(size, int) or size == 0 or size < -1:
                raise UserError(f"MESH has {axis}={size}. A size is a positive integer, or -1 for the remaining devices.")
        if -1 in sizes.values():
            sizes = {"data": 1, **sizes}
        return cls(**sizes)

    def first_of(self, devices: list) -> list:
        """Returns as many of the devices as the mesh needs; all if a size is -1."""
        sizes = (self.replica or 1, self.data, self.fsdp, self.sequence, self.tensor)
        return devices if -1 in sizes else devices[: math.prod(sizes)]

    def resolve(self, num_devices: int, num_slices: int = 1) -> tuple[int, ...]:
        """Returns the sizes of `AXES`, whose product is `num_devices`.

        Raises:
          UserError: if they do not fit the devices or the slices.
        """
        replica = num_slices if self.replica is None else self.replica
        sizes = [replica, self.data, self.fsdp, self.sequence, self.tensor]
        named = ((axis, size) for axis, size in zip(AXES, sizes, strict=True) if axis not in _NAMED_IF_USED or size != 1)
        text = ", ".join(f"{axis}={size}" for axis, size in named)
        if sizes.count(-1) > 1:
            raise UserError(f"MESH is {text}. Only one axis may be -1.")
        fixed = math.prod(size for size in sizes if size != -1)
        if self.sequence != 1 and self.tensor != 1:
            raise UserError(
                f"MESH is {text}. The compiler would exchange whole texts between sequence and tensor, so that one of them "
                "must be 1. With sequence, fsdp shards the parameters."
            )
        if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
            raise UserError(
                f"MESH is {text}, which needs {'a multiple of ' if -1 in sizes else ''}{fixed} devices, but there are "
                f"{num_devices}. Change the sizes so that their product is {num_devices}, or set one of them to -1."
            )
        resolved = tuple(num_devices // fixed if size == -1 else size for size in sizes)
        if resolved[0] % num_slices:
            raise UserError(
                f"MESH is {text}, but there are {num_slices} slices. replica, the axis between slices, must be a multiple of "
                f"that. Remove replica, or set replica={num_slices}."
            )
        return resolved


def _parse_text(text: str) -> dict[str, int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    matches = [re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", part) for part in parts]
    if None in matches:
        raise UserError(f'MESH is "{text}". {_EXAMPLE}.')
    return {match[1]: int(match[2]) for match in filter(None, matches)}


def make_mesh(shape: MeshShape, devices: list | None = None) -> Mesh:
    """Makes a mesh of all devices in which `tensor` neighbors are physical neighbors, if JAX knows the topology."""
    devices = jax.devices() if devices is None else devices
    slices = num_slices(devices)
    sizes = shape.resolve(len(devices), slices)
    if devices[0].platform == "cpu":
        array = np.asarray(devices).reshape(sizes)
    elif slices > 1:
        within = (sizes[0] // slices, *sizes[1:])
        between = (slices, *(1 for _ in within[1:]))
        array = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    else:
        array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_slices(devices: list) -> int:
    """Returns the number of TPU slices of the devices; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) for device in devices}) if devices[0].platform == "tpu" else 1
