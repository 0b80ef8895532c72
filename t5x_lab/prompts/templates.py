"""Templates that put a record into words, with promptsource's meaning: Jinja, `input ||| target`, and answer choices.

A data set's templates are a file of promptsource's kind, FOLDER/<data set>/templates.yaml.
"""

import dataclasses
import functools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.visitor
import yaml

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts.config import in_names

FILE = "templates.yaml"
LONGEST_FIELD = 2_048  # characters, of which what a template prints of a field is cut
NO_LABEL = "<NO LABEL>"  # in place of an empty target, as in T0
_SEPARATOR = "|||"
_PROTECTED = "3ed2dface8203c4c9dfb1a5dc58e41e0"  # a separator in a record, as promptsource has it: templates look for it


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A record in words.

    Attributes:
      inputs, targets: texts.
      choices: the possible targets; none where a template has no answer choices.
    """

    inputs: str
    targets: str
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Template:
    """One way to put the records of a data set into words.

    Attributes:
      dataset: whose records.
      name: of the template.
      jinja: input and target, separated by |||.
      answer_choices: Jinja for the possible targets, separated by |||; None where they are open.
      original_task: whether it asks for what the data set was made for.
      choices_in_prompt: whether the input names the choices.
      turned_around: whether it asks for what the data set gives, such as a question for an answer.
      plain: whether it gives the fields alone, and asks for nothing.
    """

    dataset: str
    name: str
    jinja: str
    answer_choices: str | None = None
    original_task: bool = False
    choices_in_prompt: bool = False
    turned_around: bool = False
    plain: bool = False

    def render(self, record: Mapping[str, Any], seed: int = 0) -> Rendered | None:
        """The record in words; None where the template has nothing to say of it.

        Args:
          record: its fields, as JSON has them.
          seed: of what the template draws (`choice`), beside the record and the template themselves.

        Raises:
          UserError: for a field that is missing or null, and a label outside the choices.
        """
        record = {name.replace("-", "_"): value for name, value in record.items()}
        missing = sorted(self._fields - record.keys())
        if missing:
            raise UserError(f'{self} needs the field "{missing[0]}"; the record has {", ".join(record) or "none"}.')
        if "answer_choices" in record:
            raise UserError(f'{self} cannot read a record with a field "answer_choices", which is what templates call theirs.')
        protected = {name: _protected(value) if isinstance(value, str) else value for name, value in record.items()}
        drawn = _Drawn((seed, self.dataset, self.name), record)
        try:
            choices = None
            if self._choices is not None:
                texts = self._choices.render({**protected, _DRAWN: drawn}).split(_SEPARATOR)
                choices = [_unprotected(text.strip()) for text in texts]
            parts = self._template.render({**protected, "answer_choices": choices, _DRAWN: drawn}).split(_SEPARATOR)
        except UserError as error:
            raise UserError(f"{self}: {error.sentence}") from error
        except Exception as error:  # a template is a program of the user's
            raise UserError(f"{self} fails: {type(error).__name__}: {error}.") from error
        parts = [_unprotected(part).strip() for part in parts]
        if len(parts) != 2 or not parts[0]:
            return None
        return Rendered(parts[0], parts[1] or NO_LABEL, tuple(choices or ()))

    def __str__(self) -> str:
        return f'Template "{self.name}" of {self.dataset}'

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return self._compiled(self.jinja.replace("}}", f" | printed | truncate({LONGEST_FIELD}) }}}}"))

    @functools.cached_property
    def _choices(self) -> jinja2.Template | None:
        return self._compiled(self.answer_choices) if self.answer_choices else None

    def _compiled(self, text: str) -> jinja2.Template:
        return _ENVIRONMENT.from_string(_CheckLabels().visit(self._parsed(text)))

    def _parsed(self, text: str) -> jinja2.nodes.Template:
        try:
            return _ENVIRONMENT.parse(text)
        except jinja2.TemplateError as error:
            raise UserError(f"{self} does not compile: {error}.") from error

    @functools.cached_property
    def _fields(self) -> frozenset[str]:
        """Those of a record that the template names, and does not ask whether they are there."""
        texts = [self.jinja, self.answer_choices or ""]
        asked = {name for text in texts for name in re.findall(r"(\w+) is (?:not )?defined", text)}
        named = {name for text in texts for name in jinja2.meta.find_undeclared_variables(self._parsed(text))}
        return frozenset(named - asked - {"answer_choices"} - _ENVIRONMENT.globals.keys())


def _protected(text: str) -> str:
    return text.replace(_SEPARATOR, _PROTECTED)


def _unprotected(text: str) -> str:
    return text.replace(_PROTECTED, _SEPARATOR)


_DRAWN = "_drawn"


class _Drawn:
    """What templates draw from a record: the same whenever it is rendered with the same seed."""

    def __init__(self, key: tuple, record: Mapping[str, Any]):
        self._key, self._record = key, record

    @functools.cached_property
    def random(self) -> random.Random:
        return random.Random(json.dumps([self._key, self._record], sort_keys=True, default=str))


@jinja2.pass_context
def _choice(context: Any, choices: Sequence) -> Any:
    return context[_DRAWN].random.choice(choices)


def _most_frequent(items: Sequence) -> list | None:
    if not items:
        return None
    counts = Counter(items)
    return [item for item in counts if counts[item] == max(counts.values())]


def _highlight(text: str) -> str:
    return f"<span style='color: #F08080'>{text}</span>"


def _printed(value: Any) -> str:
    if value is None:
        raise UserError("it prints a field that is null")
    return str(value)


def _label(label: Any, choices: Sequence[str] | None) -> Any:
    if isinstance(label, int) and choices is not None and not 0 <= label < len(choices):
        raise UserError(f"the label {label} is none of the {len(choices)} choices ({', '.join(choices)})")
    return label


class _CheckLabels(jinja2.visitor.NodeTransformer):
    """answer_choices[label] raises for a label that there is not; Python takes -1, no label, for the last one."""

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        constant = isinstance(node.arg, jinja2.nodes.Const | jinja2.nodes.Neg | jinja2.nodes.Slice)
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == "answer_choices" and not constant:
            choices = jinja2.nodes.Name("answer_choices", "load", lineno=node.lineno)
            node.arg = jinja2.nodes.Filter(node.arg, "label", [choices], [], None, None, lineno=node.lineno)
        return node


def _environment() -> jinja2.Environment:
    made = jinja2.Environment()
    made.filters |= {"choice": _choice, "most_frequent": _most_frequent, "highlight": _highlight}
    made.filters |= {"printed": _printed, "label": _label}
    made.globals["zip"] = zip
    return made


_ENVIRONMENT = _environment()


class _Loader(yaml.SafeLoader):
    """YAML with promptsource's two kinds of objects, as dictionaries."""


for _kind in ("!Template", "!TemplateMetadata"):
    _Loader.add_constructor(_kind, lambda loader, node: loader.construct_mapping(node, deep=True))


def read_templates(folders: Sequence[str], dataset: str) -> tuple[Template, ...]:
    """The templates of a data set, in the order of their names.

    Args:
      folders: where to look; the first that has a file for the data set is taken.
      dataset: such as "super_glue/rte".

    Raises:
      UserError: when no folder has any, or the file is none of promptsource's.
    """
    for folder in folders:
        path = os.path.join(folder, *dataset.split("/"), FILE)
        if os.path.exists(path):
            return _read(os.path.abspath(path), dataset, os.stat(path).st_mtime_ns)
    where = ", ".join(folders) or "none is set"
    raise NotHere(
        f'There are no templates for the data set "{dataset}": no {dataset}/{FILE} in any folder of templates ({where}). Name '
        "a folder that has it with TEMPLATES."
    )


@functools.lru_cache
def data_sets_in(folders: Sequence[str]) -> tuple[str, ...]:
    """The data sets that folders have templates of."""
    paths = [(folder, where) for folder in folders for where, _, files in os.walk(folder) if FILE in files]
    return tuple(dict.fromkeys(os.path.relpath(where, folder).replace(os.sep, "/") for folder, where in paths))


@functools.lru_cache(maxsize=1024)
def _read(path: str, dataset: str, changed: int) -> tuple[Template, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.load(file, _Loader)["templates"].values()
        found = [
            Template(
                dataset,
                str(entry["name"]),
                entry["jinja"],
                entry.get("answer_choices"),
                **{name: bool((entry.get("metadata") or {}).get(name)) for name in _MARKS},
            )
            for entry in entries
        ]
        texts = [text for template in found for text in (template.jinja, template.answer_choices or "")]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("jinja and answer_choices are texts")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise UserError(
            f"{path} is no file of templates as promptsource writes them: {type(error).__name__}: {error}."
        ) from error
    if not found:
        raise UserError(f"{path} has no templates.")
    found.sort(key=lambda template: template.name)
    names = [task_name(dataset, template.name) for template in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f'{path} has two templates whose tasks would both be called "{twice}". Give one of them another name.')
    return tuple(found)


_MARKS = ("original_task", "choices_in_prompt", "turned_around", "plain")


def task_name(dataset: str, template: str) -> str:
    """The name of a data set's task with a template, as T0 has it: "super_glue_rte_does_it_follow_that"."""
    return in_names(f"{dataset}_{template}")
