"""Which of a checkpoint's tensors each part of a new model takes, and putting them where the model lives."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.layout import flat
from t5x_lab.checkpoints.names import SINGLE, Part, single_layers
from t5x_lab.checkpoints.sources import Source, owner_of
from t5x_lab.checkpoints.tensors import Index, Tensor
from t5x_lab.config.errors import UserError, one_of


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a part of the new model takes: one of the source's parameters, perhaps transposed; None stays fresh."""

    name: str | None
    transposed: bool = False


def assignments(new: Mapping[str, Part], source: Source, config: RestoreCheckpointConfig) -> dict[str, Taken]:
    """What each part takes, by the rules.

    Raises:
      UserError: for a rule that matches nothing, a part without a source, or a source's parameter that nobody takes where
        there are no rules.
    """
    if config.strict:
        _check_layers(new, config)
    used: set[int] = set()
    taken = {name: _taken(name, config, used) for name in new}
    for number, rule in enumerate(config.assignment_map):
        if config.strict and number not in used:
            raise UserError(
                f'RestoreCheckpointConfig.assignment_map: no parameter of the new model is left for the pattern "{rule[0]}". '
                f"Names look like {', '.join(list(new)[:2])}; remove the rule, or set RestoreCheckpointConfig.strict = False."
            )
    for name, take in taken.items():
        if take.name is not None and take.name not in source.params:
            if config.strict:
                raise UserError(_missing(name, take.name, source))
            taken[name] = Taken(None)
    left = source.params.keys() - {take.name for take in taken.values()}
    if left and not config.has_rules:
        raise UserError(
            f"{source.place.path} holds {min(left)}, which the new model has not. Use the configuration it was made with, or "
            "say with RestoreCheckpointConfig.assignment_map, layers or strict = False what is to be taken."
        )
    return taken


def _check_layers(new: Mapping[str, Part], config: RestoreCheckpointConfig) -> None:
    stacks: dict[str, int] = {}
    for match in filter(None, map(SINGLE.fullmatch, new)):
        stacks[match[1]] = max(stacks.get(match[1], 0), int(match[2]) + 1)
    for stack, sources in config.layers.items():
        if stack not in stacks:
            raise UserError(f'RestoreCheckpointConfig.layers names "{stack}"; the new model has {", ".join(stacks)}.')
        if len(sources) != stacks[stack]:
            raise UserError(
                f"RestoreCheckpointConfig.layers has {len(sources)} entries for {stack}, which has {stacks[stack]} layers: one "
                "entry for each new layer, None for a fresh one."
            )


def _taken(name: str, config: RestoreCheckpointConfig, used: set[int]) -> Taken:
    for number, (pattern, source, *more) in enumerate(config.assignment_map):
        match = re.fullmatch(pattern, name)
        if match:
            used.add(number)
            try:
                return Taken(None if source is None else match.expand(source), bool(more))
            except (re.error, IndexError) as error:
                raise UserError(
                    f'RestoreCheckpointConfig.assignment_map: "{source}" does not fit "{pattern}": {error}.'
                ) from error
    match = SINGLE.fullmatch(name)
    if not match or match[1] not in config.layers:
        return Taken(name)
    stack, layer, rest = match[1], int(match[2]), match[3]
    sources = config.layers[stack]
    if layer >= len(sources):
        return Taken(None)
    return Taken(None if sources[layer] is None else f"{stack}/layers_{sources[layer]}/{rest}")


def _missing(name: str, wanted: str, source: Source) -> str:
    similar = difflib.get_close_matches(wanted, source.params, n=1)
    which = name if name == wanted else f"{wanted}, for {name}"
    return (
        f"{source.place.path} does not hold {which}{f' (but {similar[0]})' if similar else ''}. Give a rule for it with "
        "RestoreCheckpointConfig.assignment_map, or set RestoreCheckpointConfig.strict = False for what is missing to stay "
        "fresh."
    )


def restore_params(
    source: Source,
    abstract_params: dict,
    axes: dict,
    config: RestoreCheckpointConfig,
    fresh: Callable[[], dict],
) -> dict:
    """Parameters placed as `abstract_params`' shardings say; each process takes only what its devices hold.

    Args:
      source: what is taken from.
      abstract_params: shapes, dtypes and shardings.
      axes: logical axis names in the same tree.
      config: the rules.
      fresh: makes fresh parameters; called when any part stays fresh.
    """
    wanted, names = flat(abstract_params), _flat_axes(axes)
    known = {axis for of_one in names.values() for axis in of_one}
    for axis in config.extend:
        one_of("An entry of RestoreCheckpointConfig.extend", axis, sorted(known))
    parts = single_layers({name: leaf.shape for name, leaf in wanted.items()})
    taken = assignments(parts, source, config)
    pieces: dict[str, list[tuple[int | None, Tensor]]] = {name: [] for name in wanted}
    needs_fresh = False
    for name, part in parts.items():
        take = taken[name]
        if take.name is None:
            needs_fresh = True
            continue
        tensor = source.params[take.name]
        part_axes = names[part.parameter][1 if part.layer is not None else 0 :]
        fitted = _fitted(tensor.transposed() if take.transposed else tensor, part.shape, part_axes, name, source, config)
        needs_fresh |= fitted.shape != part.shape
        pieces[part.parameter].append((part.layer, fitted))
    base = flat(fresh()) if needs_fresh else {}
    placed = {name: _place(leaf, pieces[name], base.get(name)) for name, leaf in wanted.items()}
    return traverse_util.unflatten_dict(placed, sep="/")


def restore_optimizer(
    source: Source, fresh_state: Any, abstract_params: dict, axes: dict, config: RestoreCheckpointConfig
) -> Any:
    """An optimizer's state whose slots follow their parameters; slots of fresh or transposed parameters stay as they are.

    Args:
      source: what is taken from.
      fresh_state: the optimizer's first state.
      abstract_params, axes, config: see `restore_params`.

    Raises:
      UserError: when the source has no such slots.
    """
    params, names = flat(abstract_params), _flat_axes(axes)
    parts = single_layers({name: leaf.shape for name, leaf in params.items()})
    taken = assignments(parts, source, config)
    of_parameter: dict[str, list[tuple[str, Part]]] = {}
    for name, part in parts.items():
        of_parameter.setdefault(part.parameter, []).append((name, part))
    if not source.slots:
        raise UserError(f"{source.place.path} holds no optimizer; leave it out of RestoreCheckpointConfig.carry.")

    def one(name: str, leaf: jax.Array) -> jax.Array:
        owner = owner_of(name, params)
        if owner is None:
            tensor = source.others.get(f"opt_state/{name}")
            return leaf if tensor is None or tensor.shape != leaf.shape else _place(leaf, [(None, tensor)], None)
        if leaf.ndim != len(params[owner].shape):
            return leaf  # a slot that stands for none
        slot = name.removesuffix(f"/{owner}")
        if slot not in source.slots:
            raise UserError(
                f"{source.place.path} has no optimizer slot {slot} (it has {', '.join(source.slots)}): another optimizer. "
                "Take the same OPTIMIZER, or leave the optimizer out of RestoreCheckpointConfig.carry."
            )
        pieces = []
        for part_name, part in of_parameter[owner]:
            take = taken[part_name]
            tensor = None if take.name is None or take.transposed else source.slots[slot].get(take.name)
            if tensor is not None:
                shape = leaf.shape[1:] if part.layer is not None else leaf.shape
                part_axes = names[owner][1 if part.layer is not None else 0 :]
                pieces.append((part.layer, _fitted(tensor, shape, part_axes, f"{slot} of {part_name}", source, config)))
        return _place(leaf, pieces, leaf)

    leaves = [one(name, leaf) for name, leaf in flat(fresh_state).items()]
    return jax.tree.unflatten(jax.tree.structure(fresh_state), leaves)


def restore_others(source: Source, state: Any) -> Any:
    """Leaves that belong to no parameter, such as counters; what the source has not, or not in this shape, stays."""

    def one(name: str, leaf: jax.Array) -> jax.Array:
        tensor = source.others.get(name)
        return leaf if tensor is None or tensor.shape != leaf.shape else _place(leaf, [(None, tensor)], None)

    return jax.tree.unflatten(jax.tree.structure(state), [one(name, leaf) for name, leaf in flat(state).items()])


def _flat_axes(axes: dict) -> dict[str, tuple[str, ...]]:
    return {"/".join(path): names for path, names in traverse_util.flatten_dict(axes).items()}


def _fitted(
    tensor: Tensor, shape: tuple[int, ...], axes: tuple[str, ...], name: str, source: Source, config: RestoreCheckpointConfig
) -> Tensor:
    """The tensor in the shape that is needed, or in one that differs from it along axes that may be extended."""
    if tensor.shape == shape:
        return tensor
    squeezed = lambda s: tuple(size for size in s if size != 1)
    same_numbers = math.prod(tensor.shape) == math.prod(shape)
    if same_numbers and (len(tensor.shape) != len(shape) or squeezed(tensor.shape) == squeezed(shape)):
        return tensor.reshaped(shape)  # heads joined with their sizes, or means without the dimensions they were taken over
    different = [axis for axis, a, b in zip(axes, tensor.shape, shape, strict=False) if a != b]
    if len(tensor.shape) == len(shape) and all(axis in config.extend for axis in different):
        return tensor
    hint = f' If it is to be extended, add "{different[0]}" to RestoreCheckpointConfig.extend.' if different else ""
    raise UserError(
        f"{source.place.path} holds {name} with shape {tensor.shape}, and the new model needs {shape}.{hint} Otherwise use the "
        "configuration it was made with."
    )


def _place(leaf: Any, pieces: list[tuple[int | None, Tensor]], fresh: jax.Array | None) -> jax.Array:
    """An array like `leaf`, of pieces laid over fresh numbers; (layer, tensor) goes to that layer."""
    local = {} if fresh is None else {_key(shard.index, leaf.shape): shard.data for shard in fresh.addressable_shards}
    made: dict[tuple, np.ndarray] = {}  # devices that hold copies ask for the same part

    def part(index: Index | None) -> np.ndarray:
        key = _key(index or (), leaf.shape)
        if key not in made:
            base = np.array(local[key]) if key in local else np.zeros([stop - start for start, stop in key], leaf.dtype)
            for layer, tensor in pieces:
                _lay(base, key, layer, tensor)
            made[key] = base
        return made[key]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _key(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    full = [*index, *(slice(None) for _ in range(len(shape) - len(index)))]
    return tuple(s.indices(size)[:2] for s, size in zip(full, shape, strict=True))


def _lay(base: np.ndarray, key: tuple[tuple[int, int], ...], layer: int | None, tensor: Tensor) -> None:
    """Writes the part of a tensor that falls into a region of the whole, in place."""
    if layer is not None:
        (start, stop), *key_rest = key
        if not start <= layer < stop:
            return
        base, key = base[layer - start], tuple(key_rest)
    ends = [min(stop, size) for (_, stop), size in zip(key, tensor.shape, strict=True)]
    if all(end > start for (start, _), end in zip(key, ends, strict=True)):
        wanted = tuple(slice(start, end) for (start, _), end in zip(key, ends, strict=True))
        base[tuple(slice(0, end - start) for (start, _), end in zip(key, ends, strict=True))] = tensor.read(wanted)
