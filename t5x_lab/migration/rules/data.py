"""The data of training and of evaluations, and vocabularies."""

import math

from t5x_lab.data.config import DataConfig
from t5x_lab.migration.project import Context
from t5x_lab.migration.statements import Binding, Reference, binding_text, render
from t5x_lab.migration.steps import (
    COMMAND,
    DROPPED,
    KEPT,
    LIBRARY,
    RENAMED,
    TO_DO,
    VOCABULARIES,
    Rule,
    Step,
    configurable,
    gone,
    keep,
    table,
    to,
    unneeded,
)


def _batch_size(binding: Binding, context: Context) -> Step:
    return _with_shards(to("BATCH_SIZE")(binding, context), binding, context)


def _with_shards(step: Step, binding: Binding, context: Context) -> Step:
    """Adds a number of shards of the data that divides the batch size, if the default does not."""
    size = context.resolve(binding.value)
    if step.status == DROPPED or not isinstance(size, int) or size % DataConfig.shards == 0:
        return step
    return Step(RENAMED, (*step.lines, f"DATA_SHARDS = {math.gcd(size, DataConfig.shards)}  # it must divide BATCH_SIZE"))


def _of_training(field: str, macro: str, *evaluations: tuple[str, str]) -> Rule:
    """A setting of the data of training: the macro that evaluations read too, unless the macro is bound and theirs.

    Args:
      field: field of DataConfig.
      macro: the macro of T5X's run files.
      evaluations: scopes of T5X's evaluations, and the settings here that differ from those of training.
    """

    def rule(binding: Binding, context: Context) -> Step:
        if ("", macro) not in context.bindings or context.is_from(binding.value, macro):
            step = to(macro)(binding, context)
        else:
            others = [name for role, name in evaluations if (context.data_scopes[role], binding.name) not in context.bindings]
            lines = (f"DataConfig.{field} = {render(binding.value)}", *(f"{name} = %{macro}" for name in others))
            step = Step(RENAMED, lines)
        return _with_shards(step, binding, context) if field == "batch_size" else step

    return rule


def _data_of_training(binding: Binding, context: Context) -> Step:
    """`train.train_dataset_cfg`: T5X's default of packing, unless a file binds it."""
    step = gone("The run has its data")(binding, context)
    scope = binding.value.name.rpartition("/")[0] if isinstance(binding.value, Reference) else ""
    is_bound = context.has_t5x_run or any((each, "DatasetConfig.pack") in context.bindings for each in (scope, ""))
    if step.status == TO_DO or is_bound:
        return step
    return Step(RENAMED, ("DataConfig.pack = False  # T5X's default",))


def _module_to_import(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if binding.parameter and context.is_from(binding.value, "MIXTURE_OR_TASK_MODULE"):
        return Step(DROPPED, note="MIXTURE_OR_TASK_MODULE sets it")
    if isinstance(value, str):
        return Step(RENAMED, (f"import {value}",))
    return Step(DROPPED, note="Import the module of the tasks in this file: import my_tasks")


_WHOLE_INPUTS, _CUT_INPUTS = (f"MetricsEvaluation.truncate_inputs = {value}" for value in ("None", '"right"'))


def _task_feature_lengths(binding: Binding, context: Context) -> Step:
    """The macro of lengths. T5X's eval.gin has None, which truncates nothing."""
    if context.resolve(binding.value) is None:
        return Step(RENAMED, (_WHOLE_INPUTS,))
    step = to("TASK_FEATURE_LENGTHS")(binding, context) if binding.parameter else keep(binding, context)
    if step.status not in (KEPT, RENAMED) or not context.includes_run("eval"):
        return step
    return Step(RENAMED, (*(step.lines or (binding_text(binding),)), _CUT_INPUTS))


def _dataset(scope: str, owner: str, parameter: str, macro: str) -> Rule:
    """A setting of the data of an evaluation, which are those of training unless they differ."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        if binding.name == "DatasetConfig.task_feature_lengths" and value is None:
            return Step(RENAMED, (_WHOLE_INPUTS,)) if scope == "infer_eval" else Step(DROPPED, note=LIBRARY)
        of_training = context.value(binding.name, context.data_scopes["train"])
        is_macro = context.is_from(binding.value, macro)
        is_same = (of_training == value or (of_training is None and is_macro)) and not context.differs(binding)
        lines = () if is_same else (f"{owner}.{parameter} = {render(binding.value)}",)
        if parameter == "lengths" and scope == "infer_eval" and context.includes_run("finetune"):
            lines = (*lines, _CUT_INPUTS)
        return Step(RENAMED, lines) if lines else unneeded("That of training")

    return rule


def vocabulary(binding: Binding, context: Context, macro: str = "VOCABULARY") -> Step:
    """A vocabulary of SeqIO's, without sentinels by default, or the project's own."""
    value = context.resolve(binding.value)
    name = configurable(value)
    if name and context.is_own(value.name):
        return Step(KEPT) if binding.selector == macro else Step(RENAMED, (f"{macro} = {render(value)}",))
    if name not in VOCABULARIES:
        return Step(TO_DO, note="Bind @SentencePieceVocabulary() or your own")
    return Step(RENAMED, (f"{macro} = @{name}()", *_default_sentinels(name, context)))


def _default_sentinels(name: str, context: Context) -> tuple[str, ...]:
    return () if f"{name}.extra_ids" in context.names else (f"{name}.extra_ids = 0  # SeqIO's default",)


def _sentencepiece_file(binding: Binding, context: Context) -> Step:
    """The file of a vocabulary, which a model file of T5X's has bound before."""
    step = to("SentencePieceVocabulary.path")(binding, context)
    default = _default_sentinels("SentencePieceVocabulary", context) if context.has_t5x_model else ()
    return Step(RENAMED, (*step.lines, *default)) if step.status == RENAMED else step


_IN_ORDER = gone("Evaluations read their split in order, as training reads its tasks")
_WITHOUT_EFFECT = " ".join(f"DatasetConfig.{name}" for name in ("shuffle", "seed", "use_custom_packing_ops", "module"))


def _rules_of_evaluation(scope: str, owner: str) -> dict[tuple[str, str], Rule]:
    """Returns the rules of the data of an evaluation: `owner` is its class here."""
    return table(
        ("DatasetConfig.mixture_or_task_name", _dataset(scope, owner, "task", "MIXTURE_OR_TASK_NAME")),
        ("DatasetConfig.task_feature_lengths", _dataset(scope, owner, "lengths", "TASK_FEATURE_LENGTHS")),
        ("DatasetConfig.batch_size", _dataset(scope, owner, "batch_size", "BATCH_SIZE")),
        ("DatasetConfig.split", to(f"{owner}.split", DataConfig.eval_split)),
        (_WITHOUT_EFFECT, _IN_ORDER),
        ("DatasetConfig.use_cached", gone("USE_CACHED_TASKS is for all data of a run")),
        ("DatasetConfig.pack", gone("The loss of rows does not depend on packing, and metrics are of single examples")),
        scope=scope,
    )


RULES = {
    **table(
        ("MIXTURE_OR_TASK_MODULE DatasetConfig.module", _module_to_import),
        ("train.train_dataset_cfg", _data_of_training),
        ("BATCH_SIZE", _batch_size),
        ("TASK_FEATURE_LENGTHS", _task_feature_lengths),
        (
            "DatasetConfig.mixture_or_task_name",
            _of_training(
                "mixture_or_task_name",
                "MIXTURE_OR_TASK_NAME",
                ("train_eval", "LossEvaluation.task"),
                ("infer_eval", "MetricsEvaluation.task"),
            ),
        ),
        (
            "DatasetConfig.task_feature_lengths",
            _of_training("task_feature_lengths", "TASK_FEATURE_LENGTHS", ("train_eval", "LossEvaluation.lengths")),
        ),
        ("DatasetConfig.batch_size", _of_training("batch_size", "BATCH_SIZE", ("train_eval", "LossEvaluation.batch_size"))),
        ("DatasetConfig.split", to("DataConfig.split", "train")),
        ("VOCABULARY", vocabulary),
        ("SentencePieceVocabulary.sentencepiece_model_file", _sentencepiece_file),
    ),
    # Of the commands eval and infer
    **table(
        ("DatasetConfig.mixture_or_task_name", to("MIXTURE_OR_TASK_NAME")),
        ("DatasetConfig.task_feature_lengths", _task_feature_lengths),
        ("DatasetConfig.batch_size", to("MetricsEvaluation.batch_size")),
        ("DatasetConfig.split", to("MetricsEvaluation.split")),
        ("DatasetConfig.use_cached", to("USE_CACHED_TASKS")),
        (f"{_WITHOUT_EFFECT} DatasetConfig.pack", _IN_ORDER),
        scope=COMMAND,
    ),
    **_rules_of_evaluation("train_eval", "LossEvaluation"),
    **_rules_of_evaluation("infer_eval", "MetricsEvaluation"),
}
