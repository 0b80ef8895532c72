"""The chips that programs are traced for, which decide between implementations."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """The platform of chips, such as "tpu", and their kind, such as "TPU v4"."""

    platform: str
    kind: str


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def current_target() -> Target:
    """Returns the chips of `tracing_for`, or JAX's default devices."""
    device = jax.devices()[0]
    return _target.get() or Target(device.platform, device.device_kind)


@contextlib.contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Programs that are traced in this context are for chips that need not be there."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)
