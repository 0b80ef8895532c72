"""Steps of a translation, and kinds of rules for bindings of T5X: functions (binding, context) -> `Step`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

from t5x_lab.config.t5x_names import UNCHANGED_MACROS
from t5x_lab.migration.project import T5X_MODULES, Context
from t5x_lab.migration.statements import (
    Binding,
    MacroReference,
    Reference,
    binding_text,
    references,
    render,
    replace_macros,
)

COMMAND = "command"  # scope of rules for `DatasetConfig` of T5X's commands eval and infer
DEFAULT = "That is the default here"
KEPT, RENAMED, DROPPED, TO_DO = "kept", "renamed", "dropped", "to do"


class Step(NamedTuple):
    """The translation of a statement.

    Attributes:
      status: one of `KEPT`, `RENAMED`, `DROPPED`, `TO_DO`.
      lines: gin lines.
      note: why, or what to do: a sentence without its full stop, "" if it is plain.
      is_unneeded: whether the statement is left out because it is so without a binding. Writing it would change nothing.
    """

    status: str
    lines: tuple[str, ...] = ()
    note: str = ""
    is_unneeded: bool = False


Rule = Callable[[Binding, Context], Step]


def table(*rows: tuple[str, Rule], scope: str = "") -> dict[tuple[str, str], Rule]:
    """Returns rules by scope and name.

    Args:
      rows: names separated by spaces, and their rule. `Class.*` stands for all parameters of a class.
      scope: scope of the names.
    """
    return {(scope, name): rule for names, rule in rows for name in names.split()}


def unneeded(note: str = DEFAULT) -> Step:
    """Returns the step of a statement that is left out, and could as well be written."""
    return Step(DROPPED, note=note, is_unneeded=True)


def is_list(value: Any) -> TypeGuard[list | tuple]:
    """Returns whether a value is a list or a tuple of gin, not a reference."""
    return isinstance(value, list | tuple) and not isinstance(value, Reference | MacroReference)


VOCABULARIES = ("SentencePieceVocabulary", "ByteVocabulary")  # of SeqIO, with the same names here


def configurable(value: Any) -> str:
    """Returns the name of a reference without scope and module; "" for another value."""
    return value.name.rpartition("/")[2].rpartition(".")[2] if isinstance(value, Reference) else ""


def unknown_reference(value: Any, context: Context) -> str | None:
    """Returns a reference in a value to a configurable of T5X's that has no counterpart under its name."""
    for reference in references(value):
        selector = reference.name.rpartition("/")[2]
        if isinstance(reference, Reference) and context.module_of(selector).split(".")[0] in T5X_MODULES:
            return f"@{reference.name}"
    return None


def translated_macro(reference: MacroReference, context: Context) -> Step | None:
    """Returns what a macro becomes that T5X's files define and that is not one here; None for another."""
    rule, binding = context.rules.get(("", reference.name)), context.bindings.get(("", reference.name))
    return rule(binding, context) if rule and binding and reference.name not in UNCHANGED_MACROS else None


def keep(binding: Binding, context: Context) -> Step:
    """Keeps a binding of the project's, with the values of macros that have other names here."""
    if configurable(binding.value) in VOCABULARIES and not binding.parameter and not context.is_own(binding.value.name):
        return Step(DROPPED, note="The vocabularies that read it have it")
    if unknown := unknown_reference(binding.value, context):
        return Step(TO_DO, note=f"{unknown} is not known here")
    macros = [each for each in references(binding.value) if isinstance(each, MacroReference)]
    values = {each.name: context.resolve(each) for each in macros if translated_macro(each, context)}
    if not values:
        return Step(KEPT)
    return Step(RENAMED, (binding_text(dataclasses.replace(binding, value=replace_macros(binding.value, values))),))


def to(name: str, *same: Any) -> Rule:
    """Returns the rule of a binding with the same value under another name.

    Args:
      name: the name here.
      same: values that are the default here, or that mean the same as no binding.
    """

    def rule(binding: Binding, context: Context) -> Step:
        value = binding.value
        if fields := binding.parameter and context.binds_macro(name) and _FIELDS.get(name):
            return _set_beside_macro(binding, name, fields, context)
        if isinstance(value, MacroReference) and value.name == name:
            return unneeded(f"The macro {name} sets it")
        if isinstance(value, MacroReference) and (macro := translated_macro(value, context)):
            is_read = context.bindings["", value.name].line > 0
            if is_read and (macro.status == DROPPED or any(line.startswith(f"{name} = ") for line in macro.lines)):
                return Step(DROPPED, note=f"{value.name} sets it")
            value = context.resolve(value)
        resolved = context.resolve(value)
        is_same = any(resolved is each or (resolved == each and type(resolved) is type(each)) for each in same)
        if is_same and not context.differs(binding):
            return unneeded()
        if unknown := unknown_reference(value, context):
            return Step(TO_DO, note=f"{unknown} is not known here")
        line = f"{name} = {render(value)}"
        status = KEPT if line == binding.text.strip() else RENAMED
        return Step(status, (line,))

    return rule


def _set_beside_macro(binding: Binding, macro: str, fields: Sequence[str], context: Context) -> Step:
    """Sets the fields that read a macro, which keeps its value for others that read it."""
    if context.is_from(binding.value, macro) and not context.differs(binding):
        return unneeded(f"The macro {macro} sets it")
    if unknown := unknown_reference(binding.value, context):
        return Step(TO_DO, note=f"{unknown} is not known here")
    translated = isinstance(binding.value, MacroReference) and translated_macro(binding.value, context)
    value = context.resolve(binding.value) if translated else binding.value
    return Step(RENAMED, tuple(f"{field} = {render(value)}" for field in fields))


# Fields here that read the macros which T5X's files have too.
_FIELDS = {
    "EVAL_PERIOD": ("RunConfig.eval_period", "LossEvaluation.period"), "TRAIN_STEPS": ("RunConfig.train_steps",),
    "INITIAL_CHECKPOINT_PATH": ("RunConfig.initial_checkpoint_path",), "MODEL_DIR": ("RunConfig.model_dir",),
    "Z_LOSS": ("ModelConfig.z_loss",), "LABEL_SMOOTHING": ("ModelConfig.label_smoothing",),
    "LOSS_NORMALIZING_FACTOR": ("ModelConfig.loss_normalizing_factor",), "DROPOUT_RATE": ("TransformerConfig.dropout_rate",),
    "USE_CACHED_TASKS": ("DataConfig.use_cached",),
}  # fmt: skip


def gone(why: str) -> Rule:
    """Returns the rule of a binding that needs no counterpart, unless it is to something of the project's own."""

    def rule(binding: Binding, context: Context) -> Step:
        own = [each.name for each in references(binding.value) if isinstance(each, Reference) and context.is_own(each.name)]
        if own:
            return Step(TO_DO, note=f"@{own[0]} is the project's own and has no place here. {why}")
        return Step(DROPPED, note=why)

    return rule


def if_is(*plain: Any, then: str, otherwise: str) -> Rule:
    """Returns the rule of a binding that needs no counterpart with some values. Otherwise a person has to decide."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        name = value.name.rpartition(".")[2] if isinstance(value, Reference) else value
        if not any(name == each for each in plain):
            return Step(TO_DO, note=otherwise)
        return Step(DROPPED, note=then, is_unneeded=then == DEFAULT)

    return rule


def dtype_as(name: str) -> Rule:
    """A dtype, as text or as `@jax.numpy.bfloat16`."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        return Step(RENAMED, (f"{name} = {render(value.name.rpartition('.')[2] if isinstance(value, Reference) else value)}",))

    return rule


def or_macro(name: str, otherwise: Rule) -> Rule:
    """Returns the rule of a binding that is usually the macro `name`, and else what the macro could be."""

    def rule(binding: Binding, context: Context) -> Step:
        return (to(name) if isinstance(binding.value, MacroReference) else otherwise)(binding, context)

    return rule


LIBRARY = "The library does this itself"
