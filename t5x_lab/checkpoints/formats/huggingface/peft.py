"""Reads and writes LoRA in the format of Hugging Face's `peft`: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t5x_lab.checkpoints.formats.huggingface import safetensors_files
from t5x_lab.checkpoints.formats.huggingface.directory import find_family
from t5x_lab.checkpoints.layers import UNSTACKED, network_parts
from t5x_lab.checkpoints.lazy_tensors import LazyTensor, check_shape, from_array
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.temporary import local_copy
from t5x_lab.networks.lora import Lora
from t5x_lab.networks.network import Network

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of module names in peft
_NEUTRAL: dict[str, tuple] = {  # unsupported settings, with values that have no effect
    "use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "bias": ("none", None),
    "fan_in_fan_out": (False, None), "modules_to_save": ([], None), "layer_replication": (None,), "lora_bias": (False, None),
    # Other values change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


def read(directory: str, network: Network) -> tuple[Lora, dict[str, np.ndarray]]:
    """Reads a LoRA adapter. Returns its configuration and parameters by our names, "encoder/.../query/lora/down".

    Raises:
      UserError: if files are missing or damaged, or the adapter is not plain LoRA for projections of this network.
    """
    path = pathlib.Path(local_copy(directory))
    try:
        config = parse_json((path / CONFIG).read_bytes())
        kind, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}/{CONFIG} is not a LoRA configuration of peft ({type(error).__name__}: {error}).") from error
    unsupported = [name for name, neutral in _NEUTRAL.items() if config.get(name) not in neutral]
    if kind != "LORA" or unsupported:
        raise UserError(f"{path} uses {', '.join(unsupported) or kind}, which is not supported. Use plain LoRA with one rank.")
    alpha = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    tensors = safetensors_files.open_file(path / TENSORS)
    layers: dict[str, dict[int, np.ndarray]] = {}  # by parameter name, then layer
    matrices = list(_matrices(network))
    for matrix in matrices:
        names = [f"{_PREFIX}{matrix.hf_module}.lora_{letter}.weight" for letter in "AB"]
        if not any(name in tensors for name in names):
            continue
        shapes = ((rank, math.prod(matrix.inputs)), (math.prod(matrix.outputs), rank))
        for part, name, flat, shape in zip(_PARTS, names, shapes, matrix.shapes(rank), strict=True):
            if name not in tensors:
                raise UserError(f"{path} is incomplete: {name} is missing.")
            tensor = tensors.pop(name)
            check_shape(name, tensor.shape, flat, str(path))
            array = tensor.cast(np.dtype(np.float32)).read_all().T.reshape(shape)
            layers.setdefault(f"{matrix.module}/lora/{part}", {})[matrix.layer] = array
    if tensors:
        raise UserError(f"{path} has {next(iter(tensors))}, which belongs to no projection of this network.")
    params = {}
    for name, arrays in layers.items():
        stack = [matrix.layer for matrix in matrices if matrix.module == name.rsplit("/lora/", 1)[0]]
        if arrays.keys() != set(stack):
            missing = min(set(stack) - arrays.keys())
            raise UserError(f"{path} has no {name} of layer {missing}. LoRA must be in all layers of a stack or in none.")
        params[name] = arrays[-1] if stack == [-1] else np.stack([arrays[layer] for layer in sorted(stack)])
    modules = sorted({re.escape(name.rsplit("/lora/", 1)[0]) for name in params})
    return Lora("|".join(modules), rank, alpha), params


def write(directory: str, network: Any, params: Mapping[str, np.ndarray], base: str = "") -> None:
    """Writes the LoRA parameters of a network for `peft.PeftModel.from_pretrained`.

    Args:
      directory: new directory.
      network: a network with LoRA as its only PEFT method.
      params: its LoRA parameters by our names.
      base: name of the base model in the file.

    Raises:
      UserError: for another PEFT method, or LoRA of a module that is not a projection in the Hugging Face model.
    """
    methods: tuple = getattr(network, "peft", ())
    if len(methods) != 1 or not isinstance(methods[0][1], Lora):
        raise UserError('Only LoRA can be written for peft: PEFT = {"lora": @Lora()}.')
    (peft_name, lora), network = methods[0], network.network
    params = {name.replace(f"/{peft_name}/", "/lora/"): array for name, array in params.items()}
    path = pathlib.Path(directory)
    if path.exists():
        raise UserError(f"{directory} exists. Choose a new directory.")
    tensors: dict[str, LazyTensor] = {}
    unwritten = set(params)
    targets = set()
    for matrix in _matrices(network):
        names = [f"{matrix.module}/lora/{part}" for part in _PARTS]
        if names[0] not in params:
            continue
        unwritten -= set(names)
        down, up = (params[name] if matrix.layer < 0 else params[name][matrix.layer] for name in names)
        tensors[f"{_PREFIX}{matrix.hf_module}.lora_A.weight"] = from_array(np.ascontiguousarray(down.reshape(-1, lora.rank).T))
        tensors[f"{_PREFIX}{matrix.hf_module}.lora_B.weight"] = from_array(np.ascontiguousarray(up.reshape(lora.rank, -1).T))
        targets.add(matrix.hf_module)
    if unwritten:
        raise UserError(f"{min(unwritten)} belongs to a module that is not a projection in the Hugging Face model.")
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
    """A kernel that is a matrix in the Hugging Face model.

    Attributes:
      hf_module: name of its module in the Hugging Face model.
      module: name of its module here, the same for all layers of a stack.
      layer: layer index. -1 = not in a stack.
      inputs, outputs: sizes of the kernel's input and output axes.
    """

    hf_module: str
    module: str
    layer: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of `down` and `up`."""
        return (*self.inputs, rank), (rank, *self.outputs)


def _matrices(network: Network) -> Iterator[_Matrix]:
    parts = network_parts(network)
    family, _ = find_family(network)
    config: Any = network
    for entry in family.entries(config):
        (name,) = entry.parameters if len(entry.parameters) == 1 else ("",)
        if entry.transposed and name.endswith("/kernel"):
            match, shape = UNSTACKED.fullmatch(name), parts[name].shape
            module = (f"{match[1]}/layers/{match[3]}" if match else name).removesuffix("/kernel")
            sizes = shape[: entry.inputs], shape[entry.inputs :]
            yield _Matrix(entry.name.removesuffix(".weight"), module, int(match[2]) if match else -1, *sizes)
