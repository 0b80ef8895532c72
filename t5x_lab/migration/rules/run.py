"""The run, its checkpoints and its mesh."""

import dataclasses
import math
import re
from typing import Any

from t5x_lab.migration.includes import CARRY, CARRY_STEP, KEEP_ALL
from t5x_lab.migration.project import Context
from t5x_lab.migration.statements import Binding, render
from t5x_lab.migration.steps import (
    DROPPED,
    LIBRARY,
    RENAMED,
    TO_DO,
    Rule,
    Step,
    configurable,
    gone,
    if_is,
    is_list,
    keep,
    table,
    to,
    unneeded,
)
from t5x_lab.partitioning.rules import PARAMETER_RULES


def _restore_mode(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if value in ("specific", "latest"):
        return Step(DROPPED, note="A run directory gives its latest checkpoint, a path with a step that step")
    return Step(TO_DO, note="Call t5x_lab eval --step=all for all checkpoints of a run")


def _restored_path(binding: Binding, context: Context) -> Step:
    """The checkpoint to start from, whose optimizer and step T5X restores too."""
    carry = CARRY_STEP if _skips_optimizer(context) else CARRY
    if context.is_from(binding.value, "INITIAL_CHECKPOINT_PATH"):
        return Step(RENAMED, (carry,))
    value = context.resolve(binding.value)
    if is_list(value) and value:
        if len(value) > 1:
            return Step(TO_DO, note="Average or choose one of the checkpoints: INITIAL_CHECKPOINT_PATH is one path")
        return _restored_path(dataclasses.replace(binding, value=value[0]), context)
    if value in (None, "", [], ()):
        if context.differs(binding):
            return Step(RENAMED, ("INITIAL_CHECKPOINT_PATH = None",))
        return unneeded()
    return Step(RENAMED, (*to("INITIAL_CHECKPOINT_PATH")(binding, context).lines, carry))


def _initial_checkpoint(binding: Binding, context: Context) -> Step:
    """The macro, which T5X's pretrain.gin does not read."""
    is_read = context.includes_run("finetune") or not context.has_t5x_run
    if is_read or any(context.is_from(each.value, binding.selector) for each in context.bindings.values()):
        return keep(binding, context)
    return Step(DROPPED, note="T5X's pretrain.gin does not read it: a run starts from scratch")


def _off_as(line: str) -> Rule:
    """A part of T5X's that the library has itself, with the line that stands for None."""

    def rule(binding: Binding, context: Context) -> Step:
        return Step(RENAMED, (line,)) if binding.value is None else gone(LIBRARY)(binding, context)

    return rule


def _period(binding: Binding, context: Context) -> Step:
    step = to("CHECKPOINT_PERIOD")(binding, context)
    if "SaveCheckpointConfig.keep" in context.names or context.has_t5x_run:
        return step
    return Step(RENAMED, (*step.lines, KEEP_ALL))


def _fallback(binding: Binding, context: Context) -> Step:
    if context.resolve(binding.value) is True:
        return Step(RENAMED, ("RestoreCheckpointConfig.strict = False",), "Parameters that the checkpoint lacks are fresh")
    if context.differs(binding):
        return Step(RENAMED, ("RestoreCheckpointConfig.strict = True",))
    return unneeded()


def _assignment_map(binding: Binding, context: Context) -> Step:
    rules = context.resolve(binding.value)
    if rules in (None, (), []):
        return Step(RENAMED, ("RestoreCheckpointConfig.assignment_map = ()",)) if context.differs(binding) else unneeded()
    if not is_list(rules):
        return Step(TO_DO, note="Write the rules as pairs of a pattern and a name, or None (docs/from_t5x.md)")
    parameter_rules = tuple(rule for rule in rules if not _skips_slots(rule))
    lines = (f"RestoreCheckpointConfig.assignment_map = {render(parameter_rules)}",) if parameter_rules else ()
    if not all(_is_fresh(rule) and _ADDED_NAME.fullmatch(rule[0]) for rule in parameter_rules):
        return Step(TO_DO, lines, "Names of parameters differ (docs/from_t5x.md): t5x_lab inspect lists them")
    return Step(RENAMED, (*lines, CARRY_STEP) if _skips_optimizer(context) else lines)


# A pattern of a word in the names of parameters that T5's network does not have, whose names are the project's own.
_ADDED_NAME = re.compile(r"\^?\(?\.\*\)?(?!\w*(attention|layer|norm|mlp|encoder|decoder|logits|embed|relpos))\w+\(?\.\*\)?\$?")
_ALL_SLOTS = re.compile(r"\^?\(?(\.\*)?state\\?/param_states(\\?/)?\(?\.\*\)?\$?")


def _is_fresh(rule: Any) -> bool:
    """Returns whether a rule leaves what its pattern matches fresh."""
    return isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str) and rule[1] is None


def _skips_slots(rule: Any) -> bool:
    """Returns whether a rule leaves all slots of the optimizer fresh."""
    return _is_fresh(rule) and _ALL_SLOTS.fullmatch(rule[0]) is not None


def _skips_optimizer(context: Context) -> bool:
    rules = context.value("RestoreCheckpointConfig.assignment_map")
    return is_list(rules) and any(map(_skips_slots, rules))


def _microbatches(binding: Binding, context: Context) -> Step:
    """T5X's None and 0 are one batch."""
    if context.resolve(binding.value) in (None, 0):
        if context.differs(binding):
            return Step(RENAMED, ("MICROBATCHES = 1",))
        return unneeded()
    return to("MICROBATCHES")(binding, context)


def _partitions(binding: Binding, context: Context) -> Step:
    """The number of partitions of the model. Two dimensions of parameters are sharded with fsdp."""
    value = context.resolve(binding.value)
    if isinstance(value, tuple | list) and all(isinstance(each, int) for each in value):
        value = math.prod(value)
    axis = "fsdp" if _shards_embed(context) else "data"
    if value in (None, 1):
        if axis == "fsdp" or context.differs(binding):
            return Step(RENAMED, (f'MESH = "{axis}=-1"',))
        return unneeded()
    if isinstance(value, int | str):  # a string is a variable of a launch script
        return Step(RENAMED, (f'MESH = "{axis}=-1,tensor={value}"',))
    return Step(TO_DO, note='Set MESH = "data=-1,tensor=N" for N partitions')


def _parameter_dimensions(binding: Binding, context: Context) -> Step:
    """Sharding in two dimensions is part of MESH. Where nothing binds the number of partitions, it is the whole of it."""
    if context.resolve(binding.value) in (None, 1) and not context.differs(binding):
        return unneeded()
    if context.resolve(binding.value) in (None, 1):
        return Step(RENAMED, ('MESH = "data=-1"',))
    if any(name.endswith((".num_partitions", ".model_parallel_submesh")) for name in context.names):
        return Step(DROPPED, note="MESH has fsdp")
    return Step(RENAMED, ('MESH = "fsdp=-1"',))


def _shards_embed(context: Context) -> bool:
    """Returns whether parameters are sharded over the devices that share the data too."""
    listed = (context.value(f"{owner}.logical_axis_rules") for owner in _PARTITIONERS)
    is_listed = any(("embed", "data") in map(tuple, rules) for rules in listed if _is_list_of_pairs(rules))
    return is_listed or context.value("standard_logical_axis_rules.parameter_partitioning_dims") == 2


def _is_list_of_pairs(rules: Any) -> bool:
    return is_list(rules) and all(is_list(rule) and len(rule) == 2 for rule in rules)


def _axis_rules(binding: Binding, context: Context) -> Step:
    """A whole list of rules, or those that are added to T5X's own, as the differences from the rules here."""
    rules = context.resolve(binding.value)
    if rules in (None, [], ()) or (configurable(rules) == "standard_logical_axis_rules" and not context.is_own(rules.name)):
        return unneeded()
    if not _is_list_of_pairs(rules) or any(axis not in _MESH_AXES for _, axis in rules):
        return Step(TO_DO, note="Add them to ShardingRules.parameters and activations (docs/custom/sharding.md)")
    first = {name: _MESH_AXES[axis] for name, axis in reversed(rules)}  # T5X takes the first rule of a name
    if binding.parameter == "additional_rules":
        first = {name: axis for name, axis in first.items() if name not in _AXES_OF_T5X}
    of_parameters = {name: axis for name, axis in first.items() if name not in ("batch", "length", "embed")}
    changes = {name: axis for name, axis in of_parameters.items() if axis not in PARAMETER_RULES.get(name, (None,))}
    has_mesh = any(name.endswith((".num_partitions", ".model_parallel_submesh")) for name in context.names)
    mesh = ('MESH = "fsdp=-1"',) if first.get("embed") == "fsdp" and not has_mesh else ()
    lines = (*mesh, *((f"ShardingRules.parameters = {render(changes)}",) if changes else ()))
    return Step(RENAMED, lines) if lines else unneeded()


# Mesh axes by those of T5X, and the names of its own rules.
_MESH_AXES = {"data": "fsdp", "model": "tensor", None: None}
_AXES_OF_T5X = frozenset((
    "batch", "vocab", "embed", "mlp", "heads", "kv", "joined_kv", "relpos_buckets", "abspos_buckets", "length", "layers",
    "stack", "mlp_activations",
))  # fmt: skip
_PARTITIONERS = ("PjitPartitioner", "ModelBasedPjitPartitioner")


def _actions(binding: Binding, context: Context) -> Step:
    actions = context.resolve(binding.value) or {}
    groups = [group or () for group in actions.values()] if isinstance(actions, dict) else [None]
    names = {configurable(action) for group in groups for action in (group if is_list(group) else ("",))}
    if names <= {"TerminateOnNanAction"}:
        return Step(DROPPED, note="A run ends at a loss that is not finite, as BAD_STEPS says")
    return Step(TO_DO, note=_HOOKS)


_HOOKS = "Hooks have the place of actions: HOOKS, docs/custom/hook.md"
_FLOAT32 = "Checkpoints are float32"


def _seed(binding: Binding, context: Context) -> Step:
    """The seed of training. T5X's None is another one in each run."""
    if context.resolve(binding.value) is not None:
        return to("SEED")(binding, context)
    return Step(RENAMED, ("SEED = 0  # runs are reproducible",)) if context.differs(binding) else unneeded()


def _seed_of_data(binding: Binding, context: Context) -> Step:
    """The seed of the order of the data, which follows SEED."""
    of_run = [name for name in ("train.random_seed", "RANDOM_SEED") if context.value(name) is not None]
    if of_run:
        return Step(DROPPED, note=f"The order of the data follows {of_run[0]}")
    return unneeded() if context.resolve(binding.value) is None else to("SEED")(binding, context)


RULES = table(
    ("train.random_seed RANDOM_SEED", _seed),
    ("DatasetConfig.seed", _seed_of_data),
    ("train.checkpoint_cfg train.partitioner", gone(LIBRARY)),
    ("INITIAL_CHECKPOINT_PATH", _initial_checkpoint),
    ("CheckpointConfig.save", _off_as("CHECKPOINT_PERIOD = 1000000000  # the last step is always saved")),
    ("CheckpointConfig.restore", _off_as("RunConfig.initial_checkpoint_path = None")),
    ("train.trainer_cls train.get_dataset_fn", gone(LIBRARY)),
    ("train.actions", _actions),
    ("TerminateOnNanAction.task TerminateOnNanAction.metric", gone("A run ends at a loss that is not finite")),
    ("train.train_eval_get_dataset_fn get_training_eval_datasets.deterministic", gone(LIBRARY)),
    ("get_deterministic_dataset.*", gone("The order of the data is always reproducible")),
    ("Trainer.num_microbatches", _microbatches),
    ("Trainer.weight_metrics_computer", gone("It computes metrics: @Norms() in HOOKS has norms by layer")),
    # Checkpoints
    ("SaveCheckpointConfig.period", _period),
    ("SaveCheckpointConfig.dtype", if_is("float32", None, then=_FLOAT32, otherwise=_FLOAT32)),
    ("RestoreCheckpointConfig.path", _restored_path),
    ("RestoreCheckpointConfig.mode", _restore_mode),
    ("RestoreCheckpointConfig.fallback_to_scratch", _fallback),
    ("RestoreCheckpointConfig.strict", to("RestoreCheckpointConfig.strict", True)),
    ("RestoreCheckpointConfig.assignment_map", _assignment_map),
    # Partitioning
    ("PjitPartitioner.num_partitions NUM_MODEL_PARTITIONS", _partitions),
    ("PjitPartitioner.model_parallel_submesh MODEL_PARALLEL_SUBMESH", _partitions),
    ("ModelBasedPjitPartitioner.num_partitions ModelBasedPjitPartitioner.model_parallel_submesh", _partitions),
    (
        "PjitPartitioner.logical_axis_rules ModelBasedPjitPartitioner.logical_axis_rules LOGICAL_AXIS_RULES "
        "standard_logical_axis_rules.additional_rules",
        _axis_rules,
    ),
    ("standard_logical_axis_rules.parameter_partitioning_dims", _parameter_dimensions),
    (
        "standard_logical_axis_rules.activation_partitioning_dims ACTIVATION_PARTITIONING_DIMS",
        gone("With tensor in MESH the lengths of activations are sharded too"),
    ),
    (
        "precompile.model precompile.model_dir precompile.partitioner precompile.random_seed precompile.train_dataset_cfg "
        "PjitPartitioner.backend",
        gone("t5x_lab compile compiles the training step"),
    ),
)
