"""TPU slices as GKE names them."""

import math
import re
from typing import NamedTuple

from t5x_lab.config.errors import UserError

ACCELERATORS = {  # by generation
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
}  # fmt: skip
CHIPS_PER_HOST = 4


class Slice(NamedTuple):
    """A TPU slice.

    Attributes:
      accelerator: generation, as GKE names it.
      topology: chips along each axis, such as "4x4x4".
      chips, hosts: numbers of chips and of hosts.
    """

    accelerator: str
    topology: str
    chips: int
    hosts: int


def parse_slice(topology: str | None, flag: str) -> Slice:
    """Returns a slice by a name such as "v5e:4x4".

    Args:
      topology: the name.
      flag: flag that needs it, for messages.

    Raises:
      UserError: for a slice that GKE does not have.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", topology or "")
    if match is None or match[1] not in ACCELERATORS:
        raise UserError(
            f"{flag} needs the TPU slice of each run, such as --topology=v5e:4x4. It is {topology}. Generations: "
            f"{', '.join(ACCELERATORS)}."
        )
    chips = math.prod(map(int, match[2].split("x")))
    return Slice(ACCELERATORS[match[1]], match[2], chips, max(1, chips // CHIPS_PER_HOST))
