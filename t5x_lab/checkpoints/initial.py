"""Starting from something else: parameters, and what else is asked for, of a checkpoint of any format.

This is the one place that loads parameters, for `INITIAL_CHECKPOINT_PATH`, `t5x_lab.load`, `eval` and the others.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import Location, Source, open_source
from t5x_lab.checkpoints.formats.source import owner_of
from t5x_lab.checkpoints.layers import Part, unstacked_parts
from t5x_lab.checkpoints.layout import FORMAT, check_same_parameters, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.checkpoints.rules import assignments, fit_shape
from t5x_lab.checkpoints.sharded_arrays import read_each, read_together, to_array
from t5x_lab.checkpoints.verification import check_arrays, explaining_damage
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.models.model import Params
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
    """A checkpoint's parameters, by the rules, as `abstract_params`' shardings say.

    Args:
      location: see `formats.find`.
      abstract_params: shapes, dtypes and shardings.
      axes: logical axis names in the same tree.
      config: the rules.
      fresh: makes fresh parameters; called only when something stays fresh.
      fresh_names: names of parameters that stay fresh where the checkpoint lacks them, beside any rules.

    Raises:
      UserError: when the checkpoint is damaged, or does not fit the model by the rules.
    """
    with explaining_damage(location.path):
        if location.format == "t5x_lab" and not config.has_rules:
            check_same_parameters(location.path, abstract_params, fresh_names)
            info = read_info(location.path)
            if info["format"] == FORMAT and info["parameters"].keys() >= set(fresh_names):
                return _restore_params(location, abstract_params)
        source = open_source(location)
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
    """The first state of a run, with what else `config.carry` takes: the optimizer, the step and its counters.

    Args:
      location: see `formats.find`.
      state: the first state, with parameters that `load_params` took from there. Its optimizer's state is given up.
      abstract_params, axes, config, fresh_names: see `load_params`.
    """
    if not config.carry:
        return state
    with explaining_damage(location.path):
        source = open_source(location)
        if "optimizer" in config.carry:
            opt_state = _load_slots(source, state.opt_state, abstract_params, axes, config, fresh_names)
            state = dataclasses.replace(state, opt_state=opt_state)
        if "step" in config.carry:
            counted = {"step": state.step, "counters": state.counters}
            state = dataclasses.replace(state, **_load_others(source, counted))
            if "optimizer" not in config.carry:
                state = dataclasses.replace(state, opt_state=start_count_at(state.opt_state, state.step))
        source.check()
    return state


def _restore_params(location: Location, abstract_params: Params) -> Params:
    """All parameters of a checkpoint of ours, by Orbax."""

    def restore(wanted: Params) -> Params:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(location.path / location.part, wanted)
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
    wanted, names = named_leaves(abstract_params), _named_axes(axes)
    known = {axis for axes_of_one in names.values() for axis in axes_of_one if axis is not None}
    for axis in config.extend:
        check_choice("An entry of RestoreCheckpointConfig.extend", axis, sorted(known))
    parts = unstacked_parts(wanted)
    assigned = assignments(parts, source, config, fresh_names)
    pieces: dict[str, list[tuple[int | None, LazyTensor]]] = {name: [] for name in wanted}
    needs_fresh = False
    for name, part in parts.items():
        assignment = assigned[name]
        if assignment.source is None:
            needs_fresh = True
            continue
        tensor = source.params[assignment.source]
        tensor = tensor.transpose() if assignment.transposed else tensor
        fitted = fit_shape(tensor, part.shape, _part_axes(names, part), name, source, config)
        needs_fresh |= fitted.shape != part.shape
        pieces[part.parameter].append((part.layer, fitted))
    if needs_fresh:
        arrays = read_each(named_leaves(fresh()), lambda name, leaf: to_array(leaf, pieces[name], leaf))
    else:
        arrays = read_each(wanted, lambda name, leaf: to_array(leaf, pieces[name], None))
    return traverse_util.unflatten_dict(arrays, sep="/")


def _load_slots(
    source: Source,
    fresh_state: Any,
    abstract_params: Params,
    axes: dict,
    config: RestoreCheckpointConfig,
    fresh_names: Collection[str],
) -> Any:
    """An optimizer's state whose slots follow their parameters; slots of fresh or transposed parameters stay fresh.

    Raises:
      UserError: when the source has no such slots.
    """
    params, names = named_leaves(abstract_params), _named_axes(axes)
    parts = unstacked_parts(params)
    assigned = assignments(parts, source, config, fresh_names)
    parts_of_parameter: dict[str, list[tuple[str, Part]]] = {}
    for name, part in parts.items():
        parts_of_parameter.setdefault(part.parameter, []).append((name, part))
    if not source.slots:
        raise UserError(f"{source.path} holds no optimizer; leave it out of RestoreCheckpointConfig.carry.")

    def load(name: str, leaf: jax.Array) -> jax.Array:
        owner = owner_of(name, params)
        if owner is None:
            return _load_other(source, f"opt_state/{name}", leaf)
        if leaf.ndim != len(params[owner].shape):
            return leaf  # unused: another slot stands for the parameter
        slot = name.removesuffix(f"/{owner}")
        if slot not in source.slots:
            raise UserError(
                f"{source.path} has no optimizer slot {slot} (it has {', '.join(source.slots)}): another optimizer. "
                "Take the same OPTIMIZER, or leave the optimizer out of RestoreCheckpointConfig.carry."
            )
        pieces = []
        for part_name, part in parts_of_parameter[owner]:
            assignment = assigned[part_name]
            if assignment.source is None or assignment.transposed or assignment.source not in source.slots[slot]:
                continue
            tensor = source.slots[slot][assignment.source]
            shape = leaf.shape if part.layer is None else leaf.shape[1:]
            fitted = fit_shape(tensor, shape, _part_axes(names, part), f"{slot} of {part_name}", source, config)
            pieces.append((part.layer, fitted))
        return to_array(leaf, pieces, leaf)

    leaves = read_each(named_leaves(fresh_state), load)
    return jax.tree.unflatten(jax.tree.structure(fresh_state), list(leaves.values()))


def _load_others(source: Source, tree: Any) -> Any:
    """Leaves that belong to no parameter, such as counters."""
    leaves = [_load_other(source, name, leaf) for name, leaf in named_leaves(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _load_other(source: Source, name: str, leaf: jax.Array) -> jax.Array:
    """The source's tensor of that name; the leaf where the source has none, or one of another shape."""
    tensor = source.others.get(name)
    return leaf if tensor is None or tensor.shape != leaf.shape else to_array(leaf, [(None, tensor)], None)


def _named_axes(axes: dict) -> dict[str, tuple[str, ...]]:
    return {"/".join(path): names for path, names in traverse_util.flatten_dict(axes).items()}


def _part_axes(names: dict[str, tuple[str, ...]], part: Part) -> tuple[str, ...]:
    """Logical axis names of a part, without `layers`."""
    return names[part.parameter] if part.layer is None else names[part.parameter][1:]
