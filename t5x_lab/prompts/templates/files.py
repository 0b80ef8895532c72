"""Template files in promptsource's layout, FOLDER/<data set>/templates.yaml."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import yaml

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts.config import task_slug
from t5x_lab.prompts.templates.template import Template

FILE = "templates.yaml"


@dataclasses.dataclass(frozen=True)
class TemplateSet:
    """A folder of templates that the library provides.

    Attributes:
      prefix: prefix of the names of tasks that use this folder alone, such as "flan_".
      folder: path of the folder.
      max_records: number of training records that these tasks read, chosen by their hash. None = all.
    """

    prefix: str
    folder: str
    max_records: int | None = None


TEMPLATE_SETS: list[TemplateSet] = []  # their folders come after the user's


def read_templates(folders: Sequence[str], dataset: str) -> tuple[Template, ...]:
    """Reads the templates of a data set, sorted by name.

    Args:
      folders: folders to search. The first with a file for the data set is used.
      dataset: name of the data set, such as "super_glue/rte".

    Raises:
      UserError: if no folder has a file, or it is invalid.
    """
    for folder in folders:
        path = os.path.join(folder, *dataset.split("/"), FILE)
        if os.path.exists(path):
            return _read_file(os.path.abspath(path), dataset, os.stat(path).st_mtime_ns)
    raise NotHere(
        f'There are no templates for the data set "{dataset}": no template folder ({", ".join(folders) or "none is set"}) has '
        f"a file {dataset}/{FILE}. Add a folder that has one to TEMPLATES."
    )


@functools.lru_cache
def data_sets_in(folders: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the data sets that the folders have templates for."""
    paths = [(folder, path) for folder in folders for path, _, files in os.walk(folder) if FILE in files]
    return tuple(dict.fromkeys(os.path.relpath(path, folder).replace(os.sep, "/") for folder, path in paths))


def task_name(dataset: str, template: str) -> str:
    """Returns the name of a data set's task with a template, as in T0: "super_glue_rte_does_it_follow_that"."""
    return task_slug(f"{dataset}_{template}")


class _Loader(yaml.SafeLoader):
    """YAML loader that reads promptsource's two object types as dictionaries.

    It refuses merge keys (`<<`), which a few lines can nest to any size. No template file has them.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are not supported", node.start_mark)


for _tag in ("!Template", "!TemplateMetadata"):
    _Loader.add_constructor(_tag, lambda loader, node: loader.construct_mapping(node, deep=True))

# Metadata of a template: its name here and its names in files. The second is that of earlier versions.
_METADATA = {
    "original_task": ("original_task",),
    "choices_in_prompt": ("choices_in_prompt",),
    "inverted": ("inverted", "turned_around"),
    "no_instruction": ("no_instruction", "plain"),
}


@functools.lru_cache(maxsize=1024)
def _read_file(path: str, dataset: str, modified: int) -> tuple[Template, ...]:
    del modified  # part of the cache key
    try:
        with open(path, encoding="utf-8") as file:
            entries = yaml.load(file, _Loader)["templates"].values()
        templates = [_make_template(dataset, entry) for entry in entries]
        texts = [
            text
            for template in templates
            for text in (template.jinja, template.answer_choices or "", template.references or "", *template.metrics)
        ]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("jinja, answer_choices, references and metrics must be texts")
    except RecursionError as error:
        raise UserError(f"{path} is not a template file in promptsource's format: it is nested too deeply.") from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a template file in promptsource's format: {type(error).__name__}: {error}.") from error
    if not templates:
        raise UserError(f"{path} has no templates.")
    templates.sort(key=lambda template: template.name)
    names = [task_name(dataset, template.name) for template in templates]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UserError(f'{path} has two templates whose tasks would both be called "{duplicate}". Rename one of them.')
    return tuple(templates)


def _make_template(dataset: str, entry: dict) -> Template:
    metadata = entry.get("metadata") or {}
    flags = {name: any(bool(metadata.get(key)) for key in keys) for name, keys in _METADATA.items()}
    name = entry["name"]
    if isinstance(name, list | dict):
        raise TypeError("a template's name must be a text")
    values: dict[str, Any] = {key: entry.get(key) for key in ("answer_choices", "references")}
    values |= {"metrics": tuple(metadata.get("metrics") or ())} | flags
    return Template(dataset, str(name), entry["jinja"], **values)
