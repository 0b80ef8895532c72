"""MD5s in arrays, in columns of files, and their buckets: ranges, so that sorted buckets one after the other are sorted."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])  # 16 bytes of an MD5 in their order


def digest_array(digests: bytes | bytearray) -> np.ndarray:
    """Returns MD5s, joined, as an array of `DIGEST`."""
    return np.frombuffer(digests, DIGEST)


def join_digests(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays of `DIGEST` as one. NumPy alone would change the order of their bytes."""
    return np.concatenate(parts).astype(DIGEST)


def to_column(digests: np.ndarray) -> pa.Array:
    """Returns an array of `DIGEST` as a column of 16 bytes each."""
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(digests), [None, pa.py_buffer(digests.tobytes())])


def from_column(column: pa.Array) -> np.ndarray:
    """Returns a column of 16 bytes each as an array of `DIGEST`."""
    return np.frombuffer(column.buffers()[1], DIGEST, len(column), column.offset * 16)


def buckets_of(digests: np.ndarray, num_buckets: int) -> np.ndarray:
    """Returns the bucket of each MD5 in an array of `DIGEST`."""
    return (digests["high"] >> np.uint64(32)).astype(np.uint64) * np.uint64(num_buckets) >> np.uint64(32)


def bucket_of(digest: bytes, num_buckets: int) -> int:
    """Returns the bucket of an MD5."""
    return int.from_bytes(digest[:4], "big") * num_buckets >> 32
