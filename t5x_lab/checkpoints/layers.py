"""Parameter names with one entry a layer, in which all formats meet.

Our parameters are stacked: `decoder/layers/mlp/wo/kernel` [layers, mlp, embed]. Foreign formats, and rules that name single
layers, have them unstacked: `decoder/layers_0/mlp/wo/kernel` [mlp, embed], and so on.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from t5x_lab.checkpoints.layout import named_leaves
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, stack
from t5x_lab.models.model import Model, ModelConfig
from t5x_lab.networks.network import Network

UNSTACKED = re.compile(r"(.*?)/layers_(\d+)/(.*)")
_STACKED = re.compile(r"(.*?)/layers/(?!\d+/)(.*)")  # not a list of layers, each with arrays of its own


class Part(NamedTuple):
    """What an unstacked name stands for: a whole parameter, or one layer of it."""

    parameter: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def unstacked_parts(leaves: Mapping[str, Any]) -> dict[str, Part]:
    """Parts by their unstacked names, of whatever has shapes, in the parameters' order."""
    parts = {}
    for name, leaf in leaves.items():
        match, shape = _STACKED.fullmatch(name), tuple(leaf.shape)
        if match and shape:
            for i in range(shape[0]):
                parts[f"{match[1]}/layers_{i}/{match[2]}"] = Part(name, i, shape[1:])
        else:
            parts[name] = Part(name, None, shape)
    return parts


def parts_of(network: Network) -> dict[str, Part]:
    """Parts of a network's parameters."""
    model = Model(ModelConfig(network))
    return unstacked_parts(named_leaves(model.abstract_params))


def unstack_layers(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Our tensors by unstacked names."""
    parts = unstacked_parts(tensors)
    parameter = lambda part: tensors[part.parameter]
    return {
        name: parameter(part) if part.layer is None else parameter(part).index(0, part.layer) for name, part in parts.items()
    }


def stack_layers(tensors: Mapping[str, LazyTensor], parts: Mapping[str, Part]) -> dict[str, LazyTensor]:
    """The inverse of `unstack_layers`; tensors come in the order of their layers, and are the parts that `parts` says."""
    by_parameter: dict[str, list[LazyTensor]] = {}
    for name, tensor in tensors.items():
        by_parameter.setdefault(parts[name].parameter, []).append(tensor)
    is_stacked = {part.parameter for part in parts.values() if part.layer is not None}
    return {name: stack(group) if name in is_stacked else group[0] for name, group in by_parameter.items()}
