"""Sharded arrays made of lazy tensors: each process reads only what its devices hold."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor
from t5x_lab.partitioning.rules import mesh_axes_of, num_parts

Region = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def read_together(wanted: Any, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of shapes with shardings, where no two processes read the same part of a file.

    While it reads, mesh axes that an array is copied over split it instead; then the processes give each other the parts. All
    of them call this together.
    """
    found = read(jax.tree.map(_split, wanted))
    return jax.tree.map(lambda array, like: _as(array, like.sharding), found, wanted)


def read_each(leaves: Mapping[str, Any], read: Callable[[str, Any], jax.Array]) -> dict[str, jax.Array]:
    """As `read_together`, one after the other. A leaf that is an array is given up for what `read` makes of it."""
    made = {}
    for name, leaf in leaves.items():
        split = _split(leaf)
        found = read(name, split)
        if isinstance(leaf, jax.Array) and found is split:
            made[name] = leaf
            continue
        made[name] = _as(found, leaf.sharding)
        for given in (leaf, split):
            if isinstance(given, jax.Array):
                given.delete()
    return made


def _split(leaf: Any) -> Any:
    """The array, or the shape, as this process is to read it."""
    if jax.process_count() == 1:
        return leaf
    sharding = NamedSharding(leaf.sharding.mesh, _spread(leaf))
    if isinstance(leaf, jax.Array):
        return _resharded(leaf, sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _as(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """As `_resharded`; an array that is copied is given up."""
    other = _resharded(array, sharding)
    if other is not array:
        jax.block_until_ready(other)
        array.delete()
    return other


def _resharded(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array with this sharding; itself where that is its own."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.jit(_same, out_shardings=sharding)(array)


def _same(array: jax.Array) -> jax.Array:  # a function of the module's: compiled once for each shape
    return array


def _spread(leaf: Any) -> PartitionSpec:
    """The array's partition, with the mesh axes that it does not use on the dimensions that have the most left to split."""
    sizes = leaf.sharding.mesh.shape
    entries = [mesh_axes_of(entry) for entry in (*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec)))]
    for axis in [axis for axis in sizes if axis not in itertools.chain(*entries)]:
        left = [size // num_parts(sizes, entry) for size, entry in zip(leaf.shape, entries, strict=True)]
        even = [i for i, size in enumerate(left) if size % sizes[axis] == 0]
        if even:
            most = max(even, key=lambda i: left[i])
            entries[most] = (*entries[most], axis)
    return PartitionSpec(*(entry or None for entry in entries))


def to_array(like: Any, pieces: Sequence[tuple[int | None, LazyTensor]], fresh: jax.Array | None) -> jax.Array:
    """An array with the shape, dtype and sharding of `like`.

    Args:
      like: an array, or a shape with a sharding.
      pieces: (layer, tensor) goes to that entry of the first axis, (None, tensor) to the whole array; a tensor that is smaller
        along an axis goes to its beginning.
      fresh: the numbers elsewhere; None = the pieces cover all.
    """
    local = {} if fresh is None else {_region(shard.index, like.shape): shard.data for shard in fresh.addressable_shards}
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    regions = dict.fromkeys(_region(index or (), like.shape) for index in indices)  # devices that hold copies share one
    made = {r: np.array(local[r]) if r in local else np.zeros([b - a for a, b in r], like.dtype) for r in regions}
    for layer, tensor in pieces:  # one after the other for all devices, as they lie in the files
        for region, array in made.items():
            _copy_overlap(array, region, layer, tensor)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: made[_region(index or (), like.shape)])


def _region(index: Index, shape: tuple[int, ...]) -> Region:
    full = [*index, *(slice(None) for _ in range(len(shape) - len(index)))]
    return tuple(s.indices(size)[:2] for s, size in zip(full, shape, strict=True))


def _copy_overlap(array: np.ndarray, region: Region, layer: int | None, tensor: LazyTensor) -> None:
    """Writes the part of a tensor that overlaps a region into the array of that region, in place."""
    if layer is not None:
        (start, stop), *rest = region
        if not start <= layer < stop:
            return
        array, region = array[layer - start], tuple(rest)
    ends = [min(stop, size) for (_, stop), size in zip(region, tensor.shape, strict=True)]
    if all(end > start for (start, _), end in zip(region, ends, strict=True)):
        wanted = tuple(slice(start, end) for (start, _), end in zip(region, ends, strict=True))
        array[tuple(slice(0, end - start) for (start, _), end in zip(region, ends, strict=True))] = tensor.read(wanted)
