"""The arrays of a directory in Orbax's layout: read lazily, or written one after the other."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.lazy_tensors import CHUNK_BYTES, LazyTensor, Unreadable

METADATA = "_METADATA"
SMALLEST_CHUNK, LARGEST_CHUNK = 4 << 10, 1 << 20  # bytes
INDEX_BYTES = 64 << 20


def open_arrays(directory: epath.Path) -> dict[str, LazyTensor]:
    """Every array, by its name in the saved tree, joined by "/".

    Raises:
      UserError: when the directory is damaged, or not Orbax's.
    """
    try:
        metadata = json.loads((directory / METADATA).read_bytes())
        entries = [
            [str(key["key"]) for key in entry["key_metadata"]]
            for entry in metadata["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray", "scalar")
        ]
        if any(not name or "/" in name or name in (".", "..") for names in entries for name in names):
            raise ValueError("it names arrays outside the directory")
        how: dict[str, Any] = dict(
            ocdbt=bool(metadata.get("use_ocdbt")), zarr3=bool(metadata.get("use_zarr3")), last=LastRead()
        )
        return {"/".join(names): open_zarr(directory, ".".join(names), **how) for names in entries}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise Unreadable(f"{directory} cannot be read: {_first_line(error)}.") from error


class LastRead:
    """The chunks of one of the arrays that share this of which a part was read last: other slices of them, such as layers one
    after the other, or the parts of several devices, are not read again."""

    def __init__(self) -> None:
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": INDEX_BYTES}})  # for OCDBT's own index
        self._store: ts.TensorStore | None = None
        self._boxes: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(self, store: ts.TensorStore, index: tuple[slice, ...]) -> np.ndarray:
        """`store[index]`."""
        chunk = _chunk_shape(store)
        ends = [part.indices(size)[:2] for part, size in zip(index, store.shape, strict=True)]
        box = tuple(
            (start // c * c, min(-(-stop // c) * c, size))
            for (start, stop), c, size in zip(ends, chunk, store.shape, strict=True)
        )
        if self._store is not store:
            self._store, self._boxes = store, {}
        whole = self._boxes.get(box)
        if whole is None:
            whole = np.asarray(store[tuple(slice(*both) for both in box)].read().result())
            if list(box) != ends:
                self._boxes[box] = whole
        return whole[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ends, box, strict=True))]


def open_zarr(
    directory: epath.Path,
    name: str,
    *,
    last: LastRead,
    ocdbt: bool = False,
    zarr3: bool = False,
    assumed: dict[str, Any] | None = None,
) -> LazyTensor:
    """One array of a directory of zarr arrays, or of an OCDBT store of them.

    Args:
      directory, name: where it is.
      last: shared by the arrays that are read one after the other.
      ocdbt, zarr3: how it was written.
      assumed: replaces its own metadata.

    Raises:
      ValueError: when it is not there or damaged.
    """
    spec: dict[str, Any] = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": _store(directory, name, ocdbt),
        "fill_missing_data_reads": False,  # a chunk that is not there is damage, not zeros
    }
    if assumed is not None:
        spec["metadata"] = assumed
    store = ts.open(spec, context=last.context, open=True, read=True, assume_metadata=assumed is not None).result()
    dtype = np.dtype(store.dtype.numpy_dtype)
    if math.prod(_chunk_shape(store)) > max(2 * math.prod(store.shape), 1 << 20):  # it would be made in memory
        raise ValueError(f"the chunks of {name} are said to be {_chunk_shape(store)}, of an array of the shape {store.shape}")

    def read(index: tuple[slice, ...]) -> np.ndarray:
        try:
            return last.read(store, index)
        except ValueError as error:
            raise Unreadable(f"{directory} is damaged: {name} cannot be read ({_first_line(error)}).") from error

    return LazyTensor(tuple(store.shape), dtype, read)


def _chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    return tuple(chunk or size for chunk, size in zip(store.chunk_layout.read_chunk.shape or (), store.shape, strict=True))


def single_axes(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Axes of which every entry has chunks of its own: the layers of a stack, and of its attention [layers, …] the heads.

    Heads are before the entries of a head, and fewer than what they are projected from. Where chunks would become too small,
    as of what one of many devices holds, layers share them, and then heads.
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
    """The size of an array's chunks: small enough that a host which wants an eighth of any axis reads little else."""
    others = sorted(size for axis, size in enumerate(shape) if axis not in single_axes(shape, itemsize))
    parts = [max(size // 8, 1) for size in others]
    elements = parts[-1] * others[0] if len(shape) - len(parts) == 2 else parts[0] ** len(parts) if parts else 1
    return min(max(elements * itemsize, SMALLEST_CHUNK), LARGEST_CHUNK)


def chunks_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of an array's chunks, see `chunk_bytes`: every axis is split eight times before one is split more often."""
    single = single_axes(shape, itemsize)
    chunk = [1 if axis in single else size for axis, size in enumerate(shape)]
    while math.prod(chunk) * itemsize > chunk_bytes(shape, itemsize):
        often = [-(-size // c) >= 8 for size, c in zip(shape, chunk, strict=True)]
        axis = max(range(len(chunk)), key=lambda axis: (chunk[axis] > 1 and not often[axis], chunk[axis]))
        chunk[axis] = -(-chunk[axis] // 2)
    return tuple(chunk)


def write_arrays(directory: epath.Path, tensors: Mapping[str, LazyTensor], max_bytes: int = CHUNK_BYTES) -> dict[str, str]:
    """Writes what Orbax restores as a tree; a chunk of one tensor is in memory at a time. Returns the checksums."""
    sums: dict[str, str] = {}
    tree: dict[str, dict] = {}
    for name, tensor in tensors.items():
        keys, chunk_shape = name.split("/"), chunks_of(tensor.shape, tensor.dtype.itemsize)
        array = {
            "shape": tensor.shape,
            "chunks": chunk_shape,
            "dtype": np.dtype(tensor.dtype).str if tensor.dtype.kind != "V" else str(tensor.dtype),
            "compressor": {"id": "zstd", "level": 1},
        }
        spec: dict[str, Any] = {"driver": "zarr", "metadata": array, "store_data_equal_to_fill_value": True}
        spec["kvstore"] = _store(directory, ".".join(keys), ocdbt=True)
        store = ts.open(spec, create=True).result()

        def written(store=store, tensor=tensor) -> Iterator[np.ndarray]:
            row = 0
            for chunk in tensor.chunks(max_bytes, multiple_of=(*chunk_shape, 1)[0]):
                target = store[row : row + len(chunk)] if tensor.shape else store
                target.write(chunk).result()
                row += len(chunk) if tensor.shape else 0
                yield chunk

        sums[name] = checksums.checksum_of_chunks(written())
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # of a dictionary
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(tensor.shape)},
        }
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    (directory / METADATA).write_text(json.dumps({**metadata, "custom_metadata": None}))
    return sums


def _store(directory: epath.Path, name: str, ocdbt: bool) -> dict[str, Any] | str:
    """Where an array is, in TensorStore's words. A local path is no URL: it may have any characters."""
    remote = "://" in str(directory)
    if ocdbt:
        base = f"{directory}/" if remote else {"driver": "file", "path": f"{directory}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return f"{directory}/{name}/" if remote else {"driver": "file", "path": f"{directory}/{name}/"}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
