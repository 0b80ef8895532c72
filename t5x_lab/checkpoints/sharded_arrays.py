"""Sharded arrays made of lazy tensors: each process reads only what its devices hold."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor

Region = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


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
