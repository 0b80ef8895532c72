"""An NNX module as a function of its parameters, which are nested dicts of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from t5x_lab.config.errors import UserError

Params = dict


class Functional:
    """The structure of a module, without its parameters.

    Args:
      make: f(rngs) -> the module.

    Attributes:
      abstract_params: shapes of its parameters.
      axes: their logical axes, in the same tree: a tuple of names each, None where a dimension has none.

    Raises:
      UserError: for state other than parameters, such as running averages, and for parameters that are no floats.
    """

    def __init__(self, make: Callable[[nnx.Rngs], Any]):
        def quietly(rngs):
            with nnx.use_eager_sharding(False):  # axes are logical names here, and where they go is decided elsewhere
                module = make(rngs)
            if not isinstance(module, nnx.Module):
                raise UserError(f"A {type(module).__name__} was made as a network; it must be a flax.nnx.Module.")
            return module

        self._make = quietly
        module = _without_arrays(lambda: nnx.eval_shape(lambda: quietly(_rngs(jax.random.key(0)))))
        name = type(module).__name__
        module.train()
        self._training = _split(module)[0]
        module.eval()
        self._resting, self._abstract, self._random, self._rest = _split(module)
        self._paths = {tuple(map(str, path)): path for path, _ in nnx.to_flat_state(self._abstract)}
        axes_of_t5x = {path: leaf.get_value().names for path, leaf in nnx.to_flat_state(self._rest) if _is_axes_of_t5x(leaf)}
        self._constants = [path for path, leaf in nnx.to_flat_state(self._rest) if type(leaf) is nnx.Variable]
        for path, leaf in nnx.to_flat_state(self._rest):
            if path not in axes_of_t5x and path not in self._constants:
                raise UserError(
                    f"{name} has the state {'/'.join(map(str, path))}, of the kind {type(leaf).__name__}. Networks have "
                    "parameters (nnx.Param), constants (nnx.Variable) and streams of random numbers, and no state that changes."
                )
        flat = {path: leaf for path, leaf in nnx.to_flat_state(self._abstract)}
        self.abstract_params: Params = self._params(self._abstract)
        names = {tuple(map(str, path)): _axes(name, path, leaf, axes_of_t5x) for path, leaf in flat.items()}
        self.axes: dict = traverse_util.unflatten_dict(names)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        return self._params(nnx.state(self._make(_rngs(key)), nnx.Param))

    def module(self, params: Params, dropout_key: jax.Array | None = None) -> Any:
        """The module with these parameters in it; with a dropout key, as it is trained.

        Its streams of random numbers begin anew, from the key.
        """
        flat = traverse_util.flatten_dict(params)
        values = {self._paths[path]: value for path, value in flat.items()}
        state = jax.tree.map(lambda x: x, self._abstract)
        nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(values))
        graph = self._resting if dropout_key is None else self._training
        return nnx.merge(graph, state, self._streams(dropout_key), self._rest_with_constants())

    def abstract_module(self) -> Any:
        """The module with shapes in the place of arrays."""
        return nnx.merge(self._resting, self._abstract, self._random, self._rest)

    def _params(self, state: nnx.State) -> Params:
        flat = {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        return traverse_util.unflatten_dict(flat)

    def _rest_with_constants(self) -> Any:
        """Constants are made anew in the program that needs them; what else is made with them is not computed."""
        if not self._constants:
            return self._rest
        return _split(self._make(_rngs(jax.random.key(0))))[3]

    def _streams(self, key: jax.Array | None) -> nnx.State:
        key = jax.random.key(0) if key is None else key
        leaves, structure = jax.tree.flatten(self._random)
        keys = jax.random.split(key, max(len(leaves), 1))
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        draw = lambda key, shape: jax.random.split(key, shape) if shape else key  # of layers side by side, a key each
        fresh = [draw(keys[i], x.shape) if is_key(x) else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(structure, fresh)


def _split(module: nnx.Module) -> Any:
    """(structure, parameters, streams of random numbers, all else)."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _without_arrays(make: Callable[[], Any]) -> Any:
    """The module; an array among its attributes that is no parameter is a sentence."""
    try:
        return make()
    except (ValueError, jax.errors.UnexpectedTracerError) as error:
        if isinstance(error, ValueError) and "metadata fields" not in str(error):
            raise
        raise UserError(
            "A network keeps an array as it is. Make what is trained an nnx.Param, and a constant, such as a table of "
            "positions, an nnx.Variable."
        ) from error


def _rngs(key: jax.Array) -> nnx.Rngs:
    return nnx.Rngs(jax.random.fold_in(key, 0), params=key, dropout=jax.random.fold_in(key, 1))


def _is_axes_of_t5x(variable: Any) -> bool:
    """Whether it is what `flax.linen.partitioning.param_with_axes` leaves beside a parameter, in T5X's networks."""
    return type(variable).__name__ == "params_axes"


def _axes(module: str, path: tuple, param: nnx.Param, axes_of_t5x: dict) -> tuple[str | None, ...]:
    name = "/".join(map(str, path))
    dtype = param.get_value().dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 4:
        raise UserError(f"The parameter {name} of {module} is {param.get_value().dtype}; parameters are float32.")
    beside = axes_of_t5x.get((*path[:-1], f"{path[-1]}_axes"))
    found = param.get_metadata("axes", None) or param.get_metadata("out_sharding", None) or beside
    axes = tuple(found or (None,) * param.get_value().ndim)
    shape = param.get_value().shape
    if len(axes) != len(shape):
        raise UserError(f"The parameter {name} of {module} has the axes {axes} and the shape {shape}; one name each.")
    return axes
