"""`ModuleNetwork`: a `Network` made from the class of a Flax NNX module, so that a user writes one class only."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from t5x_lab.config.errors import UserError
from t5x_lab.config.gin_files import with_current_bindings
from t5x_lab.config.user_code import call_user_code, describe_error
from t5x_lab.networks.flops import BACKWARD, traced_flops
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import Constrain, abstract_batch


@dataclasses.dataclass(frozen=True)
class ModuleNetwork:
    """A `Network` made from an NNX module class, or from a function that makes a module.

    The module has the attributes `architecture` and `vocab_size`, and optionally `max_length` and `flops`. Without `flops` the
    matrix products of its forward pass are counted.

    Attributes:
      module: function (rngs=...) -> `nnx.Module`, with an optional argument `constrain`. See `Network.make`.
    """

    module: Callable[..., nnx.Module]

    # Gin returns the same function whatever its arguments are bound to, so the function cannot identify the network.
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self):
        object.__setattr__(self, "_call", with_current_bindings(self.module))

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> Any:
        """Makes the module. See `Network.make`.

        Raises:
          UserError: for a Flax Linen module, or one without the argument `rngs`.
        """
        function: Any = self.module
        function = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        parameters = inspect.signature(function).parameters
        if hasattr(function, "init_with_output") or hasattr(self.module, "init_with_output"):
            raise UserError(
                f"{self.name} is a Flax Linen module. If it is called as in T5X, bind ModelConfig.network = @LinenNetwork() "
                f"and LinenNetwork.module = @{self.name}(). Otherwise convert it with nnx.bridge.ToNNX "
                "(docs/custom/network.md)."
            )
        if "rngs" not in parameters and not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
            raise UserError(
                f"{self.name} has no argument rngs, which initializes its parameters: def __init__(self, ..., *, rngs)."
            )
        return self._call(rngs=rngs, **({"constrain": constrain} if "constrain" in parameters else {}))  # type: ignore[attr-defined]

    @property
    def architecture(self) -> str:
        return self._read_attribute("architecture", 'such as "causal_decoder"')

    @property
    def vocab_size(self) -> int:
        return self._read_attribute("vocab_size", "the number of ids")

    @property
    def max_length(self) -> int | None:
        return getattr(self._module, "max_length", None)

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence. See `Network.flops`."""
        if hasattr(self._module, "flops"):
            return self._module.flops(encoder_length, decoder_length)
        lengths = (encoder_length, decoder_length)
        if lengths not in self._flops:
            self._flops[lengths] = self._count_flops(*lengths)
        return self._flops[lengths]

    def _count_flops(self, encoder_length: int, decoder_length: int) -> int:
        """Counts the FLOPs of the forward pass on one sequence, and twice as many for the backward pass."""

        def logits(params, batch):
            module = self.functional.module(params)
            return module.logits(module(batch))

        batch = abstract_batch(self, 1, encoder_length, decoder_length)
        try:
            return (1 + BACKWARD) * traced_flops(logits, self.functional.abstract_params, batch)
        except Exception as error:  # of the user's module
            raise UserError(
                f"The FLOPs of {self.name} cannot be counted on a batch of tokens, on which it raises {describe_error(error)}. "
                "Add a method flops(encoder_length, decoder_length) that returns the FLOPs of one sequence, forward and "
                "backward."
            ) from error

    def _read_attribute(self, name: str, description: str) -> Any:
        if not hasattr(self._module, name):
            raise UserError(f"{self.name} has no attribute {name}. Define it in the class or the module: {description}.")
        return getattr(self._module, name)

    @functools.cached_property
    def _flops(self) -> dict[tuple[int, int], int]:
        return {}

    @functools.cached_property
    def functional(self) -> Functional:
        make = lambda rngs: self.make(rngs, lambda x, axes: x)
        return call_user_code(f"The network {self.name} cannot be made", lambda: Functional(make))

    @functools.cached_property
    def _module(self) -> Any:
        return self.functional.abstract_module()
