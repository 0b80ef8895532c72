"""Models by their directories or gin files: one as it is, several as an ensemble."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from t5x_lab.checkpoints.formats import Location, find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.layout import read_info
from t5x_lab.config.errors import UserError, one_of
from t5x_lab.data.config import SpecialTokens
from t5x_lab.models.model import ModelConfig
from t5x_lab.networks.additions import added_names
from t5x_lab.networks.config import DTYPES
from t5x_lab.networks.ensemble import Ensemble
from t5x_lab.observe.console import say
from t5x_lab.optim.groups import flat_names
from t5x_lab.partitioning.mesh import MeshShape
from t5x_lab.runs.checkpoint_config import config_of
from t5x_lab.runs.config import GinConfig
from t5x_lab.runs.on_its_base import learned
from t5x_lab.runs.run import Run
from t5x_lab.runs.sharded_model import ShardedModel


def load(
    model_dir: str | Sequence[str],
    step: int | None = None,
    mesh: str | None = None,
    weights: str = "last",
    dtype: str | None = None,
) -> Run:
    """The model of a run directory, at its latest checkpoint or at `step`; or of a directory of Hugging Face's.

    Of several directories it is an ensemble, whose logits are the mean of theirs (Raffel et al. 2020, section 3.6). Members
    have one vocabulary and the same special tokens, and any architectures.

    Args:
      model_dir: a directory, or several, that `t5x_lab train`, `Run.save` or `t5x_lab convert` wrote, or `transformers` saved.
      step: a checkpoint's step.
      mesh: devices to spread it over, such as "fsdp=8"; by default the first device alone, or where several processes work as
        one the run's own MESH. All of them then make the same calls, and get the same answers.
      weights: those of the checkpoint's "last" step, or their moving "average" where the run keeps one (AVERAGE_DECAY).
      dtype: of activations, "float32", "bfloat16" or "float16"; by default that of the checkpoint's configuration.
    """
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)

    def found(directory: str) -> tuple[GinConfig, Location]:
        checkpoint = find(directory, step, weights)
        config = config_of(checkpoint)
        return GinConfig((), (config.text, f"TransformerConfig.dtype = {dtype!r}")) if dtype else config, checkpoint

    directories = [model_dir] if isinstance(model_dir, str | os.PathLike) else model_dir
    members = [found(str(directory)) for directory in directories]
    return _run(*members[0], mesh) if len(members) == 1 else _ensemble(members, mesh)


def from_gin(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    seed: int = 0,
    checkpoint: str | None = None,
    step: int | None = None,
    mesh: str | None = None,
) -> Run:
    """A model from gin files, with fresh parameters or those of a checkpoint.

    Args:
      files: at least a model file, such as "models/t5_1_1/small.gin".
      bindings: gin bindings, such as "DROPOUT_RATE = 0.0".
      seed: of fresh parameters.
      checkpoint: a run directory, or a checkpoint of t5x_lab, T5X or Hugging Face.
      step: which checkpoint of a run directory; the latest by default.
      mesh: see `load`.
    """
    files, bindings = ([x] if isinstance(x, str) else x for x in (files, bindings))
    config = GinConfig(tuple(map(str, files)), tuple(bindings))
    return _run(config, None if checkpoint is None else find(checkpoint, step), mesh, seed)


def _run(config: GinConfig, checkpoint: Location | None, mesh: str | None, seed: int = 0) -> Run:
    sharded = _on_mesh(config.model(), config, mesh)
    if checkpoint is None:
        return Run(config, sharded, sharded.init_params(seed), step=0)
    _check_whole(checkpoint, config, sharded)
    added = added_names(sharded.abstract_params, sharded.model.config.network)
    fresh = functools.partial(sharded.init_params, seed)
    params = load_params(checkpoint, sharded.abstract_params, sharded.model.axes, fresh=fresh, added=added)
    return Run(config, sharded, params, checkpoint.step)


def _check_whole(checkpoint: Location, config: GinConfig, sharded: ShardedModel) -> None:
    """Raises a `UserError` for what `save_added` wrote, which is no model without its base."""
    if checkpoint.format != "t5x_lab":
        return
    found, wanted = read_info(checkpoint.path)["parameters"].keys(), flat_names(sharded.abstract_params).keys()
    if found < wanted and (config.trainable() is not None or sharded.model.config.added):
        missing = wanted - found - added_names(sharded.abstract_params, sharded.model.config.network)
        if missing and found <= learned(config, sharded.abstract_params, sharded.model.config.network):
            raise UserError(
                f"{checkpoint.path} holds only what was learned on top of its base, without {min(missing)}. Ask it there: "
                "t5x_lab.load(BASE).with_added(…)."
            )


def _ensemble(members: Sequence[tuple[GinConfig, Location]], mesh: str | None) -> Run:
    if not members:
        raise UserError("An ensemble of no models was asked for; name their run directories.")
    config, first = members[0]
    for other, location in members[1:]:
        for what in (_special_tokens, GinConfig.vocabulary_if_set):
            mine, theirs = what(config), what(other)
            if mine != theirs:
                raise UserError(
                    f"{first.path} has {mine}, and {location.path} has {theirs}; the members of an ensemble read and write the "
                    "same ids."
                )
    ends = [(location.path, config.special_tokens().input_eos) for config, location in members]
    known = [(path, eos) for path, eos in ends if eos is not None]
    if known and ends[0][1] is None:
        config = GinConfig((), (config.text, f"SpecialTokens.input_eos = {known[0][1]}"))
    for path, eos in known[1:]:
        if eos != known[0][1]:
            how = "with" if known[0][1] else "without"
            say(f"All members read inputs {how} an end token, as {known[0][0]}; {path} was trained otherwise.")
    models = [config.model() for config, _ in members]
    network: Any = Ensemble(tuple(model.network for model in models))
    together = dataclasses.replace(models[0], network=network, added={}, head=None)
    sharded = _on_mesh(together, config, mesh)
    abstract, axes = sharded.abstract_params["members"], sharded.model.axes["members"]
    params = {str(i): load_params(location, abstract[str(i)], axes[str(i)]) for i, (_, location) in enumerate(members)}
    return Run(config, sharded, {"members": params}, max(location.step for _, location in members))


def _special_tokens(config: GinConfig) -> SpecialTokens:
    """Without what inputs end with in training."""
    return dataclasses.replace(config.special_tokens(), input_eos=None)


def _on_mesh(model: ModelConfig, config: GinConfig, mesh: str | None) -> ShardedModel:
    together = mesh is None and jax.process_count() > 1
    shape = config.mesh() if together else MeshShape.parse(mesh or "data=1")
    sizes = (shape.data, shape.fsdp, shape.tensor, shape.replica or 1)
    devices = jax.devices() if -1 in sizes or jax.process_count() > 1 else jax.devices()[: int(np.prod(sizes))]
    return ShardedModel(model, shape, devices, config.sharding())
