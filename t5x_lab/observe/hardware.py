"""Specifications of accelerators: peak FLOP/s, memory size and bandwidth, as published by the vendors."""

import dataclasses

GB, GiB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A JAX device: a chip, or one of its two cores (TPU v3, 7x).

    Attributes:
      peak_flops: dense bfloat16 FLOP/s.
      memory: bytes of high-bandwidth memory.
      bandwidth: memory bandwidth in bytes per second.
    """

    peak_flops: float
    memory: float
    bandwidth: float


_V5E = Chip(197e12, 16 * GiB, 819e9)
_V5P = Chip(459e12, 95 * GiB, 2765e9)
_V6E = Chip(918e12, 32 * GiB, 1640e9)
CHIPS = {
    "TPU v3": Chip(61.5e12, 16 * GiB, 450e9),
    "TPU v4": Chip(275e12, 32 * GiB, 1228e9),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Chip(1153e12, 96 * GiB, 3690e9),
    "NVIDIA A100": Chip(312e12, 80 * GB, 2039e9),
    "NVIDIA A100-SXM4-40GB": Chip(312e12, 40 * GB, 1555e9),
    "NVIDIA A100-PCIE-40GB": Chip(312e12, 40 * GB, 1555e9),
    "NVIDIA H100": Chip(989e12, 80 * GB, 3350e9),
    "NVIDIA H100 PCIe": Chip(756e12, 80 * GB, 2039e9),
    "NVIDIA H200": Chip(989e12, 141 * GB, 4800e9),
}


def chip(device_kind: str) -> Chip | None:
    """Returns the chip with the longest name that is a prefix of `device_kind`; None if unknown, as for a CPU."""
    names = [name for name in CHIPS if device_kind.startswith(name)]
    return CHIPS[max(names, key=len)] if names else None


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of a device; None if unknown."""
    known_chip = chip(device_kind)
    return known_chip.peak_flops if known_chip else None
