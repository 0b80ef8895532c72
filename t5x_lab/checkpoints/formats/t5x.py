"""T5X's checkpoints: its native format, and its layout of Orbax's; of scanned and unscanned networks."""

import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
from etils import epath
from flax import serialization

from t5x_lab.checkpoints.formats import orbax_arrays
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, Unreadable, from_array
from t5x_lab.config.errors import UserError

NAME, TITLE = "t5x", "T5X"
VERSION = 3
SLOTS = ("m", "v", "v_row", "v_col")
_LARGEST_INDEX = 1 << 30
_SCANNED = re.compile(r"(encoder|decoder)/\1/(.*)")
_RENAMED = (
    (r"^(encoder|decoder)/\1_norm/", r"\1/final_norm/"),
    (r"^decoder/logits_dense/", "logits_dense/"),
    (r"^decoder/token_embedder/", "token_embedder/"),
    (r"^(encoder/layers_\d+)/attention/", r"\1/self_attention/"),
    (r"^(encoder/layers_\d+)/pre_attention_layer_norm/", r"\1/self_attention_norm/"),
    (r"/pre_(self_attention|cross_attention|mlp)_layer_norm/", r"/\1_norm/"),
    (r"/encoder_decoder_attention/", "/cross_attention/"),
)


def find(root: epath.Path, step: int | None) -> epath.Path | None:
    if _is_checkpoint(root):
        own = _step_in(root.name)
        if step is not None and own is not None and step != own:
            raise UserError(f"{root} is the checkpoint of step {own}, not of step {step}. Leave --step out.")
        return root
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    steps = sorted(int(name.removeprefix("checkpoint_")) for name in names if re.fullmatch(r"checkpoint_\d+", name))
    if not steps:
        return None
    if step is not None and step not in steps:
        raise UserError(f"{root} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}.")
    return root / f"checkpoint_{steps[-1] if step is None else step}"


def _is_checkpoint(path: epath.Path) -> bool:
    """Whether `path` is a directory of either layout, or the single file of the first versions."""
    if path.is_dir():
        return (path / "checkpoint").exists() or (path / "state" / orbax_arrays.METADATA).exists()
    return path.is_file() and _step_in(path.name) is not None


def step_of(path: epath.Path) -> int:
    return _step_in(path.name) or 0


def _step_in(name: str) -> int | None:
    """The step in a name such as "checkpoint_1000", or None."""
    match = re.fullmatch(r".*checkpoint_(\d+)", name)
    return int(match[1]) if match else None


def open(path: epath.Path) -> Source:
    saved = open_as_saved(path)
    params = {name.removeprefix("target/"): tensor for name, tensor in saved.items() if name.startswith("target/")}
    if not params:
        raise Unreadable(f"{path} holds no parameters (nothing under target/), only {', '.join(sorted(saved)[:3])}.")
    slots: dict[str, dict[str, LazyTensor]] = {}
    for slot in SLOTS:
        found = re.compile(rf"state/param_states/(.*)/{slot}")
        named = {match[1]: tensor for name, tensor in saved.items() if (match := found.fullmatch(name))}
        if named:
            slots[slot] = named
    step = _saved_step(saved, path)
    layers = _scanned_layers(params)
    both = slots.get("v_row", {}).keys() & slots.get("v_col", {}).keys() & params.keys()
    for name in both:
        if _row_is_not_embed(name, params[name].shape, layers):
            slots["v_row"][name], slots["v_col"][name] = slots["v_col"][name], slots["v_row"][name]
    if "m" in slots:  # T5X keeps the mean of what is subtracted, ours is of what is added
        slots["m"] = {name: tensor.negative() for name, tensor in slots["m"].items()}
    slots = {slot: _ours(named, layers, slot) for slot, named in slots.items()}
    count = from_array(np.array(step, np.int32))
    return Source(path, step, _ours(params, layers), slots, {"step": count, "opt_state/step": count})


def _saved_step(saved: Mapping[str, LazyTensor], path: epath.Path) -> int:
    """The step of what is saved; 0 where it does not say."""
    found = saved.get("state/step", from_array(np.array(0)))
    step = np.asarray(found.shape or found.read_all())
    if step.shape or not np.issubdtype(step.dtype, np.integer) or step < 0:
        raise Unreadable(f"{path} says that it is of step {step}.")
    return int(step)


def open_as_saved(path: epath.Path) -> dict[str, LazyTensor]:
    """All that is in a checkpoint, by T5X's names."""
    if path.is_dir() and (path / "state" / orbax_arrays.METADATA).exists():
        return orbax_arrays.open_arrays(path / "state")
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
    saved: dict[str, LazyTensor] = {}
    _collect(tree if isinstance(tree, dict) else {}, "", file.parent, saved, orbax_arrays.LastRead())
    return {name.removeprefix("_optimizer/"): tensor for name, tensor in saved.items()}


def _collect(node: Mapping, name: str, directory: epath.Path, into: dict[str, LazyTensor], last: orbax_arrays.LastRead) -> None:
    """Finds the leaves of an index: arrays, and the places of arrays."""
    for key, value in node.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(value, dict) and isinstance(value.get("kvstore"), dict):
            into[path] = _zarr(directory, path, str(value["kvstore"].get("path", "")), last, value)
        elif isinstance(value, dict):
            _collect(value, path, directory, into, last)
        elif isinstance(value, str) and value.startswith("PLACEHOLDER://"):
            into[path] = _zarr(directory, path, value.removeprefix("PLACEHOLDER://"), last)
        elif isinstance(value, np.ndarray | np.generic):
            into[path] = from_array(np.asarray(value))


def _zarr(
    directory: epath.Path, name: str, where: str, last: orbax_arrays.LastRead, entry: Mapping = MappingProxyType({})
) -> LazyTensor:
    """An array beside the index. Whatever store and folder it was written to, it is looked for there and nowhere else.

    Where its own `.zarray` was lost on the way (some published checkpoints have none), the index says what that would.
    """
    folder = pathlib.PurePosixPath(where).name
    if not folder or folder in (".", "..") or not (directory / folder).is_dir():
        raise Unreadable(f"{directory} is not whole: {name} should be in {folder or repr(where)}, which is not there.")
    try:
        if entry.get("metadata") and not (directory / folder / ".zarray").exists():
            return orbax_arrays.open_zarr(directory, folder, last=last, assumed=_metadata(entry))
        return orbax_arrays.open_zarr(directory, folder, last=last)
    except (ValueError, OSError) as error:
        raise Unreadable(f"{directory / folder} cannot be read: {str(error).partition(chr(10))[0][:200]}") from error


def _metadata(entry: Mapping) -> dict[str, Any]:
    dtype = np.dtype(str(entry["dtype"])).str
    rest = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dimension_separator": "."}
    return {**rest, **dict(entry["metadata"]), "dtype": dtype}


def _scanned_layers(params: Mapping[str, LazyTensor]) -> dict[str, int]:
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


def _ours(tensors: Mapping[str, LazyTensor], layers: Mapping[str, int], slot: str = "") -> dict[str, LazyTensor]:
    ours: dict[str, LazyTensor] = {}
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
            ours[_renamed(f"{stack}/layers_{i}/{rest}")] = tensor if unused else tensor.index(axis, i)
    return ours


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
