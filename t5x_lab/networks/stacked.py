"""Stacks of layers: modules whose parameters all have a leading `layers` axis, as `jax.lax.scan` needs them."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

LAYERS = "layers"


def make_stacked(make_layer: Callable[[nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs) -> Any:
    """Makes a stack of `num_layers` layers, each initialized with its own random key."""
    graph, params = nnx.split(nnx.eval_shape(lambda: make_layer(nnx.Rngs(params=0))), nnx.Param)

    def init(key):
        return nnx.to_pure_dict(nnx.state(make_layer(nnx.Rngs(params=key)), nnx.Param))

    nnx.replace_by_pure_dict(params, jax.vmap(init)(jax.random.split(rngs.params(), num_layers)))
    for _, param in nnx.to_flat_state(params):
        axes = param.get_metadata("axes", None) or (None,) * (param.get_value().ndim - 1)
        param.set_metadata(axes=(LAYERS, *axes))
    return nnx.merge(graph, params)


def count_layers(module: nnx.Module) -> int:
    """Returns the number of layers of a stack; 0 for a module that is not a stack."""
    for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if (param.get_metadata("axes", None) or (None,))[0] == LAYERS:
            return param.get_value().shape[0]
    return 0


def first_layer(module: nnx.Module) -> Any:
    """Returns one layer of a stack, with shapes instead of arrays."""
    split: Any = nnx.split(nnx.eval_shape(lambda: module), nnx.Param, ...)
    graph, params, rest = split
    for _, param in nnx.to_flat_state(params):
        value = param.get_value()
        param.set_value(jax.ShapeDtypeStruct(value.shape[1:], value.dtype))
        param.set_metadata(axes=param.get_metadata("axes")[1:])
    return nnx.merge(graph, params, rest)
