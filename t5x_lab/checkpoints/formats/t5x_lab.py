"""t5x_lab's checkpoints: lazy reading, and writing without a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x_lab.checkpoints.formats import orbax_arrays
from t5x_lab.checkpoints.formats.source import Source, find_owner
from t5x_lab.checkpoints.layers import Part, stack_layers, unstack_layers
from t5x_lab.checkpoints.layout import (
    ARRAYS,
    current_name,
    find_checkpoint,
    finish,
    finished_steps,
    is_checkpoint,
    make_info,
    read_info,
)
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, from_array
from t5x_lab.checkpoints.verified_reads import ReadVerifier

NAME, TITLE, DESCRIBES_MODEL = "t5x_lab", "a run or checkpoint of t5x_lab", True


def find(root: epath.Path, step: int | None) -> epath.Path | None:
    return find_checkpoint(str(root), step) if is_checkpoint(root) or finished_steps(root) else None


def step_of(path: epath.Path) -> int:
    return read_info(path)["step"]


def open(path: epath.Path, weights: str = "params") -> Source:
    """Opens a checkpoint. See `Format.open`. `weights` is the part with the parameters."""
    info = read_info(path)
    verifier = ReadVerifier(path, info.get("checksums", {}))
    open_verified = lambda part: {n: verifier.wrap(f"{part}/{n}", tensor) for n, tensor in open_part(path, part).items()}
    params = open_verified(weights)
    slots: dict[str, dict[str, LazyTensor]] = {}
    others = {"step": from_array(np.array(info["step"], np.int32))}  # for checkpoints with parameters only
    for name, tensor in (open_verified("rest") if (path / "rest").exists() else {}).items():
        owner = find_owner(name, params)
        if owner:
            slots.setdefault(name.removeprefix("opt_state/").removesuffix(f"/{owner}"), {})[owner] = tensor
        else:
            others[name] = tensor
    by_layer = {slot: unstack_layers(tensors) for slot, tensors in slots.items()}
    return Source(path, info["step"], unstack_layers(params), by_layer, others, check=verifier.check)


def open_part(path: epath.Path, part: str) -> dict[str, LazyTensor]:
    """Returns the arrays of a part in `ARRAYS` by current names."""
    saved_format = read_info(path)["format"]
    return {current_name(name, saved_format): x for name, x in orbax_arrays.open_arrays(path / part).items()}


def open_as_saved(path: epath.Path) -> dict[str, LazyTensor]:
    parts = [part for part in ARRAYS if (path / part).exists()]
    return {f"{part}/{name}": x for part in parts for name, x in orbax_arrays.open_arrays(path / part).items()}


def write(path: epath.Path, tensors: Mapping[str, LazyTensor], parts: Mapping[str, Part], step: int, **notes: Any) -> None:
    """Writes a checkpoint with parameters only, with about one tensor in memory at a time.

    Args:
      path: new `checkpoints/<step>` directory.
      tensors: tensors by unstacked name, in the order of the layers.
      parts: meaning of these names in the model.
      step: training step.
      notes: additional info.
    """
    (path / "params").mkdir(parents=True)
    params = stack_layers(tensors, parts)
    sums = orbax_arrays.write_arrays(path / "params", params)
    checksums = {f"params/{name}": checksum for name, checksum in sums.items()}
    shapes = {name: list(tensor.shape) for name, tensor in params.items()}
    finish(path, make_info(shapes, step, **notes, checksums=checksums))
