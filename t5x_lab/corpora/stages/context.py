"""The context that the jobs of all stages share: the recipe, the input files, and the folders of the stages."""

import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import heapq
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from t5x_lab.config import gin_files
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.user_code import user_modules
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.configurables import bind_rules
from t5x_lab.corpora.files import exists, match_files, match_files_with_times, open_input, open_output
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.rules.rule import rule_name

PLAN = "plan.json"
_MAX_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 300  # of what a rule drops, per rule


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions before the first stage. They are stored, so that an interrupted corpus is continued with the same.

    Attributes:
      config: the recipe as gin text.
      folder: working directory, where the user's modules are.
      output: folder of the corpus.
      inputs: (path, size) of the files of each job of the stage "read".
      num_buckets: number of parts of the pages by the hash of their URL.
      latest: time of the first run. Pages with a later timestamp have a wrong one.
      folders: folder of each stage in the work directory.
    """

    config: str
    folder: str
    output: str
    inputs: list[list[tuple[str, int]]]
    num_buckets: int
    latest: str
    folders: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Context:
    """A plan with its recipe.

    Attributes:
      plan, corpus: the plan and the recipe.
      work_dir: folder of the stages.
    """

    plan: Plan
    corpus: Corpus
    work_dir: str

    def path(self, stage: str, name: str) -> str:
        """Returns the path of a file of a stage."""
        return f"{self.work_dir}/{self.plan.folders[stage]}/{name}"

    def is_done(self, stage: str, index: int) -> bool:
        return exists(self.path(stage, f"{index:05d}.json"))

    def num_done(self, stage: str) -> int:
        """Returns the number of finished jobs of a stage."""
        folder = f"{self.work_dir}/{self.plan.folders[stage]}"
        folder = folder if "://" in folder else glob.escape(folder)
        return sum(path.endswith(".json") for path, _ in match_files(f"{folder}/*.json"))

    def summary(self, stage: str, index: int) -> dict[str, Any]:
        """Returns what a job has left besides its rows: counts, and what its stage adds."""
        with open_input(self.path(stage, f"{index:05d}.json")) as file:
            return parse_json(file.read())

    def write_summary(self, stage: str, index: int, summary: dict[str, Any]) -> None:
        """Writes the summary of a job, which makes it a finished one."""
        with open_output(self.path(stage, f"{index:05d}.json")) as file:
            file.write(json.dumps(summary, ensure_ascii=False, sort_keys=True).encode("utf-8", "replace"))


@functools.lru_cache(maxsize=2)
def load_context(work_dir: str) -> Context:
    """Returns the context of a work directory, in any process."""
    with open_input(f"{work_dir}/{PLAN}") as file:
        plan = Plan(**parse_json(file.read()))
    if plan.folder not in sys.path:
        sys.path.insert(0, plan.folder)
    return Context(plan, parse_corpus((), (plan.config,))[0], work_dir)


def parse_corpus(files: Iterable[str], bindings: Iterable[str], search_paths: Iterable[str] = ()) -> tuple[Corpus, str]:
    """Returns (recipe, its whole configuration as gin text)."""
    gin_files.parse([*files], [*bindings], [*search_paths])
    text = gin_files.config_text()
    return bind_rules(gin_files.build("Corpus")), text


class Examples:
    """A few examples of what each rule drops: those with the smallest key, whatever the order of the pages."""

    def __init__(self):
        self._by_rule: dict[str, list[tuple[int, str, str]]] = collections.defaultdict(list)

    def add(self, rule: str, page: Page) -> None:
        heap = self._by_rule[rule]
        rank = -int.from_bytes(page.key[:6], "big")
        if len(heap) < _MAX_EXAMPLES:
            heapq.heappush(heap, (rank, page.url, page.text[:_EXAMPLE_CHARACTERS]))
        elif rank > heap[0][0]:
            heapq.heapreplace(heap, (rank, page.url, page.text[:_EXAMPLE_CHARACTERS]))

    def to_json(self) -> dict[str, list]:
        return {rule: sorted(heap, reverse=True) for rule, heap in sorted(self._by_rule.items())}


def merge_examples(parts: Iterable[dict[str, list]]) -> dict[str, list]:
    """Returns the examples of several jobs together. See `Examples`."""
    merged: dict[str, list] = collections.defaultdict(list)
    for part in parts:
        for rule, entries in part.items():
            merged[rule] = sorted([*merged[rule], *map(tuple, entries)], reverse=True)[:_MAX_EXAMPLES]
    return dict(merged)


def describe(value: Any) -> Any:
    """Returns a value whose text changes whenever a setting changes the corpus.

    These are values, arguments of rules, the code of a user's own functions with that of all of their modules, and the size and
    time of files that are named.
    """
    if isinstance(value, functools.partial):
        return describe(value.func), describe(value.keywords)
    if isinstance(value, dict):
        return sorted((str(name), describe(x)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return [describe(x) for x in value]
    if isinstance(value, set | frozenset):
        return sorted((describe(x) for x in value), key=repr)
    if isinstance(value, str):
        return value, _describe_files(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if callable(value):
        return _describe_function(value)
    return type(value).__name__, _ADDRESS.sub("", repr(value))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, which differs in every process


def _describe_files(text: str) -> list[tuple[str, int, float]]:
    """Returns size and time of the files that a text names. A folder has a slash in its name, since "." is a mark."""
    pattern = re.sub(r"\{\w+\}", "*", text)
    is_pattern = re.search(r"[*?[]", pattern) is not None and ("/" in pattern or "." in pattern)
    is_path = "://" in pattern or os.path.isfile(pattern) or ("/" in pattern and os.path.exists(pattern))
    if not is_pattern and not is_path:
        return []
    with contextlib.suppress(UserError):  # an address that is no storage
        return match_files_with_times(pattern)
    return []


def _describe_function(function: Callable[..., Any]) -> Any:
    name = f"{getattr(function, '__module__', '')}.{rule_name(function)}"
    if hasattr(function, "__wrapped__") and name.startswith("t5x_lab."):  # bound by gin, with a scope
        return name, gin_files.config_text()
    if name.startswith("t5x_lab."):
        return name
    state = describe(vars(function)) if not inspect.isroutine(function) and hasattr(function, "__dict__") else None
    code = function if inspect.isroutine(function) else type(function)
    with contextlib.suppress(OSError, TypeError):  # code that is no file
        return name, state, inspect.getsource(inspect.getmodule(code) or code), user_modules()
    return name, state, _ADDRESS.sub("", repr(function))


def digest(*parts: object) -> str:
    return hashlib.md5(repr(parts).encode("utf-8", "replace")).hexdigest()[:10]
