"""LoRA in the files of Hugging Face's `peft`: adapter_config.json and adapter_model.safetensors, beside a model of theirs."""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t5x_lab.checkpoints.formats.huggingface import family_of, safetensors_files
from t5x_lab.checkpoints.layers import UNSTACKED, parts_of
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape, from_array
from t5x_lab.config.errors import UserError
from t5x_lab.networks.lora import Lora
from t5x_lab.networks.network import Network

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."  # what peft puts before the names of a model's modules
_NOTHING: dict[str, tuple] = {  # settings that are not read, with what asks for nothing
    "use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "bias": ("none", None),
    "fan_in_fan_out": (False, None), "modules_to_save": ([], None), "layer_replication": (None,), "lora_bias": (False, None),
    # Others change the base's weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


def read(directory: str, network: Network) -> tuple[Lora, dict[str, np.ndarray]]:
    """What `peft` saved for a model: the addition, and its parameters by our names, "encoder/…/query/lora/down".

    Raises:
      UserError: when files are missing or damaged, or it is anything but plain LoRA of matrices of this network.
    """
    path = pathlib.Path(directory)
    try:
        config = json.loads((path / CONFIG).read_bytes())
        kind, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}/{CONFIG} is none of peft's LoRA ({type(error).__name__}: {error}).") from error
    asked = [name for name, nothing in _NOTHING.items() if config.get(name) not in nothing]
    if kind != "LORA" or asked:
        raise UserError(
            f"{path} has {', '.join(asked) or kind}, which is not read; plain LoRA is, of the same rank everywhere."
        )
    alpha = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    tensors = safetensors_files.open_file(path / TENSORS)
    layers: dict[str, dict[int, np.ndarray]] = {}  # by our names of whole stacks
    matrices = list(_matrices(network))
    for matrix in matrices:
        names = [f"{_BEFORE}{matrix.theirs}.lora_{letter}.weight" for letter in "AB"]
        if not any(name in tensors for name in names):
            continue
        shapes = ((rank, math.prod(matrix.inputs)), (math.prod(matrix.outputs), rank))
        for part, name, flat, shape in zip(_PARTS, names, shapes, matrix.shapes(rank), strict=True):
            if name not in tensors:
                raise UserError(f"{path} holds no {name}: it is not whole.")
            tensor = tensors.pop(name)
            check_shape(name, tensor.shape, flat, str(path))
            array = tensor.cast(np.dtype(np.float32)).read_all().T.reshape(shape)
            layers.setdefault(f"{matrix.module}/lora/{part}", {})[matrix.layer] = array
    if tensors:
        raise UserError(f"{path} has {next(iter(tensors))}, which belongs to no matrix of the network that LoRA can change.")
    params = {}
    for name, found in layers.items():
        of_stack = [matrix.layer for matrix in matrices if matrix.module == name.rsplit("/lora/", 1)[0]]
        if found.keys() != set(of_stack):
            missing = min(set(of_stack) - found.keys())
            raise UserError(f"{path} has no {name} of layer {missing}; here LoRA is in all layers of a stack, or in none.")
        params[name] = found[-1] if of_stack == [-1] else np.stack([found[layer] for layer in sorted(of_stack)])
    modules = sorted({re.escape(name.rsplit("/lora/", 1)[0]) for name in params})
    return Lora("|".join(modules), rank, alpha), params


def write(directory: str, network: Any, params: Mapping[str, np.ndarray], base: str = "") -> None:
    """Writes what is added to a network as `peft.PeftModel.from_pretrained` reads it.

    Args:
      directory: a new one.
      network: with LoRA, and nothing else, added.
      params: those that are added, by our names.
      base: what the file calls the model without.

    Raises:
      UserError: when that is not so, or LoRA is added to what is no matrix of Hugging Face's.
    """
    methods: tuple = getattr(network, "peft", ())
    if len(methods) != 1 or not isinstance(methods[0][1], Lora):
        raise UserError('Only LoRA is written for peft: PEFT = {"lora": @Lora()}.')
    (peft_name, lora), network = methods[0], network.network
    params = {name.replace(f"/{peft_name}/", "/lora/"): array for name, array in params.items()}
    path = pathlib.Path(directory)
    if path.exists():
        raise UserError(f"{directory} exists, and nothing is ever overwritten. Name a new directory.")
    tensors: dict[str, LazyTensor] = {}
    left = set(params)
    targets = set()
    for matrix in _matrices(network):
        names = [f"{matrix.module}/lora/{part}" for part in _PARTS]
        if names[0] not in params:
            continue
        left -= set(names)
        down, up = (params[name] if matrix.layer < 0 else params[name][matrix.layer] for name in names)
        tensors[f"{_BEFORE}{matrix.theirs}.lora_A.weight"] = from_array(np.ascontiguousarray(down.reshape(-1, lora.rank).T))
        tensors[f"{_BEFORE}{matrix.theirs}.lora_B.weight"] = from_array(np.ascontiguousarray(up.reshape(lora.rank, -1).T))
        targets.add(matrix.theirs)
    if left:
        raise UserError(f"{min(left)} is added to what is no matrix in transformers' format, and peft has no place for it.")
    path.mkdir(parents=True)
    kind = "SEQ_2_SEQ_LM" if network.architecture == "encoder_decoder" else "CAUSAL_LM"
    config = {
        "peft_type": "LORA", "task_type": kind, "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": sorted(targets), "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (path / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    safetensors_files.write_file(path / TENSORS, tensors)


_PARTS = ("down", "up")


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A kernel of ours that is a matrix of theirs.

    Attributes:
      theirs: the name of its module there.
      module: of its module here; the layers of a stack are one.
      layer: its number in the stack; -1 where it is in none.
      inputs, outputs: sizes of the kernel's dimensions.
    """

    theirs: str
    module: str
    layer: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `down` and `up`."""
        return (*self.inputs, rank), (rank, *self.outputs)


def _matrices(network: Network) -> Iterator[_Matrix]:
    parts = parts_of(network)
    family, _ = family_of(network)
    config: Any = network
    for entry in family.entries(config):
        (name,) = entry.ours if len(entry.ours) == 1 else ("",)
        if entry.transposed and name.endswith("/kernel"):
            match, shape = UNSTACKED.fullmatch(name), parts[name].shape
            module = (f"{match[1]}/layers/{match[3]}" if match else name).removesuffix("/kernel")
            sizes = shape[: entry.inputs], shape[entry.inputs :]
            yield _Matrix(entry.name.removesuffix(".weight"), module, int(match[2]) if match else -1, *sizes)
