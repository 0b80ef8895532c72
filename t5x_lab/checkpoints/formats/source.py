"""`Source`, an opened checkpoint with lazy tensors under t5x_lab's names, and the protocol of formats."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from etils import epath

from t5x_lab.checkpoints.lazy_tensors import LazyTensor


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
      path: path of the checkpoint.
      step: training step. 0 if unknown.
      params: parameters by unstacked name. See `checkpoints.layers`.
      slots: optimizer tensors of parameters, by slot ("v_row") and unstacked parameter name.
      others: tensors without a parameter, such as the optimizer's step and token counters.
      aliases: our names by the format's own names, which networks of users may have.
      prefixed: paths of further checkpoints, by the prefix of their parameters' names ("encoder" of "encoder:decoder/…").
      check: function that all processes call after reading. It raises a `UserError` if arrays differ from their checksums.
    """

    path: epath.Path
    step: int
    params: dict[str, LazyTensor]
    slots: dict[str, dict[str, LazyTensor]] = dataclasses.field(default_factory=dict)
    others: dict[str, LazyTensor] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    prefixed: dict[str, epath.Path] = dataclasses.field(default_factory=dict)
    check: Callable[[], None] = lambda: None

    def origin(self, parameter: str) -> tuple[epath.Path, str]:
        """Returns the checkpoint of a parameter and its name there."""
        prefix, _, name = parameter.partition(":")
        return (self.prefixed[prefix], name) if prefix in self.prefixed else (self.path, parameter)


class Format(Protocol):
    """A checkpoint format. The modules of this folder satisfy it.

    Attributes:
      NAME: name for `--from` and `--to`.
      TITLE: name for messages.
      DESCRIBES_MODEL: whether a checkpoint holds the configuration of its model.
    """

    NAME: str
    TITLE: str
    DESCRIBES_MODEL: bool

    def find(self, root: epath.Path, step: int | None) -> epath.Path | None:
        """Returns the checkpoint at or in `root`, of `step` or the latest; None if there is none of this format.

        Raises:
          UserError: if there are checkpoints, but not of this step.
        """

    def step_of(self, path: epath.Path) -> int:
        """Returns the step of a checkpoint from `find`; 0 if the format has no steps."""

    def open(self, path: epath.Path) -> Source:
        """Opens a checkpoint from `find`.

        Raises:
          UserError: if it is damaged, or of an unsupported kind or version.
        """

    def open_as_saved(self, path: epath.Path) -> Mapping[str, LazyTensor]:
        """Returns all tensors of a checkpoint by their names in the format."""


def embed_is_last(parameter: str) -> bool:
    """Returns whether `embed` is the last dimension of a matrix of T5's, not the first."""
    return re.search(r"/(wo|out)/|(token|position)_embedder/", parameter) is not None


def find_owner(name: str, params: Mapping) -> str | None:
    """Returns the parameter whose name is a suffix of a name in the optimizer state, or None."""
    parts = name.split("/")
    return next((owner for i in range(1, len(parts)) if (owner := "/".join(parts[i:])) in params), None)
