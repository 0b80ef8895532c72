"""The checkpoint formats that t5x_lab reads, each a module or a folder here that satisfies `source.Format`."""

from typing import NamedTuple

from etils import epath

from t5x_lab.checkpoints.formats import huggingface, t5x, t5x_lab
from t5x_lab.checkpoints.formats.source import Format, Source
from t5x_lab.checkpoints.layout import WEIGHTS, absolute_path, check_part
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, Unreadable
from t5x_lab.config.errors import UserError, check_choice

FORMATS: dict[str, Format] = {module.NAME: module for module in (t5x_lab, t5x, huggingface)}


class Location(NamedTuple):
    """Where a checkpoint is, the name of its format, and which of its weights are meant: "last" or "average"."""

    format: str
    path: epath.Path
    weights: str = "last"

    @property
    def part(self) -> str:
        """The part of one of our checkpoints that the weights are in."""
        return WEIGHTS[self.weights]

    @property
    def title(self) -> str:
        return FORMATS[self.format].TITLE

    @property
    def step(self) -> int:
        return FORMATS[self.format].step_of(self.path)


def find(path: str, step: int | None = None, weights: str = "last") -> Location:
    """Finds the checkpoint that a user names, whatever its format.

    Args:
      path: a run directory or a checkpoint.
      step: of a run directory, which checkpoint; the latest by default.
      weights: "last", or "average" of a run that keeps one.

    Raises:
      UserError: saying what is at `path` instead.
    """
    root = absolute_path(path)
    if not root.exists():
        raise UserError(f"{path} does not exist. Name a run directory or a checkpoint of t5x_lab, T5X or Hugging Face.")
    for name, format in FORMATS.items():
        found = format.find(root, step)
        if found is None:
            continue
        if weights != "last":
            check_choice("weights", weights, WEIGHTS)
            if name != t5x_lab.NAME:
                raise UserError(f'{found} is {format.TITLE}, which has no averaged weights; leave weights = "average" out.')
            check_part(found, WEIGHTS[weights])
        return Location(name, found, weights)
    raise UserError(
        f"{path} holds no finished checkpoint. Name a run directory (with checkpoints/<step> in it) or a checkpoint of "
        "t5x_lab, T5X or Hugging Face."
    )


def open_source(location: Location) -> Source:
    """Opens a checkpoint; no tensor is read yet.

    Raises:
      UserError: when it is damaged, or of a kind or version that is not read.
    """
    try:
        if location.format == t5x_lab.NAME:
            return t5x_lab.open(location.path, location.part)
        return FORMATS[location.format].open(location.path)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ArithmeticError, IndexError, RecursionError) as error:
        raise Unreadable(f"{location.path} cannot be read ({type(error).__name__}: {str(error)[:200]}).") from error


def open_as_saved(location: Location) -> dict[str, LazyTensor]:
    """All that is in a checkpoint, by the names of its own format."""
    return dict(FORMATS[location.format].open_as_saved(location.path))
