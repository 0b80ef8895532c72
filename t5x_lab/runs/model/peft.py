"""Saving, loading and merging of PEFT parameters (LoRA, adapter layers, soft prompts), apart from their base model.

A model's PEFT parameters are those of its PEFT methods (PEFT) and those that are trained (TRAINABLE, unfrozen groups).
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.huggingface import peft
from t5x_lab.checkpoints.formats.location import find
from t5x_lab.checkpoints.initial import load_params
from t5x_lab.checkpoints.manager import save_run
from t5x_lab.config.errors import UserError
from t5x_lab.networks.functional import Params
from t5x_lab.networks.peft import merge_peft, peft_names
from t5x_lab.optim.groups import flat_names, merge, select, trained_predicate
from t5x_lab.runs.config.checkpoint_config import read_config
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.trust import remember

_BY_NAME = RestoreCheckpointConfig(assignment_map=(("(.*)", r"\1"),))  # reads some of a checkpoint's parameters


def peft_parameters(config: GinConfig, params: Params, network: Any) -> frozenset[str]:
    """Returns the names of parameters that PEFT methods added or that are trained.

    Raises:
      UserError: if these are all parameters.
    """
    names = list(flat_names(params))
    is_trained = trained_predicate(config.optimizer(), names, config.trainable())
    selected = peft_names(params, network) | set(filter(is_trained, names))
    if len(selected) == len(names):
        raise UserError(
            "All parameters of this model are trained. Save and load the whole model. If only PEFT parameters changed, set for "
            'example TRAINABLE = ".*/lora/.*".'
        )
    return selected


def with_adapter(base: Any, directory: str, step: int | None = None, trust: bool = False) -> Any:
    """Returns the base model with the PEFT parameters of a run. See `Run.with_adapter`."""
    location = find(directory, step)
    config = read_config(location, trust)
    model = base.make_variant(config)
    names = peft_parameters(config, model.sharded.abstract_params, model.network)
    _check_base(base, directory, model, names)
    trees = model.sharded.abstract_params, model.sharded.model.axes
    abstract, axes = (select(tree, names.__contains__) for tree in trees)
    params = load_params(location, abstract, axes, _BY_NAME)
    return model.with_params(merge(base.params, params), location.step)


def save_adapter(run: Any, directory: str) -> None:
    """Writes the PEFT parameters of a run as a run directory. See `Run.save_adapter`."""
    names = peft_parameters(run.config, run.params, run.network)
    save_run(directory, run.config.text, select(run.params, names.__contains__), run.step)
    remember(run.config.text)


def with_peft(base: Any, directory: str) -> Any:
    """Returns the base model with LoRA that Hugging Face's `peft` saved. See `Run.with_peft`."""
    lora, params = peft.read(directory, base.network)
    settings = {"modules": lora.modules, "rank": lora.rank, "alpha": lora.alpha}
    bindings = [f"peft/Lora.{name} = {value!r}" for name, value in settings.items()]
    bindings.append('TRAINABLE = ".*/lora/.*"')
    model = base.make_variant(GinConfig((), (base.config.text, 'PEFT = {"lora": @peft/Lora()}', *bindings)))
    _check_base(base, directory, model, frozenset(params))
    shardings = flat_names(model.sharded.param_shardings)
    placed = {name: jax.device_put(array, shardings[name]) for name, array in params.items()}
    return model.with_params(merge(base.params, traverse_util.unflatten_dict(placed, sep="/")), base.step)


def save_peft(run: Any, directory: str, base_name: str = "") -> None:
    """Writes the LoRA of a run in the format of Hugging Face's `peft`. See `Run.save_peft`."""
    names = peft_names(run.params, run.network)
    arrays = {name: np.asarray(x) for name, x in flat_names(run.params).items() if name in names}
    peft.write(directory, run.network, arrays, base_name)


def merged(run: Any) -> Any:
    """Returns the model with its PEFT parameters merged into its own. See `Run.merged`."""
    config = GinConfig((), (run.config.text, "PEFT = {}", "TRAINABLE = None"))
    sharded = run.shard_variant(config)
    merge_fn = functools.partial(merge_peft, methods=run.config.model().peft)
    params = jax.jit(merge_fn, out_shardings=sharded.param_shardings)(run.params)
    return type(run)(config, sharded, params, run.step)


def _check_base(base: Any, directory: str, model: Any, names: frozenset[str]) -> None:
    """Raises a `UserError` unless `base` has the parameters of `model`, except those in `names`."""
    base_shapes = {name: x.shape for name, x in flat_names(base.params).items()}
    all_shapes = {name: x.shape for name, x in flat_names(model.sharded.abstract_params).items()}
    shapes = {name: shape for name, shape in all_shapes.items() if name not in names}
    for name in sorted(shapes):
        if base_shapes.get(name) != shapes[name]:
            actual = f"has shape {base_shapes[name]}" if name in base_shapes else "does not have it"
            raise UserError(f"{directory} belongs to a base model with {name} {shapes[name]}. This model {actual}.")
    if extra := sorted(base_shapes.keys() - shapes.keys() - names):
        raise UserError(
            f"This model has {extra[0]}, which the base model of {directory} does not have. Use the base model alone, or merge "
            "its PEFT parameters first."
        )
