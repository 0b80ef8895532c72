"""Reads and writes arrays in Orbax's directory layout, lazily and one at a time."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.lazy_tensors import CHUNK_BYTES, LazyTensor, Unreadable
from t5x_lab.checkpoints.stores import key_value_store
from t5x_lab.config.json_files import parse_json

METADATA = "_METADATA"
SMALLEST_CHUNK, LARGEST_CHUNK = 4 << 10, 1 << 20  # bytes
INDEX_BYTES = 64 << 20


def open_arrays(directory: epath.Path) -> dict[str, LazyTensor]:
    """Returns all arrays by their path in the saved tree, joined with "/".

    Raises:
      UserError: if the directory is damaged, or not in Orbax's layout.
    """
    try:
        metadata = parse_json((directory / METADATA).read_bytes())
        entries = [
            [str(key["key"]) for key in entry["key_metadata"]]
            for entry in metadata["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray", "scalar")
        ]
        if any(not name or "/" in name or name in (".", "..") for names in entries for name in names):
            raise ValueError("it lists arrays outside of the directory")
        driver: dict[str, Any] = {"ocdbt": bool(metadata.get("use_ocdbt")), "zarr3": bool(metadata.get("use_zarr3"))}
        cache = ChunkCache()
        return {"/".join(names): open_zarr(directory, ".".join(names), cache=cache, **driver) for names in entries}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Unreadable(f"{directory} cannot be read: {_first_line(error)}.") from error


class ChunkCache:
    """Caches the chunks that were read last, so that other slices of them, such as the next layer, are not read again.

    Several arrays share a cache, which holds the chunks of one of them.
    """

    def __init__(self) -> None:
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": INDEX_BYTES}})  # for OCDBT's own index
        self._store: ts.TensorStore | None = None
        self._boxes: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(self, store: ts.TensorStore, index: tuple[slice, ...]) -> np.ndarray:
        """Returns `store[index]`."""
        chunk = _chunk_shape(store)
        ends = [part.indices(size)[:2] for part, size in zip(index, store.shape, strict=True)]
        box = tuple(
            (start // c * c, min(-(-stop // c) * c, size))
            for (start, stop), c, size in zip(ends, chunk, store.shape, strict=True)
        )
        if self._store is not store:
            self._store, self._boxes = store, {}
        array = self._boxes.get(box)
        if array is None:
            array = np.asarray(store[tuple(slice(*bounds) for bounds in box)].read().result())
            if list(box) != ends:
                self._boxes[box] = array
        return array[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ends, box, strict=True))]


def open_zarr(
    directory: epath.Path,
    name: str,
    *,
    cache: ChunkCache,
    ocdbt: bool = False,
    zarr3: bool = False,
    assumed: dict[str, Any] | None = None,
) -> LazyTensor:
    """Opens an array in a directory of zarr arrays, or in an OCDBT store of them.

    Args:
      directory: the directory.
      name: name of the array.
      cache: chunk cache, shared by arrays that are read sequentially.
      ocdbt, zarr3: storage format of the directory.
      assumed: metadata to use instead of the array's own.

    Raises:
      ValueError: if the array is missing or damaged.
    """
    spec: dict[str, Any] = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": _store(directory, name, ocdbt),
        "fill_missing_data_reads": False,  # a missing chunk is an error
    }
    if assumed is not None:
        spec["metadata"] = assumed
    store = ts.open(spec, context=cache.context, open=True, read=True, assume_metadata=assumed is not None).result()
    dtype = np.dtype(store.dtype.numpy_dtype)
    if math.prod(_chunk_shape(store)) > max(2 * math.prod(store.shape), 1 << 20):  # TensorStore would allocate them
        raise ValueError(f"{name} has chunks of shape {_chunk_shape(store)}, but the array has shape {store.shape}")

    def read(index: tuple[slice, ...]) -> np.ndarray:
        try:
            return cache.read(store, index)
        except ValueError as error:
            raise Unreadable(f"{directory} is damaged: {name} cannot be read ({_first_line(error)}).") from error

    return LazyTensor(tuple(store.shape), dtype, read)


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    return tuple(chunk or size for chunk, size in zip(store.chunk_layout.read_chunk.shape or (), store.shape, strict=True))


def single_axes(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns axes with chunk size 1: the layers of a stack, and the heads of its attention kernels [layers, ...].

    The head axis is the first one that is not the largest. If chunks would become too small, as in the shard of one of many
    devices, layers share chunks, and then heads.
    """
    if len(shape) == 4:
        widest = max(range(1, 4), key=lambda axis: shape[axis])
        axes: tuple[int, ...] = (0, next(axis for axis in range(1, 4) if axis != widest))
    else:
        axes = (0,) if len(shape) > 2 else ()
    while axes and math.prod(shape) * itemsize < SMALLEST_CHUNK * math.prod(shape[axis] for axis in axes):
        axes = axes[1:]
    return axes


def chunk_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the chunk size of an array in bytes, such that reading an eighth of any axis reads little else."""
    others = sorted(size for axis, size in enumerate(shape) if axis not in single_axes(shape, itemsize))
    parts = [max(size // 8, 1) for size in others]
    elements = parts[-1] * others[0] if len(shape) - len(parts) == 2 else parts[0] ** len(parts) if parts else 1
    return min(max(elements * itemsize, SMALLEST_CHUNK), LARGEST_CHUNK)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the chunk shape of an array for `chunk_bytes`. Every axis is split eight times before one is split further."""
    single = single_axes(shape, itemsize)
    chunk = [1 if axis in single else size for axis, size in enumerate(shape)]
    while math.prod(chunk) * itemsize > chunk_bytes(shape, itemsize):
        is_split = [-(-size // c) >= 8 for size, c in zip(shape, chunk, strict=True)]
        axis = max(range(len(chunk)), key=lambda axis: (chunk[axis] > 1 and not is_split[axis], chunk[axis]))
        chunk[axis] = -(-chunk[axis] // 2)
    return tuple(chunk)


def write_arrays(directory: epath.Path, tensors: Mapping[str, LazyTensor], max_bytes: int = CHUNK_BYTES) -> dict[str, str]:
    """Writes tensors that Orbax restores as a tree, with one chunk in memory at a time. Returns their checksums."""
    sums: dict[str, str] = {}
    tree: dict[str, dict] = {}
    for name, tensor in tensors.items():
        keys, chunks = name.split("/"), chunk_shape(tensor.shape, tensor.dtype.itemsize)
        array = {
            "shape": tensor.shape,
            "chunks": chunks,
            "dtype": np.dtype(tensor.dtype).str if tensor.dtype.kind != "V" else str(tensor.dtype),
            "compressor": {"id": "zstd", "level": 1},
        }
        spec: dict[str, Any] = {"driver": "zarr", "metadata": array, "store_data_equal_to_fill_value": True}
        spec["kvstore"] = _store(directory, ".".join(keys), ocdbt=True)
        store = ts.open(spec, create=True).result()

        def write_chunks(store=store, tensor=tensor, chunks=chunks) -> Iterator[np.ndarray]:
            row = 0
            for chunk in tensor.chunks(max_bytes, multiple_of=(*chunks, 1)[0]):
                target = store[row : row + len(chunk)] if tensor.shape else store
                target.write(chunk).result()
                row += len(chunk) if tensor.shape else 0
                yield chunk

        sums[name] = checksums.checksum_of_chunks(write_chunks())
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # dictionary key
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(tensor.shape)},
        }
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    (directory / METADATA).write_text(json.dumps({**metadata, "custom_metadata": None}))
    return sums


def _store(directory: epath.Path, name: str, ocdbt: bool) -> dict[str, Any]:
    """Returns the TensorStore key-value store of an array."""
    if ocdbt:
        return {"driver": "ocdbt", "base": key_value_store(f"{directory}/"), "path": f"{name}/"}
    return key_value_store(f"{directory}/{name}/")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
