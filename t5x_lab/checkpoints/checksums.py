"""Checksums of arrays, computed on the devices before the arrays are saved, so that damaged files are detected.

A checksum does not depend on the sharding of the array: it is the sum over all elements of a hash of the element's bits and
position, modulo 2**32, for two different hashes. The hash is a bijection of the bits, so a change of one element is always
detected, and any other change with probability 1 - 2**-64.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from t5x_lab.checkpoints.layout import Corrupt

_SEEDS = (0x9E3779B9, 0x85EBCA6B)
_CHUNK_BYTES = 8 << 20  # bytes that are hashed at a time on the host


def checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
    """Returns 16 hexadecimal digits for each array, the same in all processes. All processes must call this."""
    small = {name: array for name, array in arrays.items() if _is_small(array)}
    compute = _compiled(_replicated(arrays))  # compiled once per shape, of which a model has few
    sums = jax.device_get({name: compute(array) for name, array in arrays.items() if name not in small})
    on_host = {name: checksum_of_chunks([np.atleast_1d(array)]) for name, array in jax.device_get(small).items()}
    return on_host | {name: hexadecimal(pair) for name, pair in sums.items()}


def _is_small(array: jax.Array | np.ndarray) -> bool:
    """Returns whether fetching an array is cheaper than compiling for its shape."""
    return array.nbytes <= 1 << 20 and getattr(array, "is_fully_addressable", True)


def checksum_of_chunks(chunks: Iterable[np.ndarray]) -> str:
    """Returns the checksum of an array that is given as consecutive slices of its first axis."""
    total, position = np.zeros(2, np.uint32), 0
    for chunk in chunks:
        total += region_sums(chunk.ravel(), (position,), (position + chunk.size,))
        position += chunk.size
    return hexadecimal(total)


def region_sums(region: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Returns the sums, uint32 [2], of a region of an array, whose checksum is the sum over disjoint regions modulo 2**32.

    Args:
      region: the part of the array.
      starts: its first index on each axis.
      shape: shape of the whole array.
    """
    if not region.ndim:
        region, starts, shape = region[None], (0,), (1,)
    total = np.zeros(2, np.uint32)
    rows = max(_CHUNK_BYTES // max(region.nbytes // max(len(region), 1), 1), 1)
    for row in range(0, len(region), rows):
        bits = _bits_on_host(region[row : row + rows])
        word_axis = bits.shape[region.ndim :]  # two words for 64-bit numbers
        firsts = (starts[0] + row, *starts[1:], *(0 for _ in word_axis))
        position = np.zeros(bits.shape, np.uint32)
        for axis, (size, first) in enumerate(zip((*shape, *word_axis), firsts, strict=True)):
            along = (np.arange(bits.shape[axis]) + first).astype(np.uint32)
            position = position * np.uint32(size % 2**32) + along.reshape(-1, *[1] * (bits.ndim - axis - 1))
        total += _sums(np, bits, position)
    return total


def compare(path: epath.Path, actual: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Compares checksums of arrays with those of a checkpoint.

    Raises:
      Corrupt: with the first array that differs.
    """
    different = [name for name in sorted(actual) if actual[name] != saved.get(name)]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise Corrupt(path, f"{different[0]}{more} differs from what was saved")


def hexadecimal(sums: np.ndarray) -> str:
    """Formats the sums of an array, uint32 [2], as its checksum."""
    return f"{int(sums[0]):08x}{int(sums[1]):08x}"


def _replicated(arrays: Mapping[str, jax.Array | np.ndarray]) -> NamedSharding | None:
    shardings = [getattr(array, "sharding", None) for array in arrays.values()]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    return NamedSharding(mesh, PartitionSpec()) if mesh is not None else None


@functools.cache
def _compiled(out: NamedSharding | None):
    return jax.jit(lambda array: _sums(jnp, bits := _bits(array), _positions(bits.shape)), out_shardings=out)


def _sums(xp, bits, positions):
    """Returns uint32 [2] for uint32 arrays of the module `xp`, NumPy or JAX."""
    return xp.stack([xp.sum(_mix(bits ^ _mix(positions + np.uint32(seed))), dtype=np.uint32) for seed in _SEEDS])


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Returns the flat index of each element, computed by axis, so that it is sharded like the array."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return position


def _bits(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32. 64-bit numbers become two along a new last axis."""
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize * 8
    unsigned = jax.lax.bitcast_convert_type(array, jnp.uint32 if width >= 32 else jnp.dtype(f"uint{width}"))
    return unsigned.astype(jnp.uint32)


def _bits_on_host(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    width = array.dtype.itemsize * 8
    if width > 32:
        return array.view(np.uint32).reshape(*array.shape, width // 32)
    return array.view(f"uint{width}").astype(np.uint32).reshape(array.shape)


def _mix(x):
    """Mixes 32 bits bijectively, so that every input bit affects every output bit (MurmurHash3's finalizer)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def file_digest(path: epath.Path) -> str:
    """Returns the SHA-256 digest of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
