"""Peak bfloat16 matrix FLOP/s per device, as the vendors publish them, for MFU."""

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The peak of the longest known name that `device_kind` begins with; None where it is unknown, as on a CPU."""
    known = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None
