"""Translates a binding by the rule of T5X's name, or keeps it if it is the project's own. Otherwise a person has to decide."""

import functools
from collections.abc import Mapping, Sequence

from t5x_lab.config.t5x_names import hint
from t5x_lab.migration.project import T5X_MODULES, Context
from t5x_lab.migration.rules import data, evaluation, model, names, optimizer, run
from t5x_lab.migration.rules.optimizer import IN_GROUPS, has_groups
from t5x_lab.migration.statements import Binding
from t5x_lab.migration.steps import COMMAND, DROPPED, KEPT, RENAMED, TO_DO, Step, keep

_BY_TOPIC = {**run.RULES, **data.RULES, **model.RULES, **optimizer.RULES, **evaluation.RULES}
# A rule for a whole class comes before the names of its parameters.
_BY_NAME = {key: rule for key, rule in names.RULES.items() if ("", f"{key[1].partition('.')[0]}.*") not in _BY_TOPIC}
RULES = {**_BY_NAME, **_BY_TOPIC}


def translate(binding: Binding, context: Context) -> Step:
    """Returns what a binding becomes."""
    if binding.name in _REPLACED_BY_RUNS and not context.is_own(binding.selector) and context.is_before_run(binding):
        return Step(DROPPED, note="T5X's run file, which is included after it, binds it again")
    step = _translate(binding, context)
    is_macro = not binding.parameter and not binding.scope and binding.selector not in context.kept_macros
    is_translated = step.status == RENAMED and bool(step.lines)
    parameter = _parameter_in_place(binding, step, context) if is_macro and is_translated else None
    return Step(DROPPED, note=f"{parameter} is bound, which T5X reads") if parameter else step


def _parameter_in_place(macro: Binding, step: Step, context: Context) -> str | None:
    """Returns a parameter, bound before a macro, that sets the same. T5X's files read the macro where it is not bound."""
    setters = _setters(context).get(_name(step.lines[0]), ())
    before = [each for each in setters if context.is_before(each, macro) and not context.is_before_run(each)]
    other = next((each for each in before if not context.is_from(each.value, macro.selector)), None)
    return None if other is None else f"{other.scope}/{other.name}".lstrip("/")


@functools.lru_cache(maxsize=4)  # statements come file by file
def _setters(context: Context) -> Mapping[str, Sequence[Binding]]:
    """Returns the bindings of parameters by the names here that they set."""
    setters: dict[str, list[Binding]] = {}
    for binding in context.bindings.values():
        step = _translate(binding, context) if binding.parameter else None
        for line in step.lines if step and step.status in (KEPT, RENAMED) else ():
            setters.setdefault(_name(line), []).append(binding)
    return setters


def _name(line: str) -> str:
    return line.partition(" = ")[0]


def _translate(binding: Binding, context: Context) -> Step:
    if binding.parameter and context.is_own(binding.selector):
        return keep(binding, context)
    if not binding.parameter and binding.selector in _OF_FLAXFORMER and context.has_examples_alone:
        return keep(binding, context)
    if binding.name.startswith("DatasetConfig."):
        return _translate_data(binding, context)
    if binding.name in IN_GROUPS and not context.is_own(binding.selector) and has_groups(context):
        return Step(DROPPED, note="Groups.groups has it")
    if binding.scope and binding.parameter and context.rules.get(("", binding.name)):
        return Step(TO_DO, note="Its scope is not translated")
    rule = context.rules.get((binding.scope, binding.name))
    if rule is None and binding.parameter:
        rule = context.rules.get(("", f"{binding.selector.rpartition('.')[2]}.*"))
    if rule is not None:
        return rule(binding, context)
    if binding.parameter and _is_of_t5x(binding, context):
        of_t5x = hint(f"{binding.selector}.{binding.parameter}").strip() or "It has no counterpart"
        return Step(TO_DO, note=of_t5x.rstrip("."))
    return keep(binding, context)


def _translate_data(binding: Binding, context: Context) -> Step:
    """Returns what a parameter of `DatasetConfig` becomes, whose scope says which data it is for. Two may share a scope."""
    roles = [role for role, scope in context.data_scopes.items() if scope == binding.scope]
    if not binding.scope:
        if not context.is_evaluation and context.has_t5x_run and binding.parameter in _BOUND_BY_RUNS:
            return Step(DROPPED, note="T5X's files bind it for training and for evaluations")
        scoped = [(scope, binding.name) in context.bindings for scope in context.data_scopes.values()]
        if not context.is_evaluation and scoped[0]:
            if all(scoped):
                return Step(DROPPED, note="It is bound for training and for evaluations")
            return Step(TO_DO, note="It is for evaluations only, since it is bound for training: bind it in EVALS")
        roles = [COMMAND if context.is_evaluation else "train"]
    rules = [
        context.rules.get((role, binding.name)) or (role == "train" and context.rules.get(("", binding.name))) for role in roles
    ]
    if not rules or not all(rules):
        return Step(TO_DO, note="Bind it for an evaluation in EVALS, such as mine/MetricsEvaluation.split")
    steps = [rule(binding, context) for rule in rules if rule]
    different = next((step for step in steps if step.status == TO_DO), None) or steps[0]
    if len(steps) == 1 or different.status == TO_DO:
        return different
    lines = tuple(line for step in steps for line in step.lines)
    return Step(RENAMED, lines) if lines else different


# Parameters that T5X's run files bind: of `DatasetConfig` with scopes, and others.
_BOUND_BY_RUNS = (
    "mixture_or_task_name", "task_feature_lengths", "split", "batch_size", "shuffle", "seed", "use_cached", "pack", "module",
)  # fmt: skip
_REPLACED_BY_RUNS = frozenset((
    *(f"DatasetConfig.{name}" for name in _BOUND_BY_RUNS),
    *(f"train.{name}" for name in ("model", "model_dir", "total_steps", "eval_steps", "eval_period", "random_seed")),
    *(f"create_learning_rate_scheduler.{name}" for name in ("factors", "base_learning_rate", "warmup_steps")),
    *(f"SaveCheckpointConfig.{name}" for name in ("period", "keep", "dtype")),
    "train.infer_eval_dataset_cfg", "RestoreCheckpointConfig.path", "Trainer.num_microbatches", "Trainer.learning_rate_fn",
    "PjitPartitioner.num_partitions", "PjitPartitioner.model_parallel_submesh",
))  # fmt: skip


# Macros of flaxformer's model files. T5X's own networks do not read them.
_OF_FLAXFORMER = (
    "ARCHITECTURE", "NUM_HEADS", "NUM_ENCODER_LAYERS", "NUM_DECODER_LAYERS", "HEAD_DIM", "EMBED_DIM", "MLP_DIM",
    "NUM_EMBEDDINGS", "ACTIVATION_DTYPE",
)  # fmt: skip


def _is_of_t5x(binding: Binding, context: Context) -> bool:
    module = context.module_of(binding.selector).split(".")[0]
    return module in T5X_MODULES or bool(hint(f"{binding.selector}.{binding.parameter}"))
