"""Finds and opens checkpoints of any format. Each format is a module that satisfies `source.Format`."""

from typing import NamedTuple

from etils import epath

from t5x_lab.checkpoints.formats import mesh_tensorflow, t5x, t5x_lab
from t5x_lab.checkpoints.formats.huggingface import directory as huggingface
from t5x_lab.checkpoints.formats.source import Format, Source
from t5x_lab.checkpoints.layout import WEIGHTS, absolute_path, check_part
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, Unreadable
from t5x_lab.config.errors import UserError, check_choice

FORMATS: dict[str, Format] = {module.NAME: module for module in (t5x_lab, mesh_tensorflow, t5x, huggingface)}


class Location(NamedTuple):
    """Location of a checkpoint: name of the format, path, and weights, "last" or "average"."""

    format: str
    path: epath.Path
    weights: str = "last"

    @property
    def part(self) -> str:
        """Part of a t5x_lab checkpoint with the weights."""
        return WEIGHTS[self.weights]

    @property
    def title(self) -> str:
        return FORMATS[self.format].TITLE

    @property
    def describes_model(self) -> bool:
        """Whether the checkpoint holds the configuration of its model."""
        return FORMATS[self.format].DESCRIBES_MODEL

    @property
    def step(self) -> int:
        return FORMATS[self.format].step_of(self.path)


def find(path: str, step: int | None = None, weights: str = "last") -> Location:
    """Finds the checkpoint at a path, of any format.

    Args:
      path: a run directory or a checkpoint.
      step: step of a run directory. Default: the latest.
      weights: "last", or "average" for a run that keeps averaged weights.

    Raises:
      UserError: if there is no checkpoint.
    """
    root = absolute_path(path)
    for name, format in FORMATS.items():
        checkpoint = format.find(root, step)
        if checkpoint is None:
            continue
        if weights != "last":
            check_choice("weights", weights, WEIGHTS)
            if name != t5x_lab.NAME:
                raise UserError(f'{checkpoint} is {format.TITLE}, which has no averaged weights. Use weights = "last".')
            check_part(checkpoint, WEIGHTS[weights])
        return Location(name, checkpoint, weights)
    reason = "has no finished checkpoint" if root.exists() else "does not exist"
    raise UserError(
        f"{path} {reason}. Use a run directory, which contains checkpoints/<step>, or a checkpoint of t5x_lab, T5X, "
        "Mesh TensorFlow or Hugging Face."
    )


def open_source(location: Location) -> Source:
    """Opens a checkpoint without reading tensors.

    Raises:
      UserError: if it is damaged, or of an unsupported kind or version.
    """
    try:
        if location.format == t5x_lab.NAME:
            return t5x_lab.open(location.path, location.part)
        return FORMATS[location.format].open(location.path)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ArithmeticError, IndexError) as error:
        raise Unreadable(f"{location.path} cannot be read ({type(error).__name__}: {str(error)[:200]}).") from error


def open_as_saved(location: Location) -> dict[str, LazyTensor]:
    """All that is in a checkpoint, by the names of its own format."""
    return dict(FORMATS[location.format].open_as_saved(location.path))
