"""The platform that programs are traced for, which decides between implementations."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def target_platform() -> str:
    """Returns the platform of `tracing_for`, or that of JAX's default devices, such as "tpu"."""
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Programs that are traced in this context are for a platform that need not be there."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)
