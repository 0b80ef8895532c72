"""Names of parameters with layers counted singly, in which all formats meet.

Here the layers of a stack lie in one array, `decoder/layers/mlp/wo/kernel` [layers, mlp, embed]; elsewhere, and in rules that
reach single layers, they are `decoder/layers_0/mlp/wo/kernel` [mlp, embed] and so on.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from t5x_lab.checkpoints.tensors import Tensor, stacked

_STACKED = re.compile(r"(.*?)/layers/(.*)")
SINGLE = re.compile(r"(.*?)/layers_(\d+)/(.*)")


class Part(NamedTuple):
    """Where a single tensor is in the parameters: all of one, or a layer of one."""

    parameter: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def single_layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Parts of the parameters with these shapes, by names with layers counted singly, in the parameters' order."""
    parts = {}
    for name, shape in shapes.items():
        match = _STACKED.fullmatch(name)
        if match:
            for i in range(shape[0]):
                parts[f"{match[1]}/layers_{i}/{match[2]}"] = Part(name, i, tuple(shape[1:]))
        else:
            parts[name] = Part(name, None, tuple(shape))
    return parts


def split_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors with layers counted singly."""
    parts = single_layers({name: tensor.shape for name, tensor in tensors.items()})
    whole = lambda part: tensors[part.parameter]
    return {name: whole(part) if part.layer is None else whole(part).at(0, part.layer) for name, part in parts.items()}


def join_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `split_layers`."""
    joined: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # in the order of the layers
        joined.setdefault(re.sub(r"/layers_\d+/", "/layers/", name), []).append(tensor)
    return {name: stacked(group) if "/layers/" in name else group[0] for name, group in joined.items()}
