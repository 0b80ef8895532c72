"""The parameters, and what else is asked for, of a checkpoint of any format."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from t5x_lab.checkpoints import manager, rules
from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.layout import flat
from t5x_lab.checkpoints.names import Part, single_layers
from t5x_lab.checkpoints.sources import Place, Source, open_source
from t5x_lab.models.model import Model, ModelConfig, Params
from t5x_lab.networks.config import NetworkConfig
from t5x_lab.training.state import TrainState


def parts_of(network: NetworkConfig) -> Mapping[str, Part]:
    """The parts of a network's parameters, layers counted singly."""
    return single_layers({name: leaf.shape for name, leaf in flat(Model(ModelConfig(network)).abstract_params).items()})


def load_params(
    place: Place,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig = RestoreCheckpointConfig(),
    fresh: Callable[[], Params] = dict,
) -> Params:
    """A checkpoint's parameters, by the rules, placed as `abstract_params`' shardings say.

    Args:
      place: see `sources.find`.
      abstract_params: shapes, dtypes and shardings.
      axes: logical axis names in the same tree.
      config: the rules.
      fresh: makes fresh parameters, for what the rules leave fresh.
    """
    if place.format == "t5x_lab" and not config.has_rules:
        return manager.restore_params(place.path, abstract_params)
    with manager.naming_damage(place.path):
        return rules.restore_params(_checked(place, "params"), abstract_params, axes, config, fresh)


def carry_over(
    place: Place, state: TrainState, abstract_params: Params, axes: dict, config: RestoreCheckpointConfig
) -> TrainState:
    """A first state with what else `config.carry` takes from a checkpoint: the optimizer, the step and its counters."""
    if not config.carry:
        return state
    with manager.naming_damage(place.path):
        source = _checked(place, "rest")
        if "optimizer" in config.carry:
            opt_state = rules.restore_optimizer(source, state.opt_state, abstract_params, axes, config)
            state = dataclasses.replace(state, opt_state=opt_state)
        if "step" in config.carry:
            counted = {"step": state.step, "counters": state.counters}
            state = dataclasses.replace(state, **rules.restore_others(source, counted))
    return state


def _checked(place: Place, part: str) -> Source:
    """The source; of a checkpoint of ours, this process's share of the part's arrays is verified first."""
    if place.format == "t5x_lab":
        manager.verify(place.path, (part,), jax.process_index(), jax.process_count())
    return open_source(place, parts_of)
