"""Safetensors files, read and written one tensor at a time.

A file is the header's length (8 bytes), the header (JSON: name to dtype, shape and offsets), and the numbers, one tensor after
the other. Nothing in it is executed, and nothing is read that the file's own size does not vouch for.
"""

import itertools
import json
import math
import os
import pathlib
import struct
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from t5x_lab.checkpoints.layout import is_file_name
from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor, Unreadable

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20
_BYTES_PER_FILE = 5 << 30


def open_file(path: pathlib.Path) -> dict[str, LazyTensor]:
    """The tensors of one file.

    Raises:
      UserError: when it is damaged, or says what cannot be.
    """
    if not path.is_file():
        raise Unreadable(f"{path} is no file.")
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise Unreadable(
                f"{path} is no whole safetensors file: its header is said to have {length:,} bytes, and the file has {size:,}. "
                "Copy it again."
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_doubles)
            header.pop("__metadata__", None)
            tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
            places = sorted(tuple(entry["data_offsets"]) for entry in header.values())
            if any(start < end for (_, end), (start, _) in itertools.pairwise(places)):
                raise ValueError("two tensors lie over each other")
            return tensors
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Unreadable(
                f"{path} has a damaged header ({type(error).__name__}: {str(error)[:100]}). Copy it again."
            ) from error


def _without_doubles(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _tensor(path: pathlib.Path, name: str, entry: Mapping, begin: int, size: int) -> LazyTensor:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise Unreadable(f"{path} holds {name} as {entry['dtype']}; t5x_lab reads {', '.join(DTYPES)}.")
    dtype = DTYPES[entry["dtype"]]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has shape {shape}")
    if stop - start != math.prod(shape) * dtype.itemsize or begin + stop > size:
        raise Unreadable(
            f"{path} is not whole: {name}, {shape} of {entry['dtype']}, is said to lie at bytes {start:,} to {stop:,} of "
            f"{size - begin:,}. Copy it again."
        )

    def read(index: Index) -> np.ndarray:
        mapped = np.memmap(path, np.uint8, "r", begin + start, (stop - start,)) if stop > start else np.zeros(0, np.uint8)
        return np.array(mapped.view(dtype).reshape(shape)[index])

    return LazyTensor(shape, dtype, read)


def open_directory(directory: pathlib.Path) -> dict[str, LazyTensor]:
    """The tensors of a model: of `model.safetensors`, or of the files that its index lists.

    Raises:
      UserError: when there are none, or a file is missing, damaged or outside the directory.
    """
    index = directory / INDEX
    if not index.exists():
        single = directory / "model.safetensors"
        if single.exists():
            return open_file(single)
        pickles = sorted(file.name for file in directory.glob("*.bin"))
        more = (
            f" {pickles[0]} is a pickle, which can execute anything when it is read, so t5x_lab does not: save the model again "
            "with save_pretrained of a current transformers."
            if pickles
            else ""
        )
        raise Unreadable(f"{directory} has no model.safetensors.{more}")
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        listed = {str(name): str(file) for name, file in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{index} is damaged ({type(error).__name__}). Copy it again.") from error
    outside = next((file for file in listed.values() if not is_file_name(file)), None)
    if outside:
        raise Unreadable(f'{index} lists "{outside}", which is not a file of its directory. Do not trust this model.')
    tensors = {}
    for file in sorted(set(listed.values())):
        if not (directory / file).is_file():
            raise Unreadable(f"{index} lists {file}, which is not there. Copy it again.")
        found = open_file(directory / file)
        for name in [name for name, where in listed.items() if where == file]:
            if name not in found:
                raise Unreadable(f"{index} says that {file} holds {name}; it does not. Copy both again.")
            tensors[name] = found[name]
    return tensors


def write(directory: pathlib.Path, tensors: Mapping[str, LazyTensor], bytes_per_file: int = _BYTES_PER_FILE) -> list[str]:
    """Writes a model as `model.safetensors`, or as numbered files and their index; one tensor is in memory at a time.

    Returns:
      the names of the files.
    """
    groups: list[list[str]] = [[]]
    room = bytes_per_file
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = bytes_per_file
        groups[-1].append(name)
        room -= tensor.nbytes
    count = len(groups)
    files = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, names in zip(files, groups, strict=True):
        write_file(directory / file, {name: tensors[name] for name in names})
    if count == 1:
        return files
    weight_map = {name: file for file, names in zip(files, groups, strict=True) for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    return [*files, INDEX]


def write_file(path: pathlib.Path, tensors: Mapping[str, LazyTensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict = {"__metadata__": {"format": "pt"}}  # transformers reads no other
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                file.write(np.ascontiguousarray(chunk).tobytes())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
