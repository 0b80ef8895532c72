"""A Flax NNX module's class as a network, so that one class is all a user writes."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import as_configured
from t5x_lab.config.user_code import tried
from t5x_lab.networks.flops import BACKWARD, traced_flops
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import Constrain, abstract_batch


@dataclasses.dataclass(frozen=True)
class OfModule:
    """The class of an NNX module, or a function that makes one, as a `Network`.

    The module says what a `Network` says, as attributes of its own: `architecture` and `vocab_size`; `max_length`
    where it has one; and `flops`, without which the matrix products of its forward pass are counted.

    Attributes:
      module: f(rngs=…) -> an `nnx.Module`; it may have the argument `constrain`, too.
    """

    module: Callable[..., nnx.Module]

    # Gin hands out the same function whatever is bound to its arguments; so networks are compared by what they are alone.
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self):
        object.__setattr__(self, "_call", as_configured(self.module))

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """As `Network.make`."""
        function: Any = self.module
        function = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        takes = inspect.signature(function).parameters
        if hasattr(function, "init_with_output") or hasattr(self.module, "init_with_output"):
            raise UserError(
                f"{self.name} is a module of Flax Linen; nnx.bridge.ToNNX makes one of NNX of it (docs/own/network.md)."
            )
        if "rngs" not in takes and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            raise UserError(f"{self.name} takes no rngs. Its parameters are made with them: def __init__(self, …, *, rngs).")
        return self._call(rngs=rngs, **({"constrain": constrain} if "constrain" in takes else {}))  # type: ignore[attr-defined]

    @property
    def architecture(self) -> str:
        return self._said("architecture", '"causal_decoder", for example')

    @property
    def vocab_size(self) -> int:
        return self._said("vocab_size", "the number of ids")

    @property
    def max_length(self) -> int | None:
        return getattr(self._module, "max_length", None)

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """As `Network.flops`."""
        if hasattr(self._module, "flops"):
            return self._module.flops(encoder_length, decoder_length)
        lengths = (encoder_length, decoder_length)
        if lengths not in self._counted:
            self._counted[lengths] = self._count_flops(*lengths)
        return self._counted[lengths]

    def _count_flops(self, encoder_length: int, decoder_length: int) -> int:
        """Of its forward pass on one sequence, and twice as many of the backward pass."""

        def logits(params, batch):
            module = self.functional.module(params)
            return module.logits(module(batch))

        batch = abstract_batch(self, 1, encoder_length, decoder_length)
        try:
            return (1 + BACKWARD) * traced_flops(logits, self.functional.abstract_params, batch)
        except KeyError as error:
            raise UserError(
                f"{self.name} reads {error}, which a batch of tokens does not have, so its FLOPs cannot be counted. Give it a "
                "method flops(encoder_length, decoder_length), of one sequence forward and backward."
            ) from error

    def _said(self, name: str, what: str) -> Any:
        if not hasattr(self._module, name):
            raise UserError(f"{self.name} has no {name}. A network says it as an attribute of the class or the module: {what}.")
        return getattr(self._module, name)

    @functools.cached_property
    def _counted(self) -> dict[tuple[int, int], int]:
        return {}

    @functools.cached_property
    def functional(self) -> Functional:
        make = lambda rngs: self.make(rngs, lambda x, axes: x)
        return tried(f"The network {self.name} cannot be made", lambda: Functional(make))

    @functools.cached_property
    def _module(self) -> Any:
        return self.functional.abstract_module()
