"""Checksums of arrays, taken from the arrays themselves while they are still on their devices.

Files that are damaged later, or were written wrongly, cannot agree with them. A checksum does not depend on how an array is
sharded: it is the sum over all elements of a hash of the element's bits and its position, twice with different hashes, modulo
2**32 each. Hashes are bijections of the bits, so that a change of one element always shows, and any other change with
probability 1 - 2**-64.
"""

import functools
import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

_SEEDS = (0x9E3779B9, 0x85EBCA6B)


def checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """16 hexadecimal digits for each array. Several processes call this together, and get the same."""
    arrays = dict(arrays)
    sums = np.asarray(_compiled(_replicated(arrays))(arrays))
    return {name: f"{high:08x}{low:08x}" for name, (high, low) in zip(sorted(arrays), sums.tolist(), strict=True)}


def _replicated(arrays: Mapping[str, jax.Array | np.ndarray]) -> NamedSharding | None:
    shardings = [getattr(array, "sharding", None) for array in arrays.values()]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    return NamedSharding(mesh, PartitionSpec()) if mesh is not None else None


@functools.cache
def _compiled(out: NamedSharding | None):
    return jax.jit(lambda arrays: jnp.stack([_checksum(arrays[name]) for name in sorted(arrays)]), out_shardings=out)


def _checksum(array: jax.Array) -> jax.Array:
    """uint32 [2]."""
    bits = _bits(array)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.stack([jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS])


def _bits(array: jax.Array) -> jax.Array:
    """The array's bits as uint32; numbers of 64 bits become two along a new last axis."""
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize * 8
    unsigned = jax.lax.bitcast_convert_type(array, jnp.uint32 if width >= 32 else jnp.dtype(f"uint{width}"))
    return unsigned.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the input reaches every bit of the output (MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def file_digest(path: epath.Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
