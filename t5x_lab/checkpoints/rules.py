"""Applies the rules of `RestoreCheckpointConfig`: assigns tensors of a checkpoint to the parts of a new model."""

import dataclasses
import difflib
import itertools
import operator
import re
from collections.abc import Collection, Mapping

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats.source import Source
from t5x_lab.checkpoints.layers import UNSTACKED, Part
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The source parameter of a part of the new model, optionally transposed. None = fresh."""

    source: str | None
    transposed: bool = False


def assign_sources(
    new: Mapping[str, Part], source: Source, config: RestoreCheckpointConfig, fresh_names: Collection[str] = ()
) -> dict[str, Assignment]:
    """Returns the assignment of each part by unstacked name. Parameters in `fresh_names` may be missing in the source.

    Raises:
      UserError: for a rule that matches nothing, a part without a source, or, if there are no rules, an unused source
        parameter.
    """
    if config.strict:
        _check_layers(new, config)
    used: set[int] = set()
    assignments = {name: _assignment(name, config, used) for name in new}
    for number, rule in enumerate(config.assignment_map):
        if config.strict and number not in used:
            raise UserError(
                f'RestoreCheckpointConfig.assignment_map: the pattern "{rule[0]}" is not the first match of any parameter. '
                f"Examples of names: {', '.join(list(new)[:2])}. Remove the rule, or set RestoreCheckpointConfig.strict = "
                "False."
            )
    for name, assignment in assignments.items():
        if assignment.source is not None and assignment.source not in source.params:
            if assignment.source in source.aliases:
                alias = source.aliases[assignment.source]
                assignments[name] = dataclasses.replace(assignment, source=alias)
                continue
            if config.strict and new[name].parameter not in fresh_names:
                raise UserError(_missing(name, assignment.source, source))
            assignments[name] = Assignment(None)
    unused = source.params.keys() - {assignment.source for assignment in assignments.values()}
    if unused and not config.has_rules:
        raise UserError(
            f"{source.path} has {min(unused)}, which the new model does not have. Use the configuration it was trained with, "
            "or set RestoreCheckpointConfig.assignment_map, layers, or strict = False."
        )
    return assignments


def _check_layers(new: Mapping[str, Part], config: RestoreCheckpointConfig) -> None:
    stacks: dict[str, int] = {}
    for match in filter(None, map(UNSTACKED.fullmatch, new)):
        stacks[match[1]] = max(stacks.get(match[1], 0), int(match[2]) + 1)
    for stack, sources in config.layers.items():
        if stack not in stacks:
            raise UserError(
                f'RestoreCheckpointConfig.layers has the stack "{stack}", but the new model has {", ".join(stacks)}.'
            )
        if isinstance(sources, int):
            if sources > stacks[stack]:
                raise UserError(
                    f"RestoreCheckpointConfig.layers loads {sources} layers of {stack}, which has only {stacks[stack]}."
                )
        elif len(sources) != stacks[stack]:
            raise UserError(
                f"RestoreCheckpointConfig.layers has {len(sources)} entries for {stack}, which has {stacks[stack]} layers. "
                "Use one entry per new layer, None for a fresh one."
            )


def _assignment(name: str, config: RestoreCheckpointConfig, used: set[int]) -> Assignment:
    """Returns the assignment by the first matching rule, `layers`, or the same name. Adds the rule's number to `used`."""
    for number, (pattern, source, *more) in enumerate(config.assignment_map):
        match = re.fullmatch(pattern, name)
        if match:
            used.add(number)
            try:
                return Assignment(None if source is None else match.expand(source), bool(more))
            except (re.error, IndexError) as error:
                raise UserError(
                    f'RestoreCheckpointConfig.assignment_map: "{source}" does not fit "{pattern}": {error}.'
                ) from error
    match = UNSTACKED.fullmatch(name)
    if not match or match[1] not in config.layers:
        return Assignment(name)
    stack, layer, rest = match[1], int(match[2]), match[3]
    sources = config.layers[stack]
    if isinstance(sources, int):
        sources = range(sources)
    if layer >= len(sources) or sources[layer] is None:
        return Assignment(None)
    return Assignment(f"{stack}/layers_{sources[layer]}/{rest}")


def _missing(name: str, wanted: str, source: Source) -> str:
    path, original = source.origin(wanted)
    similar = difflib.get_close_matches(wanted, source.params, n=1)
    parameter = name if name == original else f"{original}, for {name}"
    return (
        f"{path} does not have {parameter}{f' (but {similar[0]})' if similar else ''}. Add a rule to "
        "RestoreCheckpointConfig.assignment_map, or set RestoreCheckpointConfig.strict = False to initialize missing "
        "parameters freshly."
    )


def fit_shape(
    tensor: LazyTensor,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    name: str,
    source_name: str,
    source: Source,
    config: RestoreCheckpointConfig,
) -> LazyTensor:
    """Returns the tensor reshaped to the needed shape, or unchanged if only axes that may be extended differ.

    Args:
      tensor: tensor of the source.
      shape, axes: shape and logical axes of the new part.
      name, source_name: names of the part and of the source's parameter, for messages.
      source, config: see `assign_sources`.

    Raises:
      UserError: if the shape does not fit.
    """
    if tensor.shape == shape:
        return tensor
    if _joins_axes(tensor.shape, shape):
        return tensor.reshape(shape)  # heads joined with head sizes
    if len(tensor.shape) == len(shape) - shape.count(1):  # means without reduced axes
        sizes = iter(tensor.shape)
        tensor = tensor.reshape(tuple(1 if size == 1 else next(sizes) for size in shape))
        if tensor.shape == shape:
            return tensor
    different = [axis for axis, a, b in zip(axes, tensor.shape, shape, strict=False) if a != b]
    if len(tensor.shape) == len(shape) and all(axis in config.extend for axis in different):
        return tensor
    hint = f' To extend it, add "{different[0]}" to RestoreCheckpointConfig.extend.' if different else ""
    if "classes" in different:
        hint = ' To initialize the head freshly: RestoreCheckpointConfig.assignment_map = [("classifier/.*", None)].'
    path, original = source.origin(source_name)
    needed = f"the new model needs {shape}" if original == name else f"{name} of the new model needs {shape}"
    raise UserError(
        f"{path} has {original} with shape {tensor.shape}, but {needed}.{hint} Otherwise use the configuration it was trained "
        "with."
    )


def _joins_axes(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Returns whether one shape results from the other by joining neighbouring axes. A transposed matrix does not."""
    short, long = sorted(([*itertools.accumulate(shape, operator.mul)] for shape in (first, second)), key=len)
    return len(short) < len(long) and short[-1:] == long[-1:] and set(short) <= set(long)
