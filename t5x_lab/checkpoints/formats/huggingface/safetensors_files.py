"""Reads and writes safetensors files, one tensor at a time.

A file consists of the length of the header (8 bytes), the header (JSON: dtype, shape and offsets by name), and the tensors.
Nothing is executed, and sizes are checked against the size of the file.
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
from t5x_lab.config.json_files import parse_json

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
_MAX_HEADER_BYTES = 100 << 20
_BYTES_PER_FILE = 5 << 30


def open_file(path: pathlib.Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a file.

    Raises:
      UserError: if it is damaged or inconsistent.
    """
    if not path.is_file():
        raise Unreadable(f"{path} is not a file.")
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise Unreadable(
                f"{path} is not a complete safetensors file: its header has {length:,} bytes, but the file {size:,}. Copy it "
                "again."
            )
        try:
            header = parse_json(file.read(length), object_pairs_hook=_reject_duplicates)
            header.pop("__metadata__", None)
            tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
            offsets = sorted(tuple(entry["data_offsets"]) for entry in header.values())
            if any(start < end for (_, end), (start, _) in itertools.pairwise(offsets)):
                raise ValueError("two tensors overlap")
            return tensors
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unreadable(
                f"{path} has a damaged header ({type(error).__name__}: {str(error)[:100]}). Copy it again."
            ) from error


def _reject_duplicates(pairs: list[tuple]) -> dict:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _tensor(path: pathlib.Path, name: str, entry: Mapping, begin: int, size: int) -> LazyTensor:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise Unreadable(f"{path} has {name} with dtype {entry['dtype']}. t5x_lab reads {', '.join(DTYPES)}.")
    dtype = DTYPES[entry["dtype"]]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has shape {shape}")
    if stop - start != math.prod(shape) * dtype.itemsize or begin + stop > size:
        raise Unreadable(
            f"{path} is incomplete: {name}, {shape} of {entry['dtype']}, should be at bytes {start:,} to {stop:,} of "
            f"{size - begin:,}. Copy it again."
        )

    def read(index: Index) -> np.ndarray:
        mapped = np.memmap(path, np.uint8, "r", begin + start, (stop - start,)) if stop > start else np.zeros(0, np.uint8)
        return np.array(mapped.view(dtype).reshape(shape)[index])

    return LazyTensor(shape, dtype, read)


def open_directory(directory: pathlib.Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a model, from `model.safetensors` or the files in its index.

    Raises:
      UserError: if there are none, or a file is missing, damaged or outside of the directory.
    """
    index = directory / INDEX
    if not index.exists():
        single = directory / "model.safetensors"
        if single.exists():
            return open_file(single)
        pickles = sorted(file.name for file in directory.glob("*.bin"))
        advice = (
            f" {pickles[0]} is a pickle file, which t5x_lab does not read because it can execute code. Save the model again "
            "with save_pretrained of a current transformers."
            if pickles
            else ""
        )
        raise Unreadable(f"{directory} has no model.safetensors.{advice}")
    try:
        files = parse_json(index.read_bytes())["weight_map"]
        listed = {str(name): str(file) for name, file in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{index} is damaged ({type(error).__name__}). Copy it again.") from error
    outside = next((file for file in listed.values() if not is_file_name(file)), None)
    if outside:
        raise Unreadable(f'{index} lists "{outside}", which is not a file of its directory. Do not trust this model.')
    tensors = {}
    for file in sorted(set(listed.values())):
        if not (directory / file).is_file():
            raise Unreadable(f"{index} lists {file}, which does not exist. Copy it again.")
        file_tensors = open_file(directory / file)
        for name in [name for name, listed_file in listed.items() if listed_file == file]:
            if name not in file_tensors:
                raise Unreadable(f"{index} lists {name} in {file}, which does not have it. Copy both again.")
            tensors[name] = file_tensors[name]
    return tensors


def write(directory: pathlib.Path, tensors: Mapping[str, LazyTensor], bytes_per_file: int = _BYTES_PER_FILE) -> list[str]:
    """Writes a model as `model.safetensors`, or as numbered files with an index, with one tensor in memory at a time.

    Returns:
      The names of the files.
    """
    groups: list[list[str]] = [[]]
    bytes_left = bytes_per_file
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > bytes_left:
            groups.append([])
            bytes_left = bytes_per_file
        groups[-1].append(name)
        bytes_left -= tensor.nbytes
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
    header: dict = {"__metadata__": {"format": "pt"}}  # required by transformers
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
