"""T5X's checkpoints: native and Orbax format, of scanned and unscanned networks."""

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
from t5x_lab.checkpoints.formats.source import Source, embed_is_last, find_owner
from t5x_lab.checkpoints.layout import check_step, choose_step
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, Unreadable, from_array

NAME, TITLE, DESCRIBES_MODEL = "t5x", "T5X", False
VERSION = 3
SLOTS = ("m", "v", "v_row", "v_col", "grad_ema", "grad_sq_ema")  # of Adafactor and of Flax's former Adam
_OPTAX_NAMES = {"grad_ema": "mu", "grad_sq_ema": "nu"}
_STATES = "state/param_states/"
_MAX_INDEX_BYTES = 1 << 30
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
        checkpoint_step = _step_in(root.name)
        if step is not None and checkpoint_step is not None:
            check_step(root, checkpoint_step, step)
        return root
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    steps = [int(name.removeprefix("checkpoint_")) for name in names if re.fullmatch(r"checkpoint_\d+", name)]
    return root / f"checkpoint_{choose_step(root, steps, step)}" if steps else None


def _is_checkpoint(path: epath.Path) -> bool:
    """Returns whether `path` is a checkpoint directory of either format, or a single file of the first versions."""
    if path.is_dir():
        return (path / "checkpoint").exists() or (path / "state" / orbax_arrays.METADATA).exists()
    return path.is_file() and _step_in(path.name) is not None


def step_of(path: epath.Path) -> int:
    return _step_in(path.name) or 0


def _step_in(name: str) -> int | None:
    """Returns the step in a name such as "checkpoint_1000", or None."""
    match = re.fullmatch(r".*checkpoint_(\d+)", name)
    return int(match[1]) if match else None


def open(path: epath.Path) -> Source:
    saved = open_as_saved(path)
    params = {name.removeprefix("target/"): tensor for name, tensor in saved.items() if name.startswith("target/")}
    if not params:
        raise Unreadable(f"{path} has no parameters (nothing under target/), only {', '.join(sorted(saved)[:3])}.")
    states = {name.removeprefix(_STATES): tensor for name, tensor in saved.items() if name.startswith(_STATES)}
    slots: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in states.items():
        slot, owner = _split_state(name, params)
        if owner is not None:
            slots.setdefault(slot, {})[owner] = tensor
    step = _saved_step(saved, path)
    layers = _scanned_layers(params)
    both = slots.get("v_row", {}).keys() & slots.get("v_col", {}).keys() & params.keys()
    for name in both:
        if _row_is_not_embed(name, params[name].shape, layers):
            slots["v_row"][name], slots["v_col"][name] = slots["v_col"][name], slots["v_row"][name]
    if "m" in slots:  # T5X stores the momentum with the opposite sign
        slots["m"] = {name: tensor.negative() for name, tensor in slots["m"].items()}
    slots = {slot: _rename_and_unstack(tensors, layers, slot) for slot, tensors in slots.items()}
    count = from_array(np.array(step, np.int32))
    # The counts of optax's transformations are equal, and may differ from the step.
    inner_count = next((tensor for name, tensor in states.items() if name.rpartition("/")[2] == "count"), count)
    others = {"step": count, "opt_state/step": count, "opt_state/count": inner_count}
    aliases = {name: _rename(name) for name in params if _scanned_stack(name, layers) is None}
    return Source(path, step, _rename_and_unstack(params, layers), slots, others, aliases)


def _split_state(name: str, params: Mapping[str, LazyTensor]) -> tuple[str, str | None]:
    """Returns (slot, parameter) of an optimizer tensor, (name, None) if it belongs to no parameter.

    T5X's own optimizers name a slot after the parameter ("kernel/v_row"), optax's before it ("1/0/mu/…/kernel").
    """
    owner, _, slot = name.rpartition("/")
    if owner in params and slot in SLOTS:
        return _OPTAX_NAMES.get(slot, slot), owner
    optax_owner = find_owner(name, params)
    if optax_owner is None:
        return name, None
    return name.removesuffix(f"/{optax_owner}").rpartition("/")[2], optax_owner


def _saved_step(saved: Mapping[str, LazyTensor], path: epath.Path) -> int:
    """Returns the saved step; 0 if there is none."""
    tensor = saved.get("state/step", from_array(np.array(0)))
    step = np.asarray(tensor.shape or tensor.read_all())
    if step.shape or not np.issubdtype(step.dtype, np.integer) or step < 0:
        raise Unreadable(f"{path} has an invalid step: {step}.")
    return int(step)


def open_as_saved(path: epath.Path) -> dict[str, LazyTensor]:
    """Returns all tensors of a checkpoint by T5X's names."""
    if path.is_dir() and (path / "state" / orbax_arrays.METADATA).exists():
        return orbax_arrays.open_arrays(path / "state")
    file = path / "checkpoint" if path.is_dir() else path
    if not file.is_file():
        raise Unreadable(f"{file} is not a file.")
    if file.stat().length > _MAX_INDEX_BYTES:
        raise Unreadable(f"{file} has {file.stat().length:,} bytes, which is too large for an index of arrays.")
    try:
        index = serialization.msgpack_restore(file.read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it is not a dictionary")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, AttributeError, MemoryError) as error:
        raise Unreadable(f"{file} is not a T5X checkpoint, or damaged ({type(error).__name__}: {str(error)[:100]}).") from error
    version = index.get("version", VERSION)
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise Unreadable(f"{file} has T5X version {version!r}. t5x_lab reads versions 1 to {VERSION}.")
    tree = index.get("optimizer", index)
    saved: dict[str, LazyTensor] = {}
    _collect(tree if isinstance(tree, dict) else {}, "", file.parent, saved, orbax_arrays.ChunkCache())
    return {name.removeprefix("_optimizer/"): tensor for name, tensor in saved.items()}


def _collect(
    node: Mapping, name: str, directory: epath.Path, into: dict[str, LazyTensor], cache: orbax_arrays.ChunkCache
) -> None:
    """Collects the leaves of an index: arrays, and references to array files."""
    for key, value in node.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(value, dict) and isinstance(value.get("kvstore"), dict):
            into[path] = _zarr(directory, path, str(value["kvstore"].get("path", "")), cache, value)
        elif isinstance(value, dict):
            _collect(value, path, directory, into, cache)
        elif isinstance(value, str) and value.startswith("PLACEHOLDER://"):
            into[path] = _zarr(directory, path, value.removeprefix("PLACEHOLDER://"), cache)
        elif isinstance(value, np.ndarray | np.generic):
            into[path] = from_array(np.asarray(value))


def _zarr(
    directory: epath.Path, name: str, location: str, cache: orbax_arrays.ChunkCache, entry: Mapping = MappingProxyType({})
) -> LazyTensor:
    """Opens an array in the directory of the index, whatever the original location was.

    Some published checkpoints lack the array's `.zarray` file. The metadata in the index replaces it.
    """
    folder = pathlib.PurePosixPath(location).name
    if not folder or folder in (".", "..") or not (directory / folder).is_dir():
        raise Unreadable(f"{directory} is incomplete: {name} should be in {folder or repr(location)}, which does not exist.")
    try:
        if entry.get("metadata") and not (directory / folder / ".zarray").exists():
            return orbax_arrays.open_zarr(directory, folder, cache=cache, assumed=_metadata(entry))
        return orbax_arrays.open_zarr(directory, folder, cache=cache)
    except (ValueError, OSError) as error:
        raise Unreadable(f"{directory / folder} cannot be read: {str(error).partition(chr(10))[0][:200]}") from error


def _metadata(entry: Mapping) -> dict[str, Any]:
    dtype = np.dtype(str(entry["dtype"])).str
    rest = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dimension_separator": "."}
    return {**rest, **dict(entry["metadata"]), "dtype": dtype}


def _scanned_layers(params: Mapping[str, LazyTensor]) -> dict[str, int]:
    """Returns the number of layers of each scanned stack. T5X's scan has the layers on the second axis."""
    norms = {m[1]: t for name, t in params.items() if (m := _SCANNED.fullmatch(name)) and name.endswith("norm/scale")}
    return {stack: tensor.shape[1] for stack, tensor in norms.items() if len(tensor.shape) == 2}


def _scanned_stack(name: str, layers: Mapping[str, int]) -> str | None:
    """Returns the scanned stack of a parameter; None if there is none."""
    match = _SCANNED.fullmatch(name)
    return match[1] if match and match[1] in layers else None


def _row_is_not_embed(name: str, shape: tuple[int, ...], layers: Mapping[str, int]) -> bool:
    """Returns whether `v_row` has another dimension than `embed`, which it has in t5x_lab and in T5X's scanned networks.

    For an unscanned matrix T5X's Adafactor goes by size: `v_row` has the smaller dimension, or the first of two equal ones.
    """
    if len(shape) != 2 or _scanned_stack(name, layers):
        return False
    return (0 if shape[0] <= shape[1] else 1) != embed_is_last(name)


def _layer_axis(name: str, slot: str) -> int:
    """Returns the layer axis of a scanned array: 1 in parameters; Adafactor's means lack some dimensions."""
    is_last = embed_is_last(name)
    return {"v_row": 0 if is_last else 1, "v_col": 1 if is_last else 0}.get(slot, 1)


def _rename_and_unstack(tensors: Mapping[str, LazyTensor], layers: Mapping[str, int], slot: str = "") -> dict[str, LazyTensor]:
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        stack = _scanned_stack(name, layers)
        if stack is None:
            renamed[_rename(name)] = tensor
            continue
        rest = name.removeprefix(f"{stack}/{stack}/")
        axis, unused = _layer_axis(name, slot), tensor.shape == (1,)  # other slots are used instead
        if not unused and (len(tensor.shape) <= axis or tensor.shape[axis] != layers[stack]):
            raise Unreadable(f"{name} {slot} has shape {tensor.shape}, but {layers[stack]} layers are expected on axis {axis}.")
        for i in range(layers[stack]):
            renamed[_rename(f"{stack}/layers_{i}/{rest}")] = tensor if unused else tensor.index(axis, i)
    return renamed


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
