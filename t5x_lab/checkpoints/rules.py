"""Which of a checkpoint's tensors each part of a new model takes, by the rules of `RestoreCheckpointConfig`."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping

from t5x_lab.checkpoints.config import RestoreCheckpointConfig
from t5x_lab.checkpoints.formats import Source
from t5x_lab.checkpoints.layers import UNSTACKED, Part
from t5x_lab.checkpoints.lazy_tensors import LazyTensor
from t5x_lab.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a part of the new model takes: one of the source's parameters, perhaps transposed; None stays fresh."""

    source: str | None
    transposed: bool = False


def assignments(
    new: Mapping[str, Part], source: Source, config: RestoreCheckpointConfig, fresh_names: Collection[str] = ()
) -> dict[str, Assignment]:
    """What each part takes, by its unstacked name; parts of the parameters that are `fresh_names` stay fresh where there are none.

    Raises:
      UserError: for a rule that matches nothing, a part without a source, or a source's parameter that nobody takes where
        there are no rules.
    """
    if config.strict:
        _check_layers(new, config)
    used: set[int] = set()
    found = {name: _assignment(name, config, used) for name in new}
    for number, rule in enumerate(config.assignment_map):
        if config.strict and number not in used:
            raise UserError(
                f'RestoreCheckpointConfig.assignment_map: no parameter of the new model is left for the pattern "{rule[0]}". '
                f"Names look like {', '.join(list(new)[:2])}; remove the rule, or set RestoreCheckpointConfig.strict = False."
            )
    for name, assignment in found.items():
        if assignment.source is not None and assignment.source not in source.params:
            if config.strict and new[name].parameter not in fresh_names:
                raise UserError(_missing(name, assignment.source, source))
            found[name] = Assignment(None)
    left = source.params.keys() - {assignment.source for assignment in found.values()}
    if left and not config.has_rules:
        raise UserError(
            f"{source.path} holds {min(left)}, which the new model does not have. Use the configuration it was made with, or "
            "say with RestoreCheckpointConfig.assignment_map, layers or strict = False what is to be taken."
        )
    return found


def _check_layers(new: Mapping[str, Part], config: RestoreCheckpointConfig) -> None:
    stacks: dict[str, int] = {}
    for match in filter(None, map(UNSTACKED.fullmatch, new)):
        stacks[match[1]] = max(stacks.get(match[1], 0), int(match[2]) + 1)
    for stack, sources in config.layers.items():
        if stack not in stacks:
            raise UserError(f'RestoreCheckpointConfig.layers names "{stack}"; the new model has {", ".join(stacks)}.')
        if isinstance(sources, int):
            if sources > stacks[stack]:
                raise UserError(
                    f"RestoreCheckpointConfig.layers takes the first {sources} layers for {stack}, which has {stacks[stack]}."
                )
        elif len(sources) != stacks[stack]:
            raise UserError(
                f"RestoreCheckpointConfig.layers has {len(sources)} entries for {stack}, which has {stacks[stack]} layers: one "
                "entry for each new layer, None for a fresh one."
            )


def _assignment(name: str, config: RestoreCheckpointConfig, used: set[int]) -> Assignment:
    """The first rule that matches the name, then `layers`, then the same name; adds the rule's number to `used`."""
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
    similar = difflib.get_close_matches(wanted, source.params, n=1)
    which = name if name == wanted else f"{wanted}, for {name}"
    return (
        f"{source.path} does not hold {which}{f' (but {similar[0]})' if similar else ''}. Give a rule for it with "
        "RestoreCheckpointConfig.assignment_map, or set RestoreCheckpointConfig.strict = False for what is missing to stay "
        "fresh."
    )


def fit_shape(
    tensor: LazyTensor,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    name: str,
    source: Source,
    config: RestoreCheckpointConfig,
) -> LazyTensor:
    """The tensor in the shape that is needed, or in one that differs from it along axes that may be extended.

    Args:
      tensor: of the source.
      shape, axes: of what takes it; logical axis names.
      name: of what takes it, for messages.
      source, config: see `assignments`.

    Raises:
      UserError: when it has another shape.
    """
    if tensor.shape == shape:
        return tensor
    squeezed = lambda s: tuple(size for size in s if size != 1)
    same_size = tensor.size == math.prod(shape)
    if same_size and (len(tensor.shape) != len(shape) or squeezed(tensor.shape) == squeezed(shape)):
        return tensor.reshape(shape)  # heads joined with their sizes, or means without the dimensions they were taken over
    different = [axis for axis, a, b in zip(axes, tensor.shape, shape, strict=False) if a != b]
    if len(tensor.shape) == len(shape) and all(axis in config.extend for axis in different):
        return tensor
    hint = f' If it is to be extended, add "{different[0]}" to RestoreCheckpointConfig.extend.' if different else ""
    if "classes" in different:
        hint = ' To begin the head afresh: RestoreCheckpointConfig.assignment_map = [("classifier/.*", None)].'
    raise UserError(
        f"{source.path} holds {name} with shape {tensor.shape}, and the new model needs {shape}.{hint} Otherwise use the "
        "configuration it was made with."
    )
