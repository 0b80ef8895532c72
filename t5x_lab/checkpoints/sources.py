"""A checkpoint of any format that t5x_lab reads, as tensors under our names."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
from etils import epath

from t5x_lab.checkpoints import huggingface, orbax_files, safetensors_files, t5x
from t5x_lab.checkpoints.layout import find_checkpoint, finished_steps, is_checkpoint, read_info, rooted
from t5x_lab.checkpoints.names import Part, split_layers
from t5x_lab.checkpoints.tensors import Tensor, Unreadable, of_array
from t5x_lab.config.errors import UserError
from t5x_lab.networks.config import TransformerConfig

FORMATS = {"t5x_lab": "a run or checkpoint of t5x_lab", "t5x": "T5X", "hf": "Hugging Face"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and in which of `FORMATS`."""

    format: str
    path: epath.Path


@dataclasses.dataclass(frozen=True)
class Source:
    """What a checkpoint holds.

    Attributes:
      place: where it is.
      step: of its training; 0 where it does not say.
      params: the parameters, layers counted singly.
      slots: the optimizer's arrays that belong to parameters, by the slot ("v_row") and the parameter, layers counted singly.
      others: what belongs to no parameter, such as the optimizer's own step and the counters of tokens.
    """

    place: Place
    step: int
    params: dict[str, Tensor]
    slots: dict[str, dict[str, Tensor]]
    others: dict[str, Tensor]


def find(path: str, step: int | None = None) -> Place:
    """Finds the checkpoint that a user names, whatever its format.

    Raises:
      UserError: saying what is at `path` instead.
    """
    root = rooted(path)
    if not root.exists():
        raise UserError(f"{path} does not exist. Name a run directory or a checkpoint of t5x_lab, T5X or Hugging Face.")
    if is_checkpoint(root) or finished_steps(root):
        return Place("t5x_lab", find_checkpoint(path, step))
    if t5x.is_t5x(root):
        own = t5x.step_in(root.name)
        if step is not None and own is not None and step != own:
            raise UserError(f"{path} is the checkpoint of step {own}, not of step {step}. Leave --step out.")
        return Place("t5x", root)
    steps = t5x.steps_of(root)
    if steps:
        if step is not None and step not in steps:
            raise UserError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}.")
        return Place("t5x", root / f"checkpoint_{steps[-1] if step is None else step}")
    if root.is_dir() and ((root / "config.json").exists() or list(root.glob("*.safetensors"))):
        if step is not None:
            raise UserError(f"{path} is a model of Hugging Face's, which has no steps. Leave --step out.")
        if "://" in str(root):
            raise UserError(f"{path} is remote; a model of Hugging Face's is read from a local directory. Copy it first.")
        return Place("hf", root)
    raise UserError(
        f"{path} holds no finished checkpoint. Name a run directory (with checkpoints/<step> in it) or a checkpoint of "
        "t5x_lab, T5X or Hugging Face."
    )


def open_source(place: Place, parts: Callable[[TransformerConfig], Mapping[str, Part]]) -> Source:
    """Opens a checkpoint; no array is read yet.

    Args:
      place: see `find`.
      parts: the parts of the parameters of a configuration; see `names.single_layers`.

    Raises:
      UserError: when it is damaged, or of a kind or version that is not read.
    """
    try:
        return _open(place, parts)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ArithmeticError, IndexError, RecursionError) as error:
        raise Unreadable(f"{place.path} cannot be read ({type(error).__name__}: {str(error)[:200]}).") from error


def _open(place: Place, parts: Callable[[TransformerConfig], Mapping[str, Part]]) -> Source:
    if place.format == "t5x":
        params, slots, step = t5x.open_tensors(place.path)
        count = of_array(np.array(step, np.int32))
        return Source(place, step, params, slots, {"step": count, "opt_state/step": count})
    if place.format == "hf":
        return Source(place, 0, huggingface.open_tensors(pathlib.Path(place.path), parts), {}, {})
    info = read_info(place.path)
    params = orbax_files.open_arrays(place.path / "params")
    rest = orbax_files.open_arrays(place.path / "rest") if (place.path / "rest").exists() else {}
    optimizer: dict[str, dict[str, Tensor]] = {}
    others = {}
    for name, tensor in rest.items():
        owner = owner_of(name, params)
        if owner:
            optimizer.setdefault(name.removeprefix("opt_state/").removesuffix(f"/{owner}"), {})[owner] = tensor
        else:
            others[name] = tensor
    slots = {slot: split_layers(named) for slot, named in optimizer.items()}
    return Source(place, info["step"], split_layers(params), slots, others)


def owner_of(name: str, params: Mapping) -> str | None:
    """The parameter whose name ends a name of the optimizer's state."""
    words = name.split("/")
    return next((owner for i in range(1, len(words)) if (owner := "/".join(words[i:])) in params), None)


def as_saved(place: Place) -> dict[str, Tensor]:
    """Everything that is in a checkpoint, under the names of its own format."""
    if place.format == "t5x":
        return t5x.open_saved(place.path)
    if place.format == "hf":
        return safetensors_files.open_directory(pathlib.Path(place.path))
    parts = [part for part in ("params", "rest") if (place.path / part).exists()]
    return {f"{part}/{name}": tensor for part in parts for name, tensor in orbax_files.open_arrays(place.path / part).items()}
