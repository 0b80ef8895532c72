"""Modules of several layers at once, whose every parameter has a leading `layers` axis."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

LAYERS = "layers"


def make_stacked(make_layer: Callable[[nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs) -> Any:
    """One module of so many layers, each initialised with its own key."""
    graph, params = nnx.split(nnx.eval_shape(lambda: make_layer(nnx.Rngs(params=0))), nnx.Param)

    def init(key):
        return nnx.to_pure_dict(nnx.state(make_layer(nnx.Rngs(params=key)), nnx.Param))

    nnx.replace_by_pure_dict(params, jax.vmap(init)(jax.random.split(rngs.params(), num_layers)))
    for _, param in nnx.to_flat_state(params):
        axes = param.get_metadata("axes", None) or (None,) * (param.get_value().ndim - 1)
        param.set_metadata(axes=(LAYERS, *axes))
    return nnx.merge(graph, params)


def layers_of(module: nnx.Module) -> int:
    """How many layers a module is of; 0 where it is one of no stack."""
    for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if (param.get_metadata("axes", None) or (None,))[0] == LAYERS:
            return param.get_value().shape[0]
    return 0


def first_layer(module: nnx.Module) -> Any:
    """One layer of a module of several, with shapes in the place of arrays."""
    of_a_copy: Any = nnx.split(nnx.eval_shape(lambda: module), nnx.Param, ...)
    graph, params, rest = of_a_copy
    for _, param in nnx.to_flat_state(params):
        value = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(value.shape[1:], value.dtype))
        param.set_metadata(axes=param.get_metadata("axes")[1:])
    return nnx.merge(graph, params, rest)
