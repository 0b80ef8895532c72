"""Reads TensorFlow's checkpoints of version 2 lazily, without TensorFlow.

`PREFIX.index` is a sorted string table (LevelDB's format) of protocol buffers: a `BundleHeaderProto` under the empty key, and a
`BundleEntryProto` with dtype, shape, shard, offset and size under the name of each tensor. The bytes are in
`PREFIX.data-00000-of-00002` and so on. Nothing is executed, and sizes are checked against the sizes of the files.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor, Unreadable

DTYPES = {  # numbers of `tensorflow.DataType`
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    5: np.dtype(np.int16),
    6: np.dtype(np.int8),
    9: np.dtype(np.int64),
    10: np.dtype(bool),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
    22: np.dtype(np.uint32),
    23: np.dtype(np.uint64),
}
_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_MAX_INDEX_BYTES = 256 << 20


def index_file(prefix: epath.Path) -> epath.Path:
    """Returns the file that lists the tensors of a checkpoint."""
    return prefix.with_name(f"{prefix.name}.index")


def open_bundle(prefix: epath.Path) -> dict[str, LazyTensor]:
    """Returns the numeric tensors of a checkpoint by name.

    Args:
      prefix: path without `.index`, such as `model.ckpt-1000000`.

    Raises:
      UserError: if a file is missing, damaged, or of an unsupported kind.
    """
    file = index_file(prefix)
    size = file.stat().length
    if size > _MAX_INDEX_BYTES:
        raise Unreadable(f"{file} has {size:,} bytes, which is too large for an index of tensors.")
    try:
        entries = {key.decode(): _parse_message(value) for key, value in _read_table(file.read_bytes())}
        header = entries.pop("", {})
        shards = header.get(1, [1])[-1]
        if header.get(2, [0])[-1]:
            raise ValueError("it was written on a big-endian machine")
        sizes: dict[int, int] = {}
        tensors = {name: _open_tensor(prefix, name, entry, shards, sizes) for name, entry in entries.items()}
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, struct.error, OverflowError) as error:
        raise Unreadable(f"{file} is not an index of TensorFlow's checkpoints, or damaged ({str(error)[:100]}).") from error
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _open_tensor(
    prefix: epath.Path, name: str, entry: dict[int, list], shards: int, sizes: dict[int, int]
) -> LazyTensor | None:
    """Returns a tensor; None if it has no numeric dtype. `sizes` collects the sizes of data files by shard."""
    get = lambda field: entry.get(field, [0])[-1]
    dtype = DTYPES.get(get(1))
    if dtype is None:
        return None
    if 7 in entry:
        raise Unreadable(f"{prefix} has {name} in slices (a partitioned variable), which t5x_lab does not read.")
    dims = _parse_message(get(2)).get(2, []) if 2 in entry else []
    shape = tuple(_parse_message(dim).get(1, [0])[-1] for dim in dims)
    shard, offset, length = get(3), get(4), get(5)
    data = prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
    if shard not in sizes:
        if not data.exists():
            raise Unreadable(f"{prefix} is incomplete: {name} should be in {data}, which does not exist.")
        sizes[shard] = data.stat().length
    if length != math.prod(shape) * dtype.itemsize or offset + length > sizes[shard]:
        raise Unreadable(
            f"{data} is incomplete: {name}, {shape} of {dtype}, should be at bytes {offset:,} to {offset + length:,} of "
            f"{sizes[shard]:,}. Copy it again."
        )

    def read(index: Index) -> np.ndarray:
        if not shape:
            return np.frombuffer(_read_bytes(data, offset, length), dtype).reshape(())
        start, stop, _ = index[0].indices(shape[0])
        row = length // max(shape[0], 1)
        rows = np.frombuffer(_read_bytes(data, offset + start * row, max(stop - start, 0) * row), dtype)
        return rows.reshape(max(stop - start, 0), *shape[1:])[(slice(None), *index[1:])]

    return LazyTensor(shape, dtype, read)


def _read_bytes(path: epath.Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


# ---- sorted string tables


def _read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table: a footer that points to an index block, which points to the other blocks."""
    footer = data[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("it has no footer of a sorted string table")
    position = 0
    for _ in range(2):  # the block of meta data, which is not used
        _, position = _varint(footer, position)
    for _, handle in _read_block(data, footer[position:]):
        yield from _read_block(data, handle)


def _read_block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block, whose keys are stored without the prefix that they share with the one before."""
    start, position = _varint(handle, 0)
    size, _ = _varint(handle, position)
    block = data[start : start + size]
    if start + size >= len(data) or data[start + size] != 0:
        raise ValueError("a block is compressed or out of the file")
    (restarts,) = struct.unpack("<I", block[-4:])
    end, position, key = size - 4 * (restarts + 1), 0, b""
    while position < end:
        shared, position = _varint(block, position)
        own, position = _varint(block, position)
        length, position = _varint(block, position)
        key = key[:shared] + block[position : position + own]
        position += own
        yield key, block[position : position + length]
        position += length


# ---- protocol buffers


def _parse_message(data: bytes) -> dict[int, list[Any]]:
    """Returns the values of a message by the number of their field: integers, or bytes of strings and messages."""
    fields: dict[int, list[Any]] = {}
    value: int | bytes
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(data, position)
        elif kind == 2:
            length, position = _varint(data, position)
            value, position = data[position : position + length], position + length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value, position = data[position : position + width], position + width
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        if position > len(data):
            raise ValueError("a message ends early")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the variable-length integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError("an integer has more than ten bytes")
