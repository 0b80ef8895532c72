"""Prompt templates with promptsource's semantics: Jinja, `input ||| target`, and answer choices."""

import contextlib
import dataclasses
import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.visitor

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.templates.sandbox import BUDGET, Budget, Sandbox, size

MAX_FIELD_CHARACTERS = 2_048  # printed fields are truncated to this
NO_LABEL = "<NO LABEL>"  # replaces an empty target, as in T0
_SEPARATOR = "|||"
_PROTECTED = "3ed2dface8203c4c9dfb1a5dc58e41e0"  # replaces a separator inside a record, as in promptsource


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Rendered record.

    Attributes:
      inputs, targets: texts.
      choices: possible targets, empty if the template has no answer choices.
    """

    inputs: str
    targets: str
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Template:
    """Prompt template of a data set.

    Attributes:
      dataset: name of the data set.
      name: name of the template.
      jinja: input and target, separated by |||.
      answer_choices: Jinja text of the possible targets, separated by |||. None = open-ended.
      original_task: whether it asks for the task that the data set was made for.
      choices_in_prompt: whether the input lists the choices.
      inverted: whether it asks for an input of the original task, such as the question for an answer.
      no_instruction: whether it prints the fields without an instruction.
      references: Jinja text of all accepted answers, separated by |||. None = the target alone.
      metrics: names of metrics of generated answers in promptsource's metadata, such as "BLEU" and "Squad".
    """

    dataset: str
    name: str
    jinja: str
    answer_choices: str | None = None
    original_task: bool = False
    choices_in_prompt: bool = False
    inverted: bool = False
    no_instruction: bool = False
    references: str | None = None
    metrics: tuple[str, ...] = ()

    def render(self, record: Mapping[str, Any], seed: int = 0) -> Rendered | None:
        """Renders a record. Returns None if the template does not apply to it.

        Args:
          record: fields of the record.
          seed: seed of random choices in the template (`choice`), combined with the record and the template.

        Raises:
          UserError: for a missing or null field, or a label outside the choices.
        """
        record = {name.replace("-", "_"): value for name, value in record.items()}
        missing = sorted(self._fields - record.keys())
        if missing:
            raise UserError(f'{self} needs the field "{missing[0]}". The record has {", ".join(record) or "none"}.')
        if "answer_choices" in record:
            raise UserError(
                f'{self} cannot render a record with a field "answer_choices", a name that templates use themselves.'
            )
        with self._render_errors():
            values = self._values(record, seed)
            choices = self._choices and _render_list(self._choices, values)
            parts = _render_list(self._template, {**values, "answer_choices": choices})
        if len(parts) != 2 or not parts[0]:
            return None
        return Rendered(parts[0], parts[1] or NO_LABEL, tuple(choices or ()))

    def render_references(self, record: Mapping[str, Any], target: str) -> list[str]:
        """Returns all accepted answers of a record: those of `references`, or the rendered target alone."""
        if self._references is None:
            return [target]
        record = {name.replace("-", "_"): value for name, value in record.items()}
        with self._render_errors():
            return list(dict.fromkeys(_render_list(self._references, self._values(record, seed=0))))

    def _values(self, record: Mapping[str, Any], seed: int) -> dict[str, Any]:
        protected = {name: _protect(value) if isinstance(value, str) else value for name, value in record.items()}
        return {**protected, _SAMPLER: _Sampler((seed, self.dataset, self.name), record), BUDGET: Budget()}

    def __str__(self) -> str:
        return f'Template "{self.name}" of {self.dataset}'

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return self._compile(self.jinja.replace("}}", " | printed }}"))

    @functools.cached_property
    def _choices(self) -> jinja2.Template | None:
        return self._compile(self.answer_choices) if self.answer_choices else None

    @functools.cached_property
    def _references(self) -> jinja2.Template | None:
        return self._compile(self.references) if self.references else None

    def _compile(self, text: str) -> jinja2.Template:
        with self._compile_errors():
            return _ENVIRONMENT.compile_template(_CheckLabels().visit(_ENVIRONMENT.parse(text)))

    @contextlib.contextmanager
    def _render_errors(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            raise UserError(f"{self}: {error.sentence}") from error
        except Exception as error:  # a template is somebody's program
            raise UserError(f"{self} fails: {type(error).__name__}: {str(error).rstrip('.')}.") from error

    @contextlib.contextmanager
    def _compile_errors(self) -> Iterator[None]:
        try:
            yield
        except RecursionError as error:
            raise UserError(f"{self} does not compile: it is nested too deeply.") from error
        except (jinja2.TemplateError, SyntaxError) as error:
            raise UserError(f"{self} does not compile: {str(error).rstrip('.')}.") from error

    @functools.cached_property
    def _fields(self) -> frozenset[str]:
        """Required fields: those that the template uses without testing whether they are defined."""
        texts = [self.jinja, self.answer_choices or ""]
        optional = {name for text in texts for name in re.findall(r"(\w+) is (?:not )?defined", text)}
        with self._compile_errors():
            names = {name for text in texts for name in jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(text))}
        return frozenset(names - optional - {"answer_choices"} - _ENVIRONMENT.globals.keys())


def _render_list(template: jinja2.Template, values: Mapping[str, Any]) -> list[str]:
    """Returns the texts that a template renders, separated by |||."""
    return [_unprotect(text.strip()) for text in template.render(values).split(_SEPARATOR)]


def _protect(text: str) -> str:
    return text.replace(_SEPARATOR, _PROTECTED)


def _unprotect(text: str) -> str:
    return text.replace(_PROTECTED, _SEPARATOR)


_SAMPLER = "_sampler"


class _Sampler:
    """Random numbers of a template for a record. Equal seeds give equal numbers."""

    def __init__(self, key: tuple, record: Mapping[str, Any]):
        self._key, self._record = key, record

    @functools.cached_property
    def random(self) -> random.Random:
        return random.Random(json.dumps([self._key, self._record], sort_keys=True, default=str))


@jinja2.pass_context
def _choice(context: Any, choices: Sequence) -> Any:
    return context.parent[_SAMPLER].random.choice(choices)


def _most_frequent(items: Sequence) -> list | None:
    if not items:
        return None
    counts = Counter(items)
    return [item for item in counts if counts[item] == max(counts.values())]


def _highlight(text: str) -> str:
    return f"<span style='color: #F08080'>{text}</span>"


@jinja2.pass_context
def _printed(context: Any, value: Any) -> str:
    if value is None:
        raise UserError("it prints a null field")
    context.parent[BUDGET].charge(size(value))
    return jinja2.filters.do_truncate(context.environment, str(value), MAX_FIELD_CHARACTERS)


def _label(label: Any, choices: Sequence[str] | None) -> Any:
    if isinstance(label, int) and choices is not None and not 0 <= label < len(choices):
        raise UserError(f"the label {label} is not one of the {len(choices)} choices ({', '.join(choices)})")
    return label


class _CheckLabels(jinja2.visitor.NodeTransformer):
    """Makes answer_choices[label] raise for an invalid label. Python would take -1, a hidden label, for the last choice."""

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        constant = isinstance(node.arg, jinja2.nodes.Const | jinja2.nodes.Neg | jinja2.nodes.Slice)
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == "answer_choices" and not constant:
            choices = jinja2.nodes.Name("answer_choices", "load", lineno=node.lineno)
            node.arg = jinja2.nodes.Filter(node.arg, "label", [choices], [], None, None, lineno=node.lineno)
        return node


_FILTERS: dict[str, Callable] = {
    "choice": _choice,
    "random": _choice,  # Jinja's own filter would differ in every process
    "most_frequent": _most_frequent,
    "highlight": _highlight,
}
_ENVIRONMENT = Sandbox(_FILTERS, {"printed": _printed, "label": _label})
