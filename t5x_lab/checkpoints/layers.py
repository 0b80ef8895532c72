"""Unstacked parameter names, with one entry per layer, which all formats are converted to.

Our parameters are stacked: `decoder/layers/mlp/wo/kernel` [layers, mlp, embed]. Other formats, and rules for single layers, use
unstacked names: `decoder/layers_0/mlp/wo/kernel` [mlp, embed].
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from t5x_lab.checkpoints.layout import named_leaves
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, stack
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.network import Network

UNSTACKED = re.compile(r"(.*?)/layers_(\d+)/(.*)")
_STACKED = re.compile(r"(.*?)/layers/(?!\d+/)(.*)")  # does not match lists of layers with separate arrays


class Part(NamedTuple):
    """The meaning of an unstacked name: a parameter, or one layer of it."""

    parameter: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def unstacked_parts(leaves: Mapping[str, Any]) -> dict[str, Part]:
    """Returns parts by unstacked name for leaves with shapes, in the order of the parameters."""
    parts = {}
    for name, leaf in leaves.items():
        match, shape = _STACKED.fullmatch(name), tuple(leaf.shape)
        if match and shape:
            for i in range(shape[0]):
                parts[f"{match[1]}/layers_{i}/{match[2]}"] = Part(name, i, shape[1:])
        else:
            parts[name] = Part(name, None, shape)
    return parts


def network_parts(network: Network) -> dict[str, Part]:
    """Returns the parts of a network's parameters."""
    model = Model(ModelConfig(network))
    return unstacked_parts(named_leaves(model.abstract_params))


def unstack_layers(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns stacked tensors by unstacked name."""
    parts = unstacked_parts(tensors)
    parameter = lambda part: tensors[part.parameter]
    return {
        name: parameter(part) if part.layer is None else parameter(part).index(0, part.layer) for name, part in parts.items()
    }


def stack_layers(tensors: Mapping[str, LazyTensor], parts: Mapping[str, Part]) -> dict[str, LazyTensor]:
    """Stacks the layers that `unstack_layers` separated.

    Args:
      tensors: tensors by unstacked name, in the order of their layers.
      parts: meaning of these names.
    """
    by_parameter: dict[str, list[LazyTensor]] = {}
    for name, tensor in tensors.items():
        by_parameter.setdefault(parts[name].parameter, []).append(tensor)
    is_stacked = {part.parameter for part in parts.values() if part.layer is not None}
    return {name: stack(group) if name in is_stacked else group[0] for name, group in by_parameter.items()}
