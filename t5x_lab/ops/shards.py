"""The protocol of activation sharding, for kernels that the compiler cannot shard itself."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Shards(Protocol):
    """Sharding of activations by their logical axes. A network's `constrain` has these methods where there is a mesh."""

    def entry(self, axis: str, size: int) -> Any:
        """Returns the axes of the mesh that shard a logical axis of this size evenly, or None."""

    def map(self, function: Callable, in_axes: Sequence[tuple], out_axes: Sequence[tuple]) -> Callable:
        """Returns a function that calls another one on each shard of arrays with these logical axes."""


def shards_of(constrain: Callable) -> Shards | None:
    """Returns the sharding that constrains a network's activations. None for a function without a mesh."""
    shards: Any = constrain
    return shards if hasattr(constrain, "entry") and hasattr(constrain, "map") else None
