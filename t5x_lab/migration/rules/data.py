"""The data of training and of evaluations, and vocabularies."""

import math

from t5x_lab.data.config import DataConfig
from t5x_lab.migration.project import Context
from t5x_lab.migration.statements import Binding, MacroReference, render
from t5x_lab.migration.steps import DROPPED, KEPT, LIBRARY, RENAMED, TO_DO, Rule, Step, configurable, gone, table, to


def _batch_size(binding: Binding, context: Context) -> Step:
    """The batch size, and as many shards of the data as divide it."""
    size, step = context.resolve(binding.value), to("BATCH_SIZE")(binding, context)
    if step.status == DROPPED or not isinstance(size, int) or size % DataConfig.shards == 0:
        return step
    return Step(RENAMED, (*step.lines, f"DATA_SHARDS = {math.gcd(size, DataConfig.shards)}  # it must divide BATCH_SIZE"))


def _module_to_import(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    if isinstance(value, str):
        return Step(RENAMED, (f"import {value}",))
    return Step(DROPPED, note="Import the module of the tasks in this file: import my_tasks")


def _dataset(scope: str, owner: str, parameter: str, macro: str) -> Rule:
    """A setting of the data of an evaluation, which are those of training unless they differ."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        if binding.name == "DatasetConfig.task_feature_lengths" and value is None:
            return Step(RENAMED, (f"{owner}.truncate_inputs = None",)) if scope == "infer_eval" else Step(DROPPED, note=LIBRARY)
        of_training = context.value(f"DatasetConfig.{binding.parameter}", "train")
        is_macro = isinstance(binding.value, MacroReference) and binding.value.name == macro
        if (of_training == value or (of_training is None and is_macro)) and not context.differs(binding):
            return Step(DROPPED, note="That of training")
        return Step(RENAMED, (f"{owner}.{parameter} = {render(binding.value)}",))

    return rule


def vocabulary(binding: Binding, context: Context) -> Step:
    """A vocabulary of SeqIO's, without sentinels by default, or the project's own."""
    value = binding.value
    name = configurable(value)
    if name and context.is_own(value.name):
        return Step(KEPT)
    if name not in ("SentencePieceVocabulary", "ByteVocabulary"):
        return Step(TO_DO, note="Bind @SentencePieceVocabulary() or your own")
    is_bound = f"{name}.extra_ids" in context.names
    default = () if is_bound else (f"{name}.extra_ids = 0  # SeqIO's default",)
    return Step(RENAMED, (f"VOCABULARY = @{name}()", *default))


def _rules_of_evaluation(scope: str, owner: str) -> dict[tuple[str, str], Rule]:
    """Returns the rules of the data of an evaluation: `owner` is its class here."""
    in_order = gone("Evaluations read their split in order, as training reads its tasks")
    unused = ("shuffle", "seed", "pack", "use_custom_packing_ops", "use_cached", "module")
    return table(
        ("DatasetConfig.mixture_or_task_name", _dataset(scope, owner, "task", "MIXTURE_OR_TASK_NAME")),
        ("DatasetConfig.task_feature_lengths", _dataset(scope, owner, "lengths", "TASK_FEATURE_LENGTHS")),
        ("DatasetConfig.batch_size", _dataset(scope, owner, "batch_size", "BATCH_SIZE")),
        ("DatasetConfig.split", to(f"{owner}.split")),
        (" ".join(f"DatasetConfig.{name}" for name in unused), in_order),
        scope=scope,
    )


RULES = {
    **table(
        ("MIXTURE_OR_TASK_MODULE DatasetConfig.module", _module_to_import),
        ("BATCH_SIZE DatasetConfig.batch_size", _batch_size),
        ("DatasetConfig.split", to("DataConfig.split", "train")),
        ("VOCABULARY", vocabulary),
    ),
    **_rules_of_evaluation("train_eval", "LossEvaluation"),
    **_rules_of_evaluation("infer_eval", "MetricsEvaluation"),
}
