"""The arrays of a directory in Orbax's layout: read lazily, or written one after the other."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.lazy_tensors import CHUNK_BYTES, LazyTensor, Unreadable

METADATA = "_METADATA"


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
        return {
            "/".join(names): open_zarr(
                directory, ".".join(names), bool(metadata.get("use_ocdbt")), bool(metadata.get("use_zarr3"))
            )
            for names in entries
        }
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise Unreadable(f"{directory} cannot be read: {_first_line(error)}.") from error


def open_zarr(
    directory: epath.Path, name: str, ocdbt: bool = False, zarr3: bool = False, assumed: dict[str, Any] | None = None
) -> LazyTensor:
    """One array of a directory of zarr arrays, or of an OCDBT store of them; `assumed` replaces its own metadata.

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
    store = ts.open(spec, open=True, read=True, assume_metadata=assumed is not None).result()
    dtype = np.dtype(store.dtype.numpy_dtype)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        try:
            return np.asarray(store[index].read().result())
        except ValueError as error:
            raise Unreadable(f"{directory} is damaged: {name} cannot be read ({_first_line(error)}).") from error

    return LazyTensor(tuple(store.shape), dtype, read)


def write_arrays(directory: epath.Path, tensors: Mapping[str, LazyTensor], max_bytes: int = CHUNK_BYTES) -> dict[str, str]:
    """Writes what Orbax restores as a tree; a chunk of one tensor is in memory at a time. Returns the checksums."""
    sums: dict[str, str] = {}
    tree: dict[str, dict] = {}
    for name, tensor in tensors.items():
        keys = name.split("/")
        array = {
            "shape": tensor.shape,
            "chunks": (min(tensor.chunk_rows(max_bytes), tensor.shape[0]), *tensor.shape[1:]) if tensor.shape else (),
            "dtype": np.dtype(tensor.dtype).str if tensor.dtype.kind != "V" else str(tensor.dtype),
            "compressor": {"id": "zstd", "level": 1},
        }
        spec: dict[str, Any] = {"driver": "zarr", "metadata": array, "store_data_equal_to_fill_value": True}
        spec["kvstore"] = _store(directory, ".".join(keys), ocdbt=True)
        store = ts.open(spec, create=True).result()

        def written(store=store, tensor=tensor) -> Iterator[np.ndarray]:
            row = 0
            for chunk in tensor.chunks(max_bytes):
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
