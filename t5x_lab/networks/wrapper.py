"""Base class of networks that wrap another network."""

import dataclasses
from typing import Any


class NetworkWrapper:
    """A dataclass with a field `network`. Attributes that it does not define are those of the wrapped network."""

    network: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "network":  # copy and pickle ask before the field is set
            raise AttributeError(name)
        return getattr(self.network, name)

    def replace_remat_policy(self, remat_policy: str) -> Any:
        """Returns a copy whose wrapped network has another remat policy."""
        inner = replace_remat_policy(self.network, remat_policy)
        return dataclasses.replace(self, network=inner)  # type: ignore[type-var]


def replace_remat_policy(network: Any, policy: str) -> Any:
    """Returns a copy of the network with another remat policy."""
    if isinstance(network, NetworkWrapper):
        return network.replace_remat_policy(policy)
    return dataclasses.replace(network, remat_policy=policy)
