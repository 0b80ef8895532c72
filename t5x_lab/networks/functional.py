"""`Functional`: an NNX module as a function of its parameters, which are nested dicts of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from t5x_lab.config.errors import UserError

Params = dict


class Functional:
    """The structure of a module without its parameters.

    Args:
      make: function (rngs) -> module.

    Attributes:
      abstract_params: shapes of the parameters.
      axes: logical axes of the parameters in the same tree: tuples of names, None for an unnamed dimension.

    Raises:
      UserError: for state other than parameters, such as running averages, and for non-float parameters.
    """

    def __init__(self, make: Callable[[nnx.Rngs], Any]):
        def make_unsharded(rngs):
            with nnx.use_eager_sharding(False):  # axes are logical names, which `partitioning` maps to mesh axes
                module = make(rngs)
            if not isinstance(module, nnx.Module):
                raise UserError(f"Network.make returned a {type(module).__name__}. It must return a flax.nnx.Module.")
            return module

        self._make = make_unsharded
        module = _explain_array_attribute(lambda: nnx.eval_shape(lambda: make_unsharded(_rngs(jax.random.key(0)))))
        name = type(module).__name__
        module.train()
        self._train_graph = _split(module)[0]
        module.eval()
        self._eval_graph, self._abstract, self._random, self._rest = _split(module)
        self._paths = {tuple(map(str, path)): path for path, _ in nnx.to_flat_state(self._abstract)}
        rest = nnx.to_flat_state(self._rest)
        t5x_axes = {path: leaf.get_value().names for path, leaf in rest if _is_t5x_axes(leaf)}
        self._constants = [path for path, leaf in rest if type(leaf) is nnx.Variable]
        for path, leaf in rest:
            if path not in t5x_axes and path not in self._constants:
                raise UserError(
                    f"{name} has the state {'/'.join(map(str, path))} of type {type(leaf).__name__}. A network may have "
                    "parameters (nnx.Param), constants (nnx.Variable) and random streams, but no state that changes."
                )
        flat = {path: leaf for path, leaf in nnx.to_flat_state(self._abstract)}
        self.abstract_params: Params = self._params(self._abstract)
        names = {tuple(map(str, path)): _axes(name, path, leaf, t5x_axes) for path, leaf in flat.items()}
        self.axes: dict = traverse_util.unflatten_dict(names)

    def init(self, key: jax.Array) -> Params:
        """Returns initial parameters."""
        return self._params(nnx.state(self._make(_rngs(key)), nnx.Param))

    def module(self, params: Params, dropout_key: jax.Array | None = None) -> Any:
        """Returns the module with these parameters, in training mode if there is a dropout key.

        Its random streams start from the key.
        """
        flat = traverse_util.flatten_dict(params)
        values = {self._paths[path]: value for path, value in flat.items()}
        state = jax.tree.map(lambda x: x, self._abstract)
        nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(values))
        graph = self._eval_graph if dropout_key is None else self._train_graph
        return nnx.merge(graph, state, self._streams(dropout_key), self._rest_with_constants())

    def abstract_module(self) -> Any:
        """Returns the module with shapes instead of arrays."""
        return nnx.merge(self._eval_graph, self._abstract, self._random, self._rest)

    def _params(self, state: nnx.State) -> Params:
        flat = {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        return traverse_util.unflatten_dict(flat)

    def _rest_with_constants(self) -> Any:
        """Returns all other state. Constants are computed inside the current trace; unused ones are removed by the compiler."""
        if not self._constants:
            return self._rest
        return _split(self._make(_rngs(jax.random.key(0))))[3]

    def _streams(self, key: jax.Array | None) -> nnx.State:
        key = jax.random.key(0) if key is None else key
        leaves, structure = jax.tree.flatten(self._random)
        keys = jax.random.split(key, max(len(leaves), 1))
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        draw = lambda key, shape: jax.random.split(key, shape) if shape else key  # one key for each layer of a stack
        fresh = [draw(keys[i], x.shape) if is_key(x) else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, fresh)


def _split(module: nnx.Module) -> Any:
    """Returns (graph, parameters, random streams, other state)."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _explain_array_attribute(make: Callable[[], Any]) -> Any:
    """Returns the module, with a `UserError` for an attribute that is a plain array."""
    try:
        return make()
    except (ValueError, jax.errors.UnexpectedTracerError) as error:
        if isinstance(error, ValueError) and "metadata fields" not in str(error):
            raise
        raise UserError(
            "A network has an array as an attribute. Use nnx.Param for trained values and nnx.Variable for constants, such "
            "as a table of positions."
        ) from error


def _rngs(key: jax.Array) -> nnx.Rngs:
    return nnx.Rngs(jax.random.fold_in(key, 0), params=key, dropout=jax.random.fold_in(key, 1))


def _is_t5x_axes(variable: Any) -> bool:
    """Returns whether `flax.linen.partitioning.param_with_axes`, which T5X's networks use, created the variable."""
    return type(variable).__name__ == "params_axes"


def _axes(module: str, path: tuple, param: nnx.Param, t5x_axes: dict) -> tuple[str | None, ...]:
    name = "/".join(map(str, path))
    dtype = param.get_value().dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 4:
        raise UserError(f"The parameter {name} of {module} has dtype {param.get_value().dtype}. Parameters must be float32.")
    linen_axes = t5x_axes.get((*path[:-1], f"{path[-1]}_axes"))
    names = param.get_metadata("axes", None) or param.get_metadata("out_sharding", None) or linen_axes
    axes = tuple(names or (None,) * param.get_value().ndim)
    shape = param.get_value().shape
    if len(axes) != len(shape):
        raise UserError(
            f"The parameter {name} of {module} has the axes {axes} but the shape {shape}. Give one name per dimension."
        )
    return axes
