"""Checkpoints of Mesh TensorFlow's transformers, the format of T5's original releases (`model.ckpt-1000000`)."""

import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from t5x_lab.checkpoints.formats.source import Source, embed_is_last
from t5x_lab.checkpoints.formats.tensor_bundle import index_file, open_bundle
from t5x_lab.checkpoints.layout import check_step, choose_step
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, Unreadable, from_array

NAME, TITLE, DESCRIBES_MODEL = "mesh_tensorflow", "Mesh TensorFlow", False
_STEP = "global_step"
_SLOTS = {"slot_vr": "v_row", "slot_vc": "v_col", "slot_v": "v", "slot_m": "m"}
_SUBLAYERS = {"SelfAttention": "self_attention", "EncDecAttention": "cross_attention", "DenseReluDense": "mlp"}
_PROJECTIONS = {"q": "query/kernel", "k": "key/kernel", "v": "value/kernel", "o": "out/kernel"}
_BLOCK = re.compile(r"(\w+)/block_(\d+)/(layer_\d+)/(.*)")
_NORM = re.compile(r"(?:\w+_)?norm/scale")
_WHOLE = (  # a stack that stands alone is called "transformer"
    (r"shared/embedding|(?:decoder|transformer)/embedding", "token_embedder/embedding"),
    (r"encoder/embedding", "encoder_token_embedder/embedding"),
    (r"(?:decoder|transformer)/logits/kernel", "logits_dense/kernel"),
    (r"(?:decoder|transformer)/(?:\w+_)?norm/scale", "decoder/final_norm/scale"),
    (r"encoder/(?:\w+_)?norm/scale", "encoder/final_norm/scale"),
    (r"(?:shared|decoder|transformer)/positional_embedding", "position_embedder/embedding"),
)


def find(root: epath.Path, step: int | None) -> epath.Path | None:
    is_file = root.parent.name and root.name  # neither the root of a file system nor a bucket
    prefix = root.with_name(root.name.removesuffix(".index")) if is_file else root
    if is_file and index_file(prefix).exists():
        if step is not None:
            check_step(root, step_of(prefix), step)
        return prefix
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    steps = {int(match[2]): match[1] for name in names if (match := re.fullmatch(r"(.*\.ckpt-(\d+))\.index", name))}
    return root / steps[choose_step(root, steps, step)] if steps else None


def step_of(path: epath.Path) -> int:
    match = re.fullmatch(r".*-(\d+)", path.name)
    return int(match[1]) if match else 0


def open_as_saved(path: epath.Path) -> dict[str, LazyTensor]:
    """Returns all tensors of a checkpoint by Mesh TensorFlow's names."""
    return open_bundle(path)


def open(path: epath.Path) -> Source:
    saved = open_as_saved(path)
    step_tensor = saved.pop(_STEP, from_array(np.array(step_of(path))))
    if step_tensor.shape or not np.issubdtype(step_tensor.dtype, np.integer):
        raise Unreadable(f"{path} has an invalid {_STEP}: {step_tensor.shape} of {step_tensor.dtype}.")
    step = int(step_tensor.read_all())
    owners = {name: _owner(name, saved) for name in saved}
    stored = {name: tensor for name, tensor in saved.items() if owners[name] is None}
    if not any(_BLOCK.fullmatch(name) for name in stored):
        raise Unreadable(
            f"{path} is a checkpoint of TensorFlow, but not of Mesh TensorFlow's transformer: it has no block_000, only "
            f"{', '.join(sorted(stored)[:3])}. t5x_lab reads checkpoints of t5x_lab, T5X, Mesh TensorFlow and Hugging Face."
        )
    names = _our_names(stored)
    slots: dict[str, dict[str, LazyTensor]] = {}
    for name, owner in owners.items():
        if owner is not None:
            slot = _SLOTS[name.removeprefix(f"{owner}_")]
            slots.setdefault(_slot_name(slot, names[owner], saved[owner].shape), {})[names[owner]] = saved[name]
    if "m" in slots:  # the average of what is subtracted, which is added here
        slots["m"] = {name: tensor.negative() for name, tensor in slots["m"].items()}
    count = from_array(np.array(step, np.int32))
    others = {"step": count, "opt_state/step": count, "opt_state/count": count}
    return Source(path, step, {names[name]: tensor for name, tensor in stored.items()}, slots, others)


def _owner(name: str, saved: Mapping[str, LazyTensor]) -> str | None:
    """Returns the parameter of an optimizer's slot such as "shared/embedding_slot_vr"; None for a parameter."""
    owner, _, slot = name.rpartition("_slot_")
    return owner if f"slot_{slot}" in _SLOTS and owner in saved else None


def _slot_name(slot: str, parameter: str, shape: tuple[int, ...]) -> str:
    """Returns t5x_lab's name of a slot: `v_row` has the dimension `embed`.

    In Mesh TensorFlow vr lacks the larger dimension, and the first of two equal ones (`AdafactorOptimizer._factored_dims`).
    """
    if slot not in ("v_row", "v_col") or len(shape) != 2:
        return slot
    dimension_of_vr = 1 if shape[0] >= shape[1] else 0
    return slot if dimension_of_vr == embed_is_last(parameter) else {"v_row": "v_col", "v_col": "v_row"}[slot]


def _our_names(stored: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Returns t5x_lab's names by Mesh TensorFlow's."""
    matches = {name: match for name in stored if (match := _BLOCK.fullmatch(name))}
    kinds = {match.group(1, 2, 3): match[4].partition("/")[0] for match in matches.values() if not _NORM.fullmatch(match[4])}
    biases = {match[1]: set[str]() for match in matches.values()}
    for match in matches.values():
        if match[4] == "SelfAttention/relative_attention_bias":
            biases[match[1]].add(match[2])
    names = {}
    for name in stored:
        if name in matches:
            stack, block, layer, rest = matches[name].groups()
            kind = kinds.get((stack, block, layer), "")
            names[name] = _name_in_block(stack, int(block), kind, rest, has_own_biases=len(biases[stack]) > 1)
        else:
            names[name] = next((new for pattern, new in _WHOLE if re.fullmatch(pattern, name)), name)
    return names


def _name_in_block(stack: str, block: int, kind: str, rest: str, has_own_biases: bool) -> str:
    stack = "decoder" if stack == "transformer" else stack
    sublayer, layer = _SUBLAYERS.get(kind, kind), f"{stack}/layers_{block}"
    if _NORM.fullmatch(rest):
        return f"{layer}/{sublayer}_norm/scale"
    part = rest.removeprefix(f"{kind}/")
    if part == "relative_attention_bias":
        return f"{layer if has_own_biases else stack}/relpos_bias/rel_embedding"
    return f"{layer}/{sublayer}/{_PROJECTIONS.get(part, part)}"
