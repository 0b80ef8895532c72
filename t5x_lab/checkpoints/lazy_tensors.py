"""Tensors on disk that are read when asked, and only the slice that is asked for."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from t5x_lab.config.errors import UserError

Index = tuple[slice, ...]
CHUNK_BYTES = 8 << 20  # what is in memory of a tensor that is read from one end to the other


class Unreadable(UserError):
    """Files that are damaged, or not what they are said to be."""


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory; its methods return others, which read through it.

    Attributes:
      shape, dtype: of the whole tensor.
      read: (index) -> the array there; the index has one slice a dimension, each of step 1.
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
        """The whole tensor, as slices of the first axis one after the other, each of a multiple of so many entries."""
        if not self.shape:
            yield self.read_all()
            return
        rows = max(max_bytes * self.shape[0] // max(self.nbytes, 1) // multiple_of, 1) * multiple_of
        for start in range(0, self.shape[0], rows):
            stop = min(start + rows, self.shape[0])
            yield self.read((slice(start, stop), *(slice(0, size) for size in self.shape[1:])))

    def equals(self, other: "LazyTensor") -> bool:
        """Whether all numbers are equal; a chunk of each is in memory at a time."""
        return self.shape == other.shape and all(map(np.array_equal, self.chunks(), other.chunks()))

    def cast(self, dtype: np.dtype) -> "LazyTensor":
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda index: np.asarray(self.read(index)).astype(dtype))

    def plus(self, number: float) -> "LazyTensor":
        """With a number added to every entry, float32."""
        return LazyTensor(
            self.shape, np.dtype(np.float32), lambda index: self.read(index).astype(np.float32) + np.float32(number)
        )

    def negative(self) -> "LazyTensor":
        return LazyTensor(self.shape, self.dtype, lambda index: -self.read(index))

    def index(self, axis: int, position: int) -> "LazyTensor":
        """The entry at a position of an axis; the axis is removed."""

        def read(index: Index) -> np.ndarray:
            inner = (*index[:axis], slice(position, position + 1), *index[axis:])
            return np.squeeze(self.read(inner), axis)

        return LazyTensor(self.shape[:axis] + self.shape[axis + 1 :], self.dtype, read)

    def narrow(self, axis: int, start: int, stop: int) -> "LazyTensor":
        """The entries from `start` up to `stop` of an axis."""

        def read(index: Index) -> np.ndarray:
            first, last, _ = index[axis].indices(stop - start)
            return self.read((*index[:axis], slice(start + first, start + last), *index[axis + 1 :]))

        return LazyTensor((*self.shape[:axis], stop - start, *self.shape[axis + 1 :]), self.dtype, read)

    def transpose(self) -> "LazyTensor":
        """With the axes in reverse order."""
        return LazyTensor(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

    def reshape(self, shape: Sequence[int]) -> "LazyTensor":
        """As NumPy's; along leading axes whose size does not change, slices still read only their part."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        same = next((i for i, (a, b) in enumerate(zip(self.shape, shape, strict=False)) if a != b), 0)

        def read(index: Index) -> np.ndarray:
            part = self.read((*index[:same], *(slice(0, size) for size in self.shape[same:])))
            return part.reshape(*part.shape[:same], *shape[same:])[(*(slice(None) for _ in range(same)), *index[same:])]

        return LazyTensor(shape, self.dtype, read)


def from_array(array: np.ndarray) -> LazyTensor:
    """A tensor that is in memory."""
    array = np.asarray(array)
    return LazyTensor(array.shape, array.dtype, lambda index: array[index])


def concatenate(tensors: Sequence[LazyTensor], axis: int) -> LazyTensor:
    """As NumPy's."""
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


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """As NumPy's, along a new first axis."""

    def read(index: Index) -> np.ndarray:
        return np.stack([tensors[i].read(index[1:]) for i in range(*index[0].indices(len(tensors)))])

    return LazyTensor((len(tensors), *tensors[0].shape), tensors[0].dtype, read)


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str) -> None:
    """Raises a `UserError` when a tensor does not have the shape that the model needs."""
    if found != wanted:
        raise UserError(
            f"{where} holds {name} with shape {found}, and the model needs {wanted}: it is of another model. Use the "
            "configuration that it was made with."
        )
