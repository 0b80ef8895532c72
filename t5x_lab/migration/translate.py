"""Translates a binding by the rule of T5X's name, or keeps it if it is the project's own. Otherwise a person has to decide."""

import dataclasses

from t5x_lab.config.t5x_names import hint
from t5x_lab.migration.project import T5X_MODULES, Context
from t5x_lab.migration.rules import data, evaluation, model, names, optimizer, run
from t5x_lab.migration.statements import Binding, MacroReference, binding_text, references, replace_macros
from t5x_lab.migration.steps import KEPT, RENAMED, TO_DO, Step, translated_macro, unknown_reference

_BY_TOPIC = {**run.RULES, **data.RULES, **model.RULES, **optimizer.RULES, **evaluation.RULES}
# A rule for a whole class comes before the names of its parameters.
_BY_NAME = {key: rule for key, rule in names.RULES.items() if ("", f"{key[1].partition('.')[0]}.*") not in _BY_TOPIC}
RULES = {**_BY_NAME, **_BY_TOPIC}


def translate(binding: Binding, context: Context) -> Step:
    """Returns what a binding becomes."""
    if binding.parameter and context.is_own(binding.selector):
        return _keep(binding, context)
    scope, rule = binding.scope, context.rules.get((binding.scope, binding.name))
    if binding.name.startswith("DatasetConfig."):
        scope = scope or ("infer_eval" if context.is_evaluation else "train")
        rule = context.rules.get((scope, binding.name)) or (context.rules.get(("", binding.name)) if scope == "train" else None)
        if rule is None:
            return Step(TO_DO, note="Bind it for an evaluation in EVALS, such as mine/MetricsEvaluation.split")
    elif scope and binding.parameter and context.rules.get(("", binding.name)):
        return Step(TO_DO, note="Its scope is not translated")
    if rule is None and binding.parameter:
        rule = context.rules.get(("", f"{binding.selector.rpartition('.')[2]}.*"))
    if rule is not None:
        return rule(binding, context)
    if binding.parameter and _is_of_t5x(binding, context):
        of_t5x = hint(f"{binding.selector}.{binding.parameter}").strip() or "It has no counterpart"
        return Step(TO_DO, note=of_t5x.rstrip("."))
    return _keep(binding, context)


def _is_of_t5x(binding: Binding, context: Context) -> bool:
    module = context.module_of(binding.selector).split(".")[0]
    return module in T5X_MODULES or bool(hint(f"{binding.selector}.{binding.parameter}"))


def _keep(binding: Binding, context: Context) -> Step:
    """Keeps a binding of the project's, with the values of macros that have other names here."""
    if unknown := unknown_reference(binding.value, context):
        return Step(TO_DO, note=f"{unknown} is not known here")
    macros = [each for each in references(binding.value) if isinstance(each, MacroReference)]
    values = {each.name: context.resolve(each) for each in macros if translated_macro(each, context)}
    if not values:
        return Step(KEPT)
    return Step(RENAMED, (binding_text(dataclasses.replace(binding, value=replace_macros(binding.value, values))),))
