"""Tables that map the tensors of a Hugging Face model family to ours, for reading and writing."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape, concatenate
from t5x_lab.networks.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """A Hugging Face tensor and the parameters that it consists of.

    Attributes:
      name: name of the Hugging Face tensor.
      parameters: names of our parameters, concatenated along the last axis.
      inputs: number of leading axes of our array that are inputs of the matrix. The others are outputs.
      transposed: the Hugging Face tensor has outputs first, as PyTorch's `Linear`.
      less: difference of our value and the stored value, such as 1 for a scale that is stored as its difference from 1.
    """

    name: str
    parameters: tuple[str, ...]
    inputs: int = 1
    transposed: bool = False
    less: float = 0.0

    def export(self, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
        """Returns the Hugging Face tensor made from our tensors."""
        flat = [tensors[name].reshape(self._flat(tensors[name].shape)) for name in self.parameters]
        joined = flat[0] if len(flat) == 1 else concatenate(flat, axis=len(flat[0].shape) - 1)
        joined = joined.plus(-self.less) if self.less else joined
        return joined.transpose() if self.transposed else joined

    def split(self, tensor: LazyTensor, shapes: Mapping[str, tuple[int, ...]], path: str) -> dict[str, LazyTensor]:
        """Returns our tensors made from the Hugging Face tensor.

        Args:
          tensor: the Hugging Face tensor.
          shapes: shapes of our parameters by name.
          path: path for messages.
        """
        joined = tensor.transpose() if self.transposed else tensor
        joined = joined.plus(self.less) if self.less else joined
        flat = [self._flat(shapes[name]) for name in self.parameters]
        *rows, _ = flat[0]
        widths = [shape[-1] for shape in flat]
        check_shape(self.name, joined.shape, (*rows, sum(widths)), path)
        tensors, start = {}, 0
        for name, width in zip(self.parameters, widths, strict=True):
            part = joined if len(self.parameters) == 1 else joined.narrow(len(rows), start, start + width)
            tensors[name] = part.reshape(shapes[name])
            start += width
        return tensors

    def _flat(self, shape: tuple[int, ...]) -> list[int]:
        """Returns [inputs, outputs] for a matrix, [size] for a vector."""
        if self.inputs > 0 and len(shape) > 1:
            return [math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])]
        return [math.prod(shape)]


def linear(name: str, module: str, inputs: int = 1) -> Entry:
    """Returns the entry of a PyTorch `Linear`, which is stored with outputs first."""
    return Entry(f"{name}.weight", (f"{module}/kernel",), inputs, transposed=True)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models that share a class in `transformers`.

    Attributes:
      entries: function that returns the tensors of a configuration.
      to_hf_config: function that returns the config.json of a configuration; None if it is not in this family.
      from_hf_config: function that returns our configuration for a config.json.
      canonical_name: function that maps alternative tensor names to the usual ones; None for tensors that are not read.
    """

    entries: Callable[[Any], Iterator[Entry]]
    to_hf_config: Callable[[TransformerConfig], dict[str, Any] | None]
    from_hf_config: Callable[[Mapping[str, Any]], TransformerConfig]
    canonical_name: Callable[[str], str | None]
