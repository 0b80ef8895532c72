"""Reads sharded arrays from lazy tensors. Each process reads only the parts on its devices."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor
from t5x_lab.partitioning.rules import mesh_axes_of, num_parts

Region = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def read_together(abstract: Any, read: Callable[[Any], Any]) -> Any:
    """Returns `read(abstract)` for shapes with shardings, without two processes reading the same part of a file.

    Arrays are read sharded over all mesh axes and replicated afterwards. All processes must call this.
    """
    arrays = read(jax.tree.map(_shard_fully, abstract))
    return jax.tree.map(lambda array, like: _reshard_donated(array, like.sharding), arrays, abstract)


def read_each(leaves: Mapping[str, Any], read: Callable[[str, Any], jax.Array]) -> dict[str, jax.Array]:
    """Reads arrays one by one, see `read_together`. A leaf that is an array is deleted after `read` has replaced it."""
    arrays = {}
    for name, leaf in leaves.items():
        sharded = _shard_fully(leaf)
        array = read(name, sharded)
        if isinstance(leaf, jax.Array) and array is sharded:
            arrays[name] = leaf
            continue
        arrays[name] = _reshard_donated(array, leaf.sharding)
        for old in (leaf, sharded):
            if isinstance(old, jax.Array):
                old.delete()
    return arrays


def _shard_fully(leaf: Any) -> Any:
    """Returns the array or shape with the sharding used for reading."""
    if jax.process_count() == 1:
        return leaf
    sharding = NamedSharding(leaf.sharding.mesh, _full_spec(leaf))
    if isinstance(leaf, jax.Array):
        return _reshard(leaf, sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _reshard_donated(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Reshards an array and deletes the original if it was copied."""
    resharded = _reshard(array, sharding)
    if resharded is not array:
        jax.block_until_ready(resharded)
        array.delete()
    return resharded


def _reshard(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns the array with this sharding; the same object if it has it."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.jit(_identity, out_shardings=sharding)(array)


def _identity(array: jax.Array) -> jax.Array:  # at module level, so that it is compiled once per shape
    return array


def _full_spec(leaf: Any) -> PartitionSpec:
    """Returns the array's partition spec with unused mesh axes added to the largest divisible dimensions."""
    sizes = leaf.sharding.mesh.shape
    entries = [mesh_axes_of(entry) for entry in (*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec)))]
    for axis in [axis for axis in sizes if axis not in itertools.chain(*entries)]:
        sizes_left = [size // num_parts(sizes, entry) for size, entry in zip(leaf.shape, entries, strict=True)]
        even = [i for i, size in enumerate(sizes_left) if size % sizes[axis] == 0]
        if even:
            largest = max(even, key=lambda i: sizes_left[i])
            entries[largest] = (*entries[largest], axis)
    return PartitionSpec(*(entry or None for entry in entries))


def to_array(like: Any, pieces: Sequence[tuple[int | None, LazyTensor]], fresh: jax.Array | None) -> jax.Array:
    """Returns an array with the shape, dtype and sharding of `like`.

    Args:
      like: an array, or a shape with a sharding.
      pieces: (layer, tensor) pairs for an entry of the first axis, or (None, tensor) for the whole array. A smaller tensor is
        written to the start of each axis.
      fresh: values elsewhere. None = the pieces cover the array.
    """
    local = {} if fresh is None else {_region(shard.index, like.shape): shard.data for shard in fresh.addressable_shards}
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    regions = dict.fromkeys(_region(index or (), like.shape) for index in indices)  # replicas share a region
    arrays = {r: np.array(local[r]) if r in local else np.zeros([b - a for a, b in r], like.dtype) for r in regions}
    for layer, tensor in pieces:  # in the order of the files, for all devices
        for region, array in arrays.items():
            _copy_overlap(array, region, layer, tensor)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: arrays[_region(index or (), like.shape)])


def _region(index: Index, shape: tuple[int, ...]) -> Region:
    full = [*index, *(slice(None) for _ in range(len(shape) - len(index)))]
    return tuple(s.indices(size)[:2] for s, size in zip(full, shape, strict=True))


def _copy_overlap(array: np.ndarray, region: Region, layer: int | None, tensor: LazyTensor) -> None:
    """Copies the part of a tensor that overlaps a region to the array of that region, in place."""
    if layer is not None:
        (start, stop), *rest = region
        if not start <= layer < stop:
            return
        array, region = array[layer - start], tuple(rest)
    ends = [min(stop, size) for (_, stop), size in zip(region, tensor.shape, strict=True)]
    if all(end > start for (start, _), end in zip(region, ends, strict=True)):
        overlap = tuple(slice(start, end) for (start, _), end in zip(region, ends, strict=True))
        array[tuple(slice(0, end - start) for (start, _), end in zip(region, ends, strict=True))] = tensor.read(overlap)
