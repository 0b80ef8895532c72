"""Parameters added to a network, beside those of its modules: their names stay what they were, so that checkpoints fit."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from flax import nnx
from flax.traverse_util import flatten_dict

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.config.user_code import tried
from t5x_lab.networks.around import Around
from t5x_lab.networks.head import CLASSIFIER, head_of
from t5x_lab.networks.network import Constrain, Network
from t5x_lab.networks.stacked import first_layer, layers_of, make_stacked

LOGITS = "logits_dense"  # the module whose kernel makes logits, as a matrix, see `layers.output_matrix`


@runtime_checkable
class Addition(Protocol):
    """What is added to modules of a network: `Lora` and `Adapter` are two.

    Attributes:
      modules: a regular expression that matches the whole names of the modules it is added to, "decoder/layers/mlp".
    """

    @property
    def modules(self) -> str: ...

    # It may have `merge(own, added) -> own`: a module's own parameters, nested dicts, that give what both give together; and
    # `ids`, those beyond the vocabulary that it embeds.

    def make(self, module: Any, rngs: nnx.Rngs) -> nnx.Module:
        """The part that is added to a module: f(x, y) -> what the module returns instead of y.

        `x` is the module's first argument, and y what it would return. An `nnx.Param` says its logical axes, as those of a
        `Network` do. In a stack of layers the part is made for one of them, and is there once for each.

        Args:
          module: one that it is added to, with shapes in the place of arrays.
          rngs: with a `params` stream.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WithAdditions(Around):
    """A network with parts added to its modules, itself a `Network`.

    Attributes:
      network: the one that they are added to; what it says of itself holds.
      added: pairs (name, `Addition`). The parameters are named after it: "decoder/layers/mlp/adapter/down".
    """

    network: Network
    added: tuple[tuple[str, Addition], ...]

    @property
    def more_ids(self) -> frozenset[int]:
        """Ids beyond the vocabulary that what is added embeds."""
        return frozenset().union(*(getattr(addition, "ids", ()) for _, addition in self.added))

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """As `Network.make`.

        Raises:
          UserError: when an addition matches no module, or cannot be made for one.
        """
        made: Any = self.network.make(rngs, constrain)
        modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(made) if path}
        taken = {str(part) for path, _ in nnx.to_flat_state(nnx.state(made, nnx.Param)) for part in path}
        for name, addition in self.added:
            if name in taken:
                raise UserError(
                    f'ADDED has the name "{name}", which parts of the network have: their parameters could not be told apart. '
                    "Give what is added another name."
                )
            found = [path for path in modules if re.fullmatch(addition.modules, path)]
            if not found:
                raise UserError(
                    f'{type(addition).__name__}.modules is "{addition.modules}", which matches no module of the network. They '
                    f"are {', '.join(modules)}.{nearest(addition.modules, modules)}"
                )
            for path in found:
                if path == LOGITS and not hasattr(addition, "merge"):
                    raise UserError(
                        f"{type(addition).__name__} cannot be added to {path}, whose kernel is one matrix with what is added: "
                        "it has no `merge`. Name other modules, or give it one."
                    )
                _add(modules[path], path, name, addition, rngs)
        return made


def check_additions(added: Mapping[str, Addition]) -> None:
    """Raises a `UserError` for what is no addition, or has a name that can be none of a parameter's."""
    for name, addition in added.items():
        if isinstance(addition, type) or not isinstance(addition, Addition):
            raise UserError(f'ADDED["{name}"] is {addition!r}; it must be an addition, such as @Lora() or @Adapter().')
        if not name.isidentifier():
            raise UserError(f'ADDED has the name "{name}", which a part of a module cannot have; use letters, digits and "_".')
        try:
            re.compile(addition.modules)
        except re.error as error:
            raise UserError(
                f'{type(addition).__name__}.modules is "{addition.modules}", no regular expression: {error}.'
            ) from error


def added_names(params: dict, network: Network) -> frozenset[str]:
    """The names of those parameters that are added to a network, those of a head among them."""
    added = {name for name, _ in getattr(network, "added", ())} | ({CLASSIFIER} if head_of(network) else set())
    paths = flatten_dict(params) if added else {}
    return frozenset("/".join(path) for path in paths if added.intersection(path))


def merged(params: dict, added: Mapping[str, Addition]) -> dict:
    """The parameters of a network without its additions that gives the same.

    Raises:
      UserError: for an addition that cannot be merged.
    """
    for addition in added.values():
        if not hasattr(addition, "merge"):
            raise UserError(
                f"{type(addition).__name__} cannot be merged into a network's own parameters: there are none of it that would "
                "give the same. Use the model with what is added."
            )

    def of_module(own: Any) -> Any:
        if not isinstance(own, dict):
            return own
        parts = {name: own[name] for name in added if name in own}
        own = {name: of_module(entry) for name, entry in own.items() if name not in parts}
        for name, part in parts.items():
            own = added[name].merge(own, part)  # type: ignore[attr-defined]
        return own

    return of_module(params)


def _add(module: Any, path: str, name: str, addition: Addition, rngs: nnx.Rngs) -> None:
    if hasattr(module, name):
        raise UserError(f'The module {path} has "{name}" of its own. Give what is added another name.')
    layers = layers_of(module)
    like = first_layer(module) if layers else nnx.eval_shape(lambda: module)
    make = functools.partial(addition.make, like)
    fails = f"{type(addition).__name__} cannot be added to {path}"
    try:
        part = tried(fails, lambda: make_stacked(make, layers, rngs) if layers else make(rngs))
    except UserError as error:
        raise UserError(error.sentence if error.sentence.startswith(fails) else f"{fails}: {error.sentence}") from error
    before = getattr(module, "names_added", ())
    if not before:
        object.__setattr__(module, "__class__", _extended(type(module)))  # type: ignore[arg-type]
    setattr(module, name, part)
    module.names_added = (*before, name)


@functools.cache
def _extended(cls: type) -> type:
    """The class of modules whose values go through the parts that are added to them."""

    def call(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        y = cls.__call__(self, x, *args, **options)  # type: ignore[operator]
        for name in self.names_added:
            y = getattr(self, name)(x, y)
        return y

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
