"""Arrays on disk, as arrays that are read when asked, and only the part asked for."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from t5x_lab.config.errors import UserError

Index = tuple[slice, ...]
PART = 8 << 20  # bytes; what is in memory of an array that is read from one end to the other


class Unreadable(UserError):
    """Files that are damaged, or not what they are said to be."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array that is somewhere else.

    Attributes:
      shape, dtype: of the whole.
      read: the part at an index, one slice a dimension, all with steps of 1.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """All of it, in memory."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    def parts(self, most_bytes: int = PART) -> Iterator[np.ndarray]:
        """All of it, one part along the first axis after the other."""
        if not self.shape:
            yield self.whole()
            return
        rows = max(most_bytes * self.shape[0] // max(self.nbytes, 1), 1)
        for start in range(0, self.shape[0], rows):
            stop = min(start + rows, self.shape[0])
            yield self.read((slice(start, stop), *(slice(0, size) for size in self.shape[1:])))

    def cast(self, dtype: np.dtype) -> "Tensor":
        """The same numbers in another dtype."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else Tensor(self.shape, dtype, lambda i: np.asarray(self.read(i)).astype(dtype))

    def equals(self, other: "Tensor") -> bool:
        """Whether all numbers are the same; a part of each is in memory at a time."""
        return self.shape == other.shape and all(map(np.array_equal, self.parts(), other.parts()))

    def at(self, axis: int, position: int) -> "Tensor":
        """One entry along an axis, which goes."""

        def read(index: Index) -> np.ndarray:
            inner = (*index[:axis], slice(position, position + 1), *index[axis:])
            return np.squeeze(self.read(inner), axis)

        return Tensor(self.shape[:axis] + self.shape[axis + 1 :], self.dtype, read)

    def cut(self, axis: int, start: int, stop: int) -> "Tensor":
        """The entries from `start` up to `stop` along an axis."""

        def read(index: Index) -> np.ndarray:
            first, last, _ = index[axis].indices(stop - start)
            return self.read((*index[:axis], slice(start + first, start + last), *index[axis + 1 :]))

        return Tensor((*self.shape[:axis], stop - start, *self.shape[axis + 1 :]), self.dtype, read)

    def transposed(self) -> "Tensor":
        """With its dimensions in the opposite order."""
        return Tensor(self.shape[::-1], self.dtype, lambda index: self.read(index[::-1]).T)

    def reshaped(self, shape: Sequence[int]) -> "Tensor":
        """The same numbers, in the same order, in another shape; leading dimensions that stay are still read in part."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        same = next((i for i, (a, b) in enumerate(zip(self.shape, shape, strict=False)) if a != b), 0)

        def read(index: Index) -> np.ndarray:
            part = self.read((*index[:same], *(slice(0, size) for size in self.shape[same:])))
            return part.reshape(*part.shape[:same], *shape[same:])[(*(slice(None) for _ in range(same)), *index[same:])]

        return Tensor(shape, self.dtype, read)


def of_array(array: np.ndarray) -> Tensor:
    """An array that is in memory."""
    array = np.asarray(array)
    return Tensor(array.shape, array.dtype, lambda index: array[index])


def joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after the other along an axis that they have."""
    ends = np.cumsum([0, *(part.shape[axis] for part in parts)]).tolist()

    def read(index: Index) -> np.ndarray:
        start, stop, _ = index[axis].indices(ends[-1])
        pieces = [
            part.read((*index[:axis], slice(max(start - begin, 0), min(stop, end) - begin), *index[axis + 1 :]))
            for part, begin, end in zip(parts, ends[:-1], ends[1:], strict=True)
            if begin < stop and end > start
        ]
        return np.concatenate(pieces, axis)

    return Tensor((*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1 :]), parts[0].dtype, read)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape along a new first axis."""

    def read(index: Index) -> np.ndarray:
        return np.stack([parts[i].read(index[1:]) for i in range(*index[0].indices(len(parts)))])

    return Tensor((len(parts), *parts[0].shape), parts[0].dtype, read)


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str) -> None:
    """Raises a `UserError` when a tensor has not the shape that the model needs."""
    if found != wanted:
        raise UserError(
            f"{where} holds {name} with shape {found}, and the model needs {wanted}: it is of another model. Use the "
            "configuration that it was made with."
        )
