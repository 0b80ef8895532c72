"""Loads parameters, and optionally optimizer and step, from a checkpoint of any format.

All commands load parameters here: `INITIAL_CHECKPOINT_PATH`, `t5x_lab.load`, `eval` and others.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.location import Location, find, open_source
from t5x_lab.checkpoints.formats.source import Source, find_owner
from t5x_lab.checkpoints.layers import Part, unstacked_parts
from t5x_lab.checkpoints.layout import FORMAT, check_same_parameters, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.checkpoints.rules import assign_sources, fit_shape
from t5x_lab.checkpoints.sharded_arrays import read_each, read_together, to_array
from t5x_lab.checkpoints.verification import check_arrays, explain_damage
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.log import log
from t5x_lab.networks.functional import Params
from t5x_lab.optim.counts import start_count_at
from t5x_lab.training.state import TrainState


def load_params(
    location: Location,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig = RestoreCheckpointConfig(),
    fresh: Callable[[], Params] = dict,
    fresh_names: Collection[str] = (),
) -> Params:
    """Returns the parameters of a checkpoint, loaded by the rules.

    Args:
      location: checkpoint. See `formats.location.find`.
      abstract_params: shapes, dtypes and shardings.
      axes: logical axes in the same tree.
      config: rules.
      fresh: function that initializes parameters, called only if some are fresh.
      fresh_names: names of parameters that may be missing in the checkpoint and are then fresh, independent of the rules.

    Raises:
      UserError: if the checkpoint is damaged, or does not fit the model by the rules.
    """
    others = _find_others(config)
    with explain_damage(location.path, *(other.path for other in others.values())):
        is_whole = location.format == "t5x_lab" and not config.has_rules
        if is_whole:
            check_same_parameters(location.path, abstract_params, fresh_names)
        is_stored = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(abstract_params))
        if is_whole and is_stored:
            info = read_info(location.path)
            if info["format"] == FORMAT and info["parameters"].keys() >= set(fresh_names):
                return _restore_params(location, abstract_params)
        source = _open(location, others)
        params = _load_by_rules(source, abstract_params, axes, config, fresh, fresh_names)
        source.check()
    return params


def carry_over(
    location: Location,
    state: TrainState,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig,
    fresh_names: Collection[str] = (),
) -> TrainState:
    """Returns the initial state of a run with the optimizer, step and counters of a checkpoint, as `config.carry` asks.

    Args:
      location: checkpoint. See `formats.location.find`.
      state: initial state with loaded parameters. Its optimizer state is donated.
      abstract_params, axes, config, fresh_names: see `load_params`.
    """
    if not config.carry:
        return state
    others = _find_others(config)
    with explain_damage(location.path, *(other.path for other in others.values())):
        source = _open(location, others)
        if "optimizer" in config.carry:
            opt_state = _load_slots(source, state.opt_state, abstract_params, axes, config, fresh_names)
            state = dataclasses.replace(state, opt_state=opt_state)
        if "step" in config.carry:
            counts = {"step": state.step, "counters": state.counters}
            state = dataclasses.replace(state, **_load_others(source, counts))
            if "optimizer" not in config.carry:
                state = dataclasses.replace(state, opt_state=start_count_at(state.opt_state, state.step))
        source.check()
    return state


def _find_others(config: RestoreCheckpointConfig) -> dict[str, Location]:
    return {name: find(path, weights=config.weights) for name, path in config.others.items()}


def _open(location: Location, others: Mapping[str, Location]) -> Source:
    """Opens a checkpoint, with the parameters of other ones under prefixed names."""
    source = open_source(location)
    opened = {name: open_source(other) for name, other in others.items()}
    params = {f"{name}:{parameter}": tensor for name, other in opened.items() for parameter, tensor in other.params.items()}

    def check() -> None:
        for each in (source, *opened.values()):
            each.check()

    prefixed = {name: other.path for name, other in others.items()}
    return dataclasses.replace(source, params=source.params | params, prefixed=prefixed, check=check)


def _restore_params(location: Location, abstract_params: Params) -> Params:
    """Restores all parameters of a t5x_lab checkpoint with Orbax."""

    def restore(abstract: Params) -> Params:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(location.path / location.part, abstract)
        check_arrays(location.path, {location.part: params})
        return params

    return read_together(abstract_params, restore)


def _load_by_rules(
    source: Source,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig,
    fresh: Callable[[], Params],
    fresh_names: Collection[str],
) -> Params:
    leaves, names = named_leaves(abstract_params), _named_axes(axes)
    axis_names = {axis for parameter_axes in names.values() for axis in parameter_axes if axis is not None}
    for axis in config.extend:
        check_choice("An entry of RestoreCheckpointConfig.extend", axis, sorted(axis_names))
    parts = unstacked_parts(leaves)
    assigned = assign_sources(parts, source, config, fresh_names)
    pieces: dict[str, list[tuple[int | None, LazyTensor]]] = {name: [] for name in leaves}
    counts = {"copied": 0, "extended": 0, "fresh": 0}
    for name, part in parts.items():
        assignment = assigned[name]
        if assignment.source is None:
            counts["fresh"] += 1
            continue
        tensor = source.params[assignment.source]
        source_name = f"{assignment.source}, transposed," if assignment.transposed else assignment.source
        tensor = tensor.transpose() if assignment.transposed else tensor
        fitted = fit_shape(tensor, part.shape, _part_axes(names, part), name, source_name, source, config)
        counts["copied" if fitted.shape == part.shape else "extended"] += 1
        pieces[part.parameter].append((part.layer, fitted))
    if config.has_rules:
        unused = source.params.keys() - {assignment.source for assignment in assigned.values()}
        paths = [source.path, *source.prefixed.values()]
        not_used = [f"{sum(source.origin(name)[0] == path for name in unused)} of {path}" for path in paths]
        described = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        log(f"Loaded parameters: {described}. Not used: {', '.join(not_used)}.")
    if counts["fresh"] or counts["extended"]:
        arrays = read_each(named_leaves(fresh()), lambda name, leaf: to_array(leaf, pieces[name], leaf))
    else:
        arrays = read_each(leaves, lambda name, leaf: to_array(leaf, pieces[name], None))
    return traverse_util.unflatten_dict(arrays, sep="/")


def _load_slots(
    source: Source,
    fresh_state: Any,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig,
    fresh_names: Collection[str],
) -> Any:
    """Loads the optimizer slots of loaded parameters. Slots of fresh or transposed parameters stay fresh.

    Raises:
      UserError: if the source has no such slots.
    """
    params, names = named_leaves(abstract_params), _named_axes(axes)
    parts = unstacked_parts(params)
    assigned = assign_sources(parts, source, config, fresh_names)
    parts_of_parameter: dict[str, list[tuple[str, Part]]] = {}
    for name, part in parts.items():
        parts_of_parameter.setdefault(part.parameter, []).append((name, part))
    if not source.slots:
        raise UserError(f'{source.path} has no optimizer state. Remove "optimizer" from RestoreCheckpointConfig.carry.')

    def load(name: str, leaf: jax.Array) -> jax.Array:
        owner = find_owner(name, params)
        if owner is None:
            return _load_other(source, f"opt_state/{name}", leaf)
        if leaf.ndim != len(params[owner].shape):
            return leaf  # unused: the parameter has other slots
        slot = _find_slot(name.removesuffix(f"/{owner}"), source)
        if slot is None:
            raise UserError(
                f"{source.path} has no optimizer slot {name.removesuffix(f'/{owner}')} (it has {', '.join(source.slots)}): "
                "another optimizer. "
                'Use the same OPTIMIZER, or remove "optimizer" from RestoreCheckpointConfig.carry.'
            )
        pieces = []
        for part_name, part in parts_of_parameter[owner]:
            assignment = assigned[part_name]
            if assignment.source is None or assignment.transposed or assignment.source not in source.slots[slot]:
                continue
            tensor = source.slots[slot][assignment.source]
            shape = leaf.shape if part.layer is None else leaf.shape[1:]
            slot_names = f"{slot} of {part_name}", f"{slot} of {assignment.source}"
            fitted = fit_shape(tensor, shape, _part_axes(names, part), *slot_names, source, config)
            pieces.append((part.layer, fitted))
        return to_array(leaf, pieces, leaf)

    leaves = read_each(named_leaves(fresh_state), load)
    return jax.tree.unflatten(jax.tree.structure(fresh_state), list(leaves.values()))


def _find_slot(slot: str, source: Source) -> str | None:
    """Returns the source's slot of this name ("1/0/mu"), else the only one with the same last part, else None."""
    if slot in source.slots:
        return slot
    same = [name for name in source.slots if name.rpartition("/")[2] == slot.rpartition("/")[2]]
    return same[0] if len(same) == 1 else None


def _load_others(source: Source, tree: Any) -> Any:
    """Loads leaves that belong to no parameter, such as counters."""
    leaves = [_load_other(source, name, leaf) for name, leaf in named_leaves(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _load_other(source: Source, name: str, leaf: jax.Array) -> jax.Array:
    """Returns the source's tensor of that name; `leaf` if there is none of the same shape."""
    # T5X's checkpoints have one count for all of optax's transformations.
    tensor = source.others.get(name, source.others.get(f"opt_state/{name.rpartition('/')[2]}"))
    return leaf if tensor is None or tensor.shape != leaf.shape else to_array(leaf, [(None, tensor)], None)


def _named_axes(axes: dict) -> dict[str, tuple[str, ...]]:
    return {"/".join(path): names for path, names in traverse_util.flatten_dict(axes).items()}


def _part_axes(names: dict[str, tuple[str, ...]], part: Part) -> tuple[str, ...]:
    """Returns the logical axes of a part, without `layers`."""
    return names[part.parameter] if part.layer is None else names[part.parameter][1:]
