"""T5X's checkpoints, under our names: its native format, and its layout of Orbax's; scanned and unscanned networks."""

import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
from etils import epath
from flax import serialization

from t5x_lab.checkpoints import orbax_files
from t5x_lab.checkpoints.tensors import Tensor, Unreadable, of_array

VERSION = 3
SLOTS = ("m", "v", "v_row", "v_col")
_LARGEST_INDEX = 1 << 30
_SCANNED = re.compile(r"(encoder|decoder)/\1/(.*)")
_RENAMED = (
    (r"^(encoder|decoder)/\1_norm/", r"\1/final_norm/"),
    (r"^decoder/logits_dense/", "logits_dense/"),
    (r"^decoder/token_embedder/", "token_embedder/"),
    (r"^(encoder/layers_\d+)/attention/", r"\1/self_attention/"),
    (r"^(encoder/layers_\d+)/pre_attention_", r"\1/pre_self_attention_"),
)


def is_t5x(path: epath.Path) -> bool:
    """Whether a checkpoint of T5X is at `path`: a directory of either layout, or the single file of the first versions."""
    if path.is_dir():
        return (path / "checkpoint").exists() or (path / "state" / orbax_files.METADATA).exists()
    return path.is_file() and re.fullmatch(r".*checkpoint_\d+", path.name) is not None


def step_in(name: str) -> int | None:
    """The step in a name such as "checkpoint_1000", or None."""
    match = re.fullmatch(r".*checkpoint_(\d+)", name)
    return int(match[1]) if match else None


def steps_of(directory: epath.Path) -> list[int]:
    """Steps of the checkpoints in one of T5X's run directories."""
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name.removeprefix("checkpoint_")) for name in names if re.fullmatch(r"checkpoint_\d+", name))


def open_tensors(path: epath.Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], int]:
    """A checkpoint's parameters, its optimizer's slots, and its step.

    Returns:
      (parameters by our names, layers counted singly; the same of each of `SLOTS` that is there; step)

    Raises:
      UserError: when it is damaged, or of an unknown version.
    """
    saved = open_saved(path)
    params = {name.removeprefix("target/"): tensor for name, tensor in saved.items() if name.startswith("target/")}
    if not params:
        raise Unreadable(f"{path} holds no parameters (nothing under target/), only {', '.join(sorted(saved)[:3])}.")
    slots: dict[str, dict[str, Tensor]] = {}
    for slot in SLOTS:
        found = re.compile(rf"state/param_states/(.*)/{slot}")
        named = {match[1]: tensor for name, tensor in saved.items() if (match := found.fullmatch(name))}
        if named:
            slots[slot] = named
    step = step_of(saved, path)
    layers = _scanned_layers(params)
    both = slots.get("v_row", {}).keys() & slots.get("v_col", {}).keys() & params.keys()
    for name in both:
        if _row_is_not_embed(name, params[name].shape, layers):
            slots["v_row"][name], slots["v_col"][name] = slots["v_col"][name], slots["v_row"][name]
    return _ours(params, layers), {slot: _ours(named, layers, slot) for slot, named in slots.items()}, step


def step_of(saved: Mapping[str, Tensor], path: epath.Path) -> int:
    """The step of what is saved; 0 where it does not say."""
    step = np.asarray(saved["state/step"].whole() if "state/step" in saved else 0)
    if step.shape or not np.issubdtype(step.dtype, np.integer) or step < 0:
        raise Unreadable(f"{path} says that it is of step {step}.")
    return int(step)


def open_saved(path: epath.Path) -> dict[str, Tensor]:
    """Everything that is in a checkpoint, by T5X's names."""
    if path.is_dir() and (path / "state" / orbax_files.METADATA).exists():
        return orbax_files.open_arrays(path / "state")
    file = path / "checkpoint" if path.is_dir() else path
    if not file.is_file():
        raise Unreadable(f"{file} is no file.")
    if file.stat().length > _LARGEST_INDEX:
        raise Unreadable(f"{file} has {file.stat().length:,} bytes, too many for an index of arrays.")
    try:
        index = serialization.msgpack_restore(file.read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it is no dictionary")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, AttributeError, MemoryError) as error:
        raise Unreadable(f"{file} is no index of T5X's, or damaged ({type(error).__name__}: {str(error)[:100]}).") from error
    version = index.get("version", VERSION)
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise Unreadable(f"{file} has T5X's version {version!r}; t5x_lab reads versions 1 to {VERSION}.")
    tree = index.get("optimizer", index)
    saved: dict[str, Tensor] = {}
    _collect(tree if isinstance(tree, dict) else {}, "", file.parent, saved)
    return {name.removeprefix("_optimizer/"): tensor for name, tensor in saved.items()}


def _collect(node: Mapping, name: str, directory: epath.Path, into: dict[str, Tensor]) -> None:
    """Finds the leaves of an index: arrays, and the places of arrays."""
    for key, value in node.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(value, dict) and isinstance(value.get("kvstore"), dict):
            into[path] = _zarr(directory, path, str(value["kvstore"].get("path", "")), value)
        elif isinstance(value, dict):
            _collect(value, path, directory, into)
        elif isinstance(value, str) and value.startswith("PLACEHOLDER://"):
            into[path] = _zarr(directory, path, value.removeprefix("PLACEHOLDER://"))
        elif isinstance(value, np.ndarray | np.generic):
            into[path] = of_array(np.asarray(value))


def _zarr(directory: epath.Path, name: str, where: str, entry: Mapping = MappingProxyType({})) -> Tensor:
    """An array beside the index. Whatever store and folder it was written to, it is looked for there and nowhere else.

    Where its own `.zarray` was lost on the way (some published checkpoints have none), the index says what that would.
    """
    folder = pathlib.PurePosixPath(where).name
    if not folder or folder in (".", "..") or not (directory / folder).is_dir():
        raise Unreadable(f"{directory} is not whole: {name} should be in {folder or repr(where)}, which is not there.")
    try:
        if entry.get("metadata") and not (directory / folder / ".zarray").exists():
            return orbax_files.open_zarr(directory, folder, assumed=_metadata(entry))
        return orbax_files.open_zarr(directory, folder)
    except (ValueError, OSError) as error:
        raise Unreadable(f"{directory / folder} cannot be read: {str(error).partition(chr(10))[0][:200]}") from error


def _metadata(entry: Mapping) -> dict[str, Any]:
    dtype = np.dtype(str(entry["dtype"])).str
    rest = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dimension_separator": "."}
    return {**rest, **dict(entry["metadata"]), "dtype": dtype}


def _scanned_layers(params: Mapping[str, Tensor]) -> dict[str, int]:
    """Layers of each scanned stack: T5X's scan puts them second."""
    norms = {m[1]: t for name, t in params.items() if (m := _SCANNED.fullmatch(name)) and name.endswith("norm/scale")}
    return {stack: tensor.shape[1] for stack, tensor in norms.items() if len(tensor.shape) == 2}


def _row_is_not_embed(name: str, shape: tuple[int, ...], layers: Mapping[str, int]) -> bool:
    """Whether `v_row` keeps another dimension than the model's width, which ours and T5X's scanned networks keep.

    Of an unscanned matrix, T5X's Adafactor goes by size: `v_row` keeps the smaller dimension, the first of two alike.
    """
    match = _SCANNED.fullmatch(name)
    if len(shape) != 2 or (match and match[1] in layers):
        return False
    embed_is_last = re.search(r"/(wo|out)/|token_embedder/", name) is not None
    return (0 if shape[0] <= shape[1] else 1) != embed_is_last


def _layer_axis(name: str, slot: str) -> int:
    """Where a scanned array has its layers: second in parameters, of which Adafactor's means lack some dimensions."""
    embed_is_last = re.search(r"/(wo|out)/", name) is not None
    return {"v_row": 0 if embed_is_last else 1, "v_col": 1 if embed_is_last else 0}.get(slot, 1)


def _ours(tensors: Mapping[str, Tensor], layers: Mapping[str, int], slot: str = "") -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _SCANNED.fullmatch(name)
        if not match or match[1] not in layers:
            ours[_renamed(name)] = tensor
            continue
        stack, rest = match.groups()
        axis, unused = _layer_axis(name, slot), tensor.shape == (1,)  # a slot that the other ones stand for
        if not unused and (len(tensor.shape) <= axis or tensor.shape[axis] != layers[stack]):
            raise Unreadable(
                f"{name} {slot} has shape {tensor.shape}, which has not {layers[stack]} layers at dimension {axis}."
            )
        for i in range(layers[stack]):
            ours[_renamed(f"{stack}/layers_{i}/{rest}")] = tensor if unused else tensor.at(axis, i)
    return ours


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
