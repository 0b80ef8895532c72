"""Sharded arrays made of lazy tensors: each process reads only what its devices hold."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor
from t5x_lab.partitioning.rules import mesh_axes_of, num_parts

Region = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def read_once(tree: Any, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of arrays, or of shapes with shardings, where no two processes read the same part of a file.

    While it reads, mesh axes that an array is copied over split it instead; then the processes give each other the parts. All
    of them call this together.
    """
    if jax.process_count() == 1:
        return read(tree)
    spread = jax.tree.map(lambda leaf: NamedSharding(leaf.sharding.mesh, _spread(leaf)), tree)
    if isinstance(jax.tree.leaves(tree)[0], jax.Array):
        split = jax.jit(lambda tree: tree, out_shardings=spread)(tree)
    else:
        split = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, spread)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, tree)
    return jax.jit(lambda tree: tree, out_shardings=wanted)(read(split))


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
    made: dict[Region, np.ndarray] = {}  # devices that hold copies ask for the same region

    def read(index: Index | None) -> np.ndarray:
        region = _region(index or (), like.shape)
        if region not in made:
            array = np.array(local[region]) if region in local else np.zeros([b - a for a, b in region], like.dtype)
            for layer, tensor in pieces:
                _copy_overlap(array, region, layer, tensor)
            made[region] = array
        return made[region]

    return jax.make_array_from_callback(like.shape, like.sharding, read)


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
