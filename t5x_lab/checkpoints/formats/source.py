"""What every format gives: a checkpoint opened, none of its tensors read yet, under t5x_lab's names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from etils import epath

from t5x_lab.checkpoints.lazy_tensors import LazyTensor


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
      path: where it is.
      step: of its training; 0 where it does not say.
      params: the parameters, by unstacked names (see `checkpoints.layers`).
      slots: the optimizer's tensors that belong to parameters, by slot ("v_row") and unstacked name of the parameter.
      others: what belongs to no parameter, such as the optimizer's own step and the counters of tokens.
      check: to be called after the reading, by all processes together; raises a `UserError` where what was read of a checkpoint
        with checksums is not as it was saved.
    """

    path: epath.Path
    step: int
    params: dict[str, LazyTensor]
    slots: dict[str, dict[str, LazyTensor]] = dataclasses.field(default_factory=dict)
    others: dict[str, LazyTensor] = dataclasses.field(default_factory=dict)
    check: Callable[[], None] = lambda: None


class Format(Protocol):
    """A checkpoint format. The modules of this folder satisfy it.

    Attributes:
      NAME: what `--from` and `--to` call it.
      TITLE: what sentences call it.
    """

    NAME: str
    TITLE: str

    def find(self, root: epath.Path, step: int | None) -> epath.Path | None:
        """The checkpoint that is at `root` or in it (of `step`, or the latest); None where there is none of this format.

        Raises:
          UserError: when there is one, but not of this step.
        """

    def step_of(self, path: epath.Path) -> int:
        """The step of a checkpoint that `find` gave; 0 where the format has none."""

    def open(self, path: epath.Path) -> Source:
        """Opens a checkpoint that `find` gave.

        Raises:
          UserError: when it is damaged, or of a kind or version that is not read.
        """

    def open_as_saved(self, path: epath.Path) -> Mapping[str, LazyTensor]:
        """All that is in a checkpoint, by its own names."""


def owner_of(name: str, params: Mapping) -> str | None:
    """The parameter whose name is the end of a name in the optimizer's state."""
    words = name.split("/")
    return next((owner for i in range(1, len(words)) if (owner := "/".join(words[i:])) in params), None)
