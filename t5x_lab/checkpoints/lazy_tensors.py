"""Lazy tensors: tensors on disk of which only requested slices are read."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from t5x_lab.config.errors import UserError

Index = tuple[slice, ...]
CHUNK_BYTES = 8 << 20  # bytes in memory when a tensor is read in chunks


class Unreadable(UserError):
    """Files that are damaged or of another kind than expected."""


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory. Its methods return lazy tensors that read through it.

    Attributes:
      shape, dtype: shape and dtype of the whole tensor.
      read: function (index) -> array. The index has one slice per dimension, with step 1.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read_all(self) -> np.ndarray:
        return self.read(tuple(slice(0, size) for size in self.shape))

    def chunks(self, max_bytes: int = CHUNK_BYTES, multiple_of: int = 1) -> Iterator[np.ndarray]:
        """Yields the tensor as consecutive slices of the first axis, whose sizes are multiples of `multiple_of`."""
        if not self.shape:
            yield self.read_all()
            return
        rows = max(max_bytes * self.shape[0] // max(self.nbytes, 1) // multiple_of, 1) * multiple_of
        for start in range(0, self.shape[0], rows):
            stop = min(start + rows, self.shape[0])
            yield self.read((slice(start, stop), *(slice(0, size) for size in self.shape[1:])))

    def equals(self, other: "LazyTensor") -> bool:
        """Returns whether all entries are equal, with one chunk of each in memory at a time."""
        return self.shape == other.shape and all(map(np.array_equal, self.chunks(), other.chunks()))

    def cast(self, dtype: np.dtype) -> "LazyTensor":
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda index: np.asarray(self.read(index)).astype(dtype))

    def plus(self, number: float) -> "LazyTensor":
        """Returns the tensor plus a number, float32."""
        return LazyTensor(
            self.shape, np.dtype(np.float32), lambda index: self.read(index).astype(np.float32) + np.float32(number)
        )

    def negative(self) -> "LazyTensor":
        return LazyTensor(self.shape, self.dtype, lambda index: -self.read(index))

    def index(self, axis: int, position: int) -> "LazyTensor":
        """Returns the entry at a position of an axis, without the axis."""

        def read(index: Index) -> np.ndarray:
            inner = (*index[:axis], slice(position, position + 1), *index[axis:])
            return np.squeeze(self.read(inner), axis)

        return LazyTensor(self.shape[:axis] + self.shape[axis + 1 :], self.dtype, read)

    def narrow(self, axis: int, start: int, stop: int) -> "LazyTensor":
        """Returns the entries from `start` to `stop` of an axis."""

        def read(index: Index) -> np.ndarray:
            first, last, _ = index[axis].indices(stop - start)
            return self.read((*index[:axis], slice(start + first, start + last), *index[axis + 1 :]))

        return LazyTensor((*self.shape[:axis], stop - start, *self.shape[axis + 1 :]), self.dtype, read)

    def transpose(self) -> "LazyTensor":
        """Returns the tensor with its axes in reverse order."""
        return LazyTensor(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

    def reshape(self, shape: Sequence[int]) -> "LazyTensor":
        """Reshapes like NumPy. Along leading axes whose size does not change, slices read only their part."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        same = next((i for i, (a, b) in enumerate(zip(self.shape, shape, strict=False)) if a != b), 0)

        def read(index: Index) -> np.ndarray:
            part = self.read((*index[:same], *(slice(0, size) for size in self.shape[same:])))
            return part.reshape(*part.shape[:same], *shape[same:])[(*(slice(None) for _ in range(same)), *index[same:])]

        return LazyTensor(shape, self.dtype, read)


def from_array(array: np.ndarray) -> LazyTensor:
    """Returns a lazy tensor for an array in memory."""
    array = np.asarray(array)
    return LazyTensor(array.shape, array.dtype, lambda index: array[index])


def concatenate(tensors: Sequence[LazyTensor], axis: int) -> LazyTensor:
    """Concatenates lazy tensors along an axis, like NumPy."""
    ends = np.cumsum([0, *(tensor.shape[axis] for tensor in tensors)]).tolist()

    def read(index: Index) -> np.ndarray:
        start, stop, _ = index[axis].indices(ends[-1])
        pieces = [
            tensor.read((*index[:axis], slice(max(start - begin, 0), min(stop, end) - begin), *index[axis + 1 :]))
            for tensor, begin, end in zip(tensors, ends[:-1], ends[1:], strict=True)
            if begin < stop and end > start
        ]
        return np.concatenate(pieces, axis)

    first = tensors[0]
    return LazyTensor((*first.shape[:axis], ends[-1], *first.shape[axis + 1 :]), first.dtype, read)


def mean(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Returns the mean of lazy tensors of one shape, float32, summed in float64."""

    def read(index: Index) -> np.ndarray:
        total = tensors[0].read(index).astype(np.float64)
        for tensor in tensors[1:]:
            total += tensor.read(index)
        return (total / len(tensors)).astype(np.float32)

    return LazyTensor(tensors[0].shape, np.dtype(np.float32), read)


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Stacks lazy tensors along a new first axis, like NumPy."""

    def read(index: Index) -> np.ndarray:
        return np.stack([tensors[i].read(index[1:]) for i in range(*index[0].indices(len(tensors)))])

    return LazyTensor((len(tensors), *tensors[0].shape), tensors[0].dtype, read)


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], path: str) -> None:
    """Raises a `UserError` if a tensor does not have the expected shape."""
    if shape != expected:
        raise UserError(
            f"{path} has {name} with shape {shape}, but the model needs {expected}. Use the configuration it was trained with."
        )
