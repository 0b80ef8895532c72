"""A family of Hugging Face's models as a table: each of its tensors is one of ours, or several side by side.

The same table reads and writes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape, concatenate
from t5x_lab.networks.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of their tensors.

    Attributes:
      name: theirs.
      ours: names of ours, side by side along the last dimension as we store it.
      inputs: how many of our array's dimensions, from the first, are the matrix's inputs; the others are its outputs.
      transposed: whether theirs has outputs first, as PyTorch's `Linear` does.
      less: what theirs is less than ours: 1 of a scale that is stored as what it differs from 1.
    """

    name: str
    ours: tuple[str, ...]
    inputs: int = 1
    transposed: bool = False
    less: float = 0.0

    def theirs(self, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
        """Their tensor, made of ours."""
        flat = [tensors[name].reshape(self._flat(tensors[name].shape)) for name in self.ours]
        joined = flat[0] if len(flat) == 1 else concatenate(flat, axis=len(flat[0].shape) - 1)
        joined = joined.plus(-self.less) if self.less else joined
        return joined.transpose() if self.transposed else joined

    def ours_of(self, tensor: LazyTensor, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, LazyTensor]:
        """Our tensors, made of theirs, with these shapes by name; `where` is for messages."""
        joined = tensor.transpose() if self.transposed else tensor
        joined = joined.plus(self.less) if self.less else joined
        flat = [self._flat(shapes[name]) for name in self.ours]
        *rows, _ = flat[0]
        widths = [shape[-1] for shape in flat]
        check_shape(self.name, joined.shape, (*rows, sum(widths)), where)
        found, start = {}, 0
        for name, width in zip(self.ours, widths, strict=True):
            part = joined if len(self.ours) == 1 else joined.narrow(len(rows), start, start + width)
            found[name] = part.reshape(shapes[name])
            start += width
        return found

    def _flat(self, shape: tuple[int, ...]) -> list[int]:
        """[inputs, outputs] of a matrix, [size] of a vector."""
        if self.inputs > 0 and len(shape) > 1:
            return [math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])]
        return [math.prod(shape)]


def linear(name: str, ours: str, inputs: int = 1) -> Entry:
    """A matrix stored with outputs first."""
    return Entry(f"{name}.weight", (f"{ours}/kernel",), inputs, transposed=True)


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that `transformers` has one class for.

    Attributes:
      entries: their tensors, of one of our configurations.
      to_theirs: config.json, of one of our configurations; None where it is not of this family.
      to_ours: our configuration, of a config.json.
      aliases: names of theirs -> the same tensor's other name, both of which may be in a file.
    """

    entries: Callable[[Any], Iterator[Entry]]
    to_theirs: Callable[[TransformerConfig], dict[str, Any] | None]
    to_ours: Callable[[Mapping[str, Any]], TransformerConfig]
    aliases: Callable[[str], str]
