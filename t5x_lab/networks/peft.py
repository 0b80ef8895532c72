"""Parameter-efficient fine-tuning (PEFT): modules that are attached to the modules of an existing network.

The base network's parameters keep their names, so that a checkpoint of the base model loads into a network with PEFT modules.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Protocol

from flax import nnx
from flax.traverse_util import flatten_dict

from t5x_lab.config.checks import check_pattern, implements
from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.user_code import call_user_code
from t5x_lab.networks.head import CLASSIFIER, find_head
from t5x_lab.networks.network import Constrain, Network
from t5x_lab.networks.stacked import count_layers, first_layer, make_stacked
from t5x_lab.networks.wrapper import NetworkWrapper

LOGITS = "logits_dense"  # the projection whose kernel is read as a matrix, see `layers.output_matrix`


class PeftMethod(Protocol):
    """A PEFT method, such as `Lora` and `Adapter`.

    Attributes:
      modules: regular expression that matches the full names of the modules to attach to, such as "decoder/layers/mlp".

    Optional members:
      merge(base, peft) -> dict: returns parameters of the base module that compute the same as both together. `base` and `peft`
        are nested dicts of arrays.
      ids: token ids beyond the vocabulary that the attached modules embed.
    """

    @property
    def modules(self) -> str: ...

    def make(self, module: Any, rngs: nnx.Rngs) -> nnx.Module:
        """Makes the module that is attached to `module`.

        The result is called as f(x, y), where x is the first argument of `module` and y its output, and returns the new output.
        Its `nnx.Param`s have logical axes, as those of a `Network`. For a stack of layers it is made once per layer.

        Args:
          module: the module to attach to, with shapes instead of arrays.
          rngs: random number generators with a `params` stream.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PeftNetwork(NetworkWrapper):
    """A `Network` with PEFT modules.

    Attributes:
      network: the base network.
      peft: pairs (name, `PeftMethod`). The name is part of the parameters' names: "decoder/layers/mlp/adapter/down".
    """

    network: Network
    peft: tuple[tuple[str, PeftMethod], ...]

    @property
    def additional_ids(self) -> frozenset[int]:
        """Token ids beyond the vocabulary that PEFT modules embed."""
        return frozenset().union(*(getattr(method, "ids", ()) for _, method in self.peft))

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """Makes the base network and attaches the PEFT modules. See `Network.make`.

        Raises:
          UserError: if a PEFT method matches no module, or cannot be attached to one that it matches.
        """
        network: Any = self.network.make(rngs, constrain)
        modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(network) if path}
        param_parts = {str(part) for path, _ in nnx.to_flat_state(nnx.state(network, nnx.Param)) for part in path}
        for name, method in self.peft:
            if name in param_parts:
                raise UserError(
                    f'PEFT has the name "{name}", which is part of a parameter name of the base network. Choose another name.'
                )
            paths = [path for path in modules if re.fullmatch(method.modules, path)]
            if not paths:
                raise UserError(
                    f'{type(method).__name__}.modules is "{method.modules}", which matches no module of the network. The '
                    f"modules are {', '.join(modules)}.{did_you_mean(method.modules, modules)}"
                )
            for path in paths:
                if path == LOGITS and not hasattr(method, "merge"):
                    raise UserError(
                        f"{type(method).__name__} cannot be attached to {path}: the loss reads its kernel as one matrix, which "
                        "requires a `merge` method. Choose other modules, or implement `merge`."
                    )
                _attach(modules[path], path, name, method, rngs)
        return network


def check_peft(methods: Mapping[str, PeftMethod]) -> None:
    """Raises a `UserError` for a value that is not a PEFT method, an invalid name or an invalid regular expression."""
    for name, method in methods.items():
        if not implements(method, PeftMethod):
            raise UserError(f'PEFT["{name}"] is {method!r}. It must be a PEFT method, such as @Lora() or @Adapter().')
        if not name.isidentifier():
            raise UserError(f'PEFT has the name "{name}". A name consists of letters, digits and "_".')
        check_pattern(f"{type(method).__name__}.modules", method.modules)


def peft_names(params: dict, network: Network) -> frozenset[str]:
    """Returns the names of the parameters that belong to PEFT modules or to a classification head."""
    parts = {name for name, _ in getattr(network, "peft", ())} | ({CLASSIFIER} if find_head(network) else set())
    paths = flatten_dict(params) if parts else {}
    return frozenset("/".join(path) for path in paths if parts.intersection(path))


def merge_peft(params: dict, methods: Mapping[str, PeftMethod]) -> dict:
    """Returns parameters of the base network that compute the same as `params` with their PEFT modules.

    Raises:
      UserError: for a method without `merge`.
    """
    for method in methods.values():
        if not hasattr(method, "merge"):
            raise UserError(
                f"{type(method).__name__} cannot be merged into the base parameters: it has no `merge` method. Use the model "
                "together with its PEFT parameters."
            )

    def merge_module(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        attached = {name: entry[name] for name in methods if name in entry}
        base = {name: merge_module(child) for name, child in entry.items() if name not in attached}
        for name, peft in attached.items():
            base = methods[name].merge(base, peft)  # type: ignore[attr-defined]
        return base

    return merge_module(params)


def _attach(module: Any, path: str, name: str, method: PeftMethod, rngs: nnx.Rngs) -> None:
    if hasattr(module, name):
        raise UserError(f'The module {path} has an attribute "{name}". Choose another name in PEFT.')
    num_layers = count_layers(module)
    abstract = first_layer(module) if num_layers else nnx.eval_shape(lambda: module)
    make = functools.partial(method.make, abstract)
    problem = f"{type(method).__name__} cannot be attached to {path}"
    try:
        attached = call_user_code(problem, lambda: make_stacked(make, num_layers, rngs) if num_layers else make(rngs))
    except UserError as error:
        raise UserError(error.sentence if error.sentence.startswith(problem) else f"{problem}: {error.sentence}") from error
    earlier = getattr(module, "peft_parts", ())
    if not earlier:
        # Python looks `__call__` up on the class, so the instance gets a subclass; torch.nn.utils.parametrize does the same.
        # Wrapping the module in another one would change the names of its parameters.
        object.__setattr__(module, "__class__", _make_peft_class(type(module)))  # type: ignore[arg-type]
    setattr(module, name, attached)
    module.peft_parts = (*earlier, name)


@functools.cache
def _make_peft_class(cls: type) -> type:
    """Returns a subclass whose `__call__` passes the output through the attached PEFT modules."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        y = cls.__call__(self, x, *args, **kwargs)  # type: ignore[operator]
        for name in self.peft_parts:
            y = getattr(self, name)(x, y)
        return y

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
