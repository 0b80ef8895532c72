"""The device mesh: `data` copies the model, `fsdp` splits its parameters over the batch, `tensor` splits its matrices."""

import dataclasses
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from t5x_lab.config.errors import UserError, nearest

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each mesh axis; one of them may be -1, which takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, mesh: object) -> "MeshShape":
        """Reads "fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2} or a `MeshShape`.

        `data` is -1 unless given, and 1 when another axis is -1.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        if not isinstance(mesh, str | dict):
            raise UserError(f'MESH is {mesh!r}; write it like "data=2,fsdp=4,tensor=1", with -1 for what the others leave.')
        sizes = mesh if isinstance(mesh, dict) else _parse_text(mesh)
        for axis, size in sizes.items():
            if axis not in AXES:
                raise UserError(f'MESH names the axis "{axis}".{nearest(axis, AXES)} The axes are {", ".join(AXES)}.')
            if not isinstance(size, int) or size == 0 or size < -1:
                raise UserError(f"MESH gives {axis}={size}; a size is a positive number, or -1 for what the others leave.")
        if -1 in sizes.values():
            sizes = {"data": 1, **sizes}
        return cls(**sizes)

    def resolve(self, num_devices: int) -> tuple[int, ...]:
        """Sizes along `AXES` whose product is `num_devices`.

        Raises:
          UserError: when they do not fit the devices.
        """
        sizes = [getattr(self, axis) for axis in AXES]
        text = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        if sizes.count(-1) > 1:
            raise UserError(f"MESH is {text}; only one axis may be -1.")
        fixed = math.prod(size for size in sizes if size != -1)
        if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
            raise UserError(
                f"MESH is {text}, which needs {'a multiple of ' if -1 in sizes else ''}{fixed} devices; there are "
                f"{num_devices}. Change the sizes so that their product is {num_devices}, or set one of them to -1."
            )
        return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def _parse_text(text: str) -> dict[str, int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    matches = [re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", part) for part in parts]
    found = [match for match in matches if match]
    if len(found) < len(parts):
        raise UserError(f'MESH is "{text}"; write it like "data=2,fsdp=4,tensor=1", with -1 for what the others leave.')
    return {match[1]: int(match[2]) for match in found}


def make_mesh(shape: MeshShape, devices: list | None = None) -> Mesh:
    """A mesh over all devices, laid out so that `tensor` neighbours are physical neighbours where JAX knows them."""
    devices = jax.devices() if devices is None else devices
    sizes = shape.resolve(len(devices))
    if devices[0].platform == "cpu":
        return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
