"""`load` and `from_gin`: models from run directories, checkpoints and gin files, and ensembles."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax

from t5x_lab.checkpoints.formats.location import Location, find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.log import log
from t5x_lab.data.vocabularies.config import SpecialTokens
from t5x_lab.models.config import ModelConfig
from t5x_lab.networks.config import DTYPES
from t5x_lab.networks.ensemble import Ensemble
from t5x_lab.networks.peft import peft_names
from t5x_lab.optim.groups import flat_names
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.config.checkpoint_config import read_config
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.model.peft import peft_parameters
from t5x_lab.runs.model.run import Run
from t5x_lab.runs.model.sharded_model import ShardedModel


def load(
    model_dir: str | Sequence[str],
    step: int | None = None,
    mesh: str | MeshShape | None = None,
    weights: str = "last",
    dtype: str | None = None,
    trust: bool = False,
    parameter_dtype: str = "float32",
    config: GinConfig | None = None,
) -> Run:
    """Loads a model from a run directory, a Hugging Face directory, or another checkpoint with its configuration.

    Several directories make an ensemble, whose logits are the mean of the members' (Raffel et al. 2020, section 3.6). Members
    have the same vocabulary and special tokens, and any architectures.

    Args:
      model_dir: one or several directories that `t5x_lab train`, `Run.save`, `t5x_lab convert` or `transformers` wrote.
      step: step of the checkpoint. Default: the latest.
      mesh: mesh of devices, such as "fsdp=8". Default: one device, or the run's MESH for several processes, which then all make
        the same calls and get the same results.
      weights: the "last" weights, or their moving "average" (AVERAGE_DECAY).
      dtype: type of activations, "float32", "bfloat16" or "float16". Default: as in the configuration.
      trust: whether configurations of other people may import their Python modules and call any function. Those that this user
        trained on this machine always may.
      parameter_dtype: dtype of the parameters on the devices. "bfloat16" takes half the memory, and rounds them to 8 bits.
      config: configuration of checkpoints that store none: those of T5X and Mesh TensorFlow.

    Returns:
      The model.

    Raises:
      UserError: if there is no checkpoint, or members of an ensemble do not fit together.
    """
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)

    def locate(directory: str) -> tuple[GinConfig, Location]:
        checkpoint = find(directory, step, weights)
        own = config if config and not checkpoint.describes_model else read_config(checkpoint, trust)
        return GinConfig((), (own.text, f"TransformerConfig.dtype = {dtype!r}")) if dtype else own, checkpoint

    directories = [model_dir] if isinstance(model_dir, str | os.PathLike) else model_dir
    members = [locate(str(directory)) for directory in directories]
    if len(members) == 1:
        return _run(*members[0], mesh, parameter_dtype=parameter_dtype)
    return _ensemble(members, mesh, parameter_dtype)


def from_gin(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    step: int | None = None,
    mesh: str | None = None,
) -> Run:
    """Builds a model from gin files, with fresh parameters or those of a checkpoint.

    Args:
      files: gin files, at least a model file such as "models/t5_1_1/small.gin".
      bindings: gin bindings such as "DROPOUT_RATE = 0.0".
      seed: seed of fresh parameters.
      checkpoint: a run directory or a checkpoint of any format.
      step: step of the checkpoint. Default: the latest.
      mesh: see `load`.

    Returns:
      The model.
    """
    files, bindings = ([x] if isinstance(x, str) else x for x in (files, bindings))
    config = GinConfig(tuple(map(str, files)), tuple(bindings))
    return _run(config, None if checkpoint is None else find(checkpoint, step), mesh, seed)


def _run(
    config: GinConfig,
    checkpoint: Location | None,
    mesh: str | MeshShape | None,
    seed: int = 0,
    parameter_dtype: str = "float32",
) -> Run:
    sharded = _shard(config.model(), config, mesh, parameter_dtype)
    if checkpoint is None:
        return Run(config, sharded, sharded.init_params(seed), step=0)
    _check_complete(checkpoint, config, sharded)
    peft = peft_names(sharded.abstract_params, sharded.model.config.network)
    fresh = functools.partial(sharded.init_params, seed)
    params = load_params(checkpoint, sharded.abstract_params, sharded.model.axes, fresh=fresh, fresh_names=peft)
    return Run(config, sharded, params, checkpoint.step)


def _check_complete(checkpoint: Location, config: GinConfig, sharded: ShardedModel) -> None:
    """Raises a `UserError` for a directory written by `save_adapter`, which needs its base model."""
    if checkpoint.format != "t5x_lab":
        return
    stored, expected = read_info(checkpoint.path)["parameters"].keys(), flat_names(sharded.abstract_params).keys()
    if stored < expected and (config.trainable() is not None or sharded.model.config.peft):
        missing = expected - stored - peft_names(sharded.abstract_params, sharded.model.config.network)
        if missing and stored <= peft_parameters(config, sharded.abstract_params, sharded.model.config.network):
            raise UserError(
                f"{checkpoint.path} holds only PEFT parameters; {min(missing)} of its base model is missing. Load the base "
                "model first: "
                f't5x_lab.load(BASE).with_adapter("{checkpoint.path}").'
            )


def _ensemble(members: Sequence[tuple[GinConfig, Location]], mesh: str | MeshShape | None, parameter_dtype: str) -> Run:
    if not members:
        raise UserError("An ensemble needs at least one run directory.")
    config, first = members[0]
    for other, location in members[1:]:
        for read_setting in (_special_tokens, GinConfig.vocabulary_if_set):
            first_setting, other_setting = read_setting(config), read_setting(other)
            if first_setting != other_setting:
                raise UserError(
                    f"{first.path} has {first_setting}, but {location.path} has {other_setting}. Members of an ensemble must "
                    "have the same ids."
                )
    input_eos = [(location.path, config.special_tokens().input_eos) for config, location in members]
    settings = [(path, eos) for path, eos in input_eos if eos is not None]
    if settings and input_eos[0][1] is None:
        config = GinConfig((), (config.text, f"SpecialTokens.input_eos = {settings[0][1]}"))
    for path, eos in settings[1:]:
        if eos != settings[0][1]:
            preposition = "with" if settings[0][1] else "without"
            log(f"All members read inputs {preposition} an EOS token, as {settings[0][0]}. {path} was trained differently.")
    models = [config.model() for config, _ in members]
    network: Any = Ensemble(tuple(model.network for model in models))
    model = dataclasses.replace(models[0], network=network, peft={}, head=None)
    sharded = _shard(model, config, mesh, parameter_dtype)
    abstract, axes = sharded.abstract_params["members"], sharded.model.axes["members"]
    params = {str(i): load_params(location, abstract[str(i)], axes[str(i)]) for i, (_, location) in enumerate(members)}
    return Run(config, sharded, {"members": params}, max(location.step for _, location in members))


def _special_tokens(config: GinConfig) -> SpecialTokens:
    """Returns the special tokens without `input_eos`."""
    return dataclasses.replace(config.special_tokens(), input_eos=None)


def _shard(model: ModelConfig, config: GinConfig, mesh: str | MeshShape | None, parameter_dtype: str) -> ShardedModel:
    use_run_mesh = mesh is None and jax.process_count() > 1
    shape = config.mesh() if use_run_mesh else MeshShape.parse(mesh or "data=1")
    devices = jax.devices() if jax.process_count() > 1 else shape.first_of(jax.devices())
    return ShardedModel(model, shape, devices, config.sharding(), parameter_dtype)
