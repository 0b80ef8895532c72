"""What networks that are made around another one have in common."""

import dataclasses
from typing import Any


class Around:
    """A dataclass with a field `network`: what that one says of itself holds, where it says nothing else."""

    network: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "network":  # while it is copied
            raise AttributeError(name)
        return getattr(self.network, name)

    def with_policy(self, remat_policy: str) -> Any:
        """With another remat policy of the network's."""
        inner = with_policy(self.network, remat_policy)
        return dataclasses.replace(self, network=inner)  # type: ignore[type-var]


def with_policy(network: Any, policy: str) -> Any:
    """The network with another remat policy."""
    if isinstance(network, Around):
        return network.with_policy(policy)
    return dataclasses.replace(network, remat_policy=policy)
