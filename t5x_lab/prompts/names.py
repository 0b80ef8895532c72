"""Names of prompted tasks and mixtures, registered with SeqIO when they are first used.

Names of a data set such as "super_glue/rte":
  super_glue_rte_<template>              with one template, as in T0
  super_glue_rte                         with a template sampled for each example and epoch
  super_glue_rte_4templates              with one of the first four templates, sampled
  super_glue_rte_no_instruction          without instruction
  super_glue_rte_dataset_name            with the data set's name in place of an instruction
  super_glue_rte_<template>_score_eval   all choices, for ranking
  super_glue_rte_score_eval              the same, with all templates of the original task
  xsum_<template>_generate_eval          generation, with the metrics of the template's metadata
  xsum_generate_eval                     the same, with all templates of the original task
  flan_super_glue_rte, …                 with FLAN's templates alone
  t5_super_glue_rte, …                   in the T5 suite's format, see `t5x_lab.papers.t5.suite`
  classify_super_glue_rte, …             for a classification head, see `t5x_lab.prompts.classification`

Names of collections: t0_train, t0_eval, flan, flan_without_<cluster>, flan_3_clusters, flan_eval_<cluster>, and those of
COLLECTIONS, each with "_without_<data set>_and_<data set>", "_4templates", "_no_instruction" or "_dataset_name" appended.

"_5_shot" or "_many_shot" at the end of any of these adds exemplars before each question.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts.classification import task as classification_task
from t5x_lab.prompts.collections import COLLECTION_NAMES, CollectionMixtures
from t5x_lab.prompts.config import task_slug
from t5x_lab.prompts.tasks.data_set_tasks import DataSetTasks, all_data_sets, split_form
from t5x_lab.prompts.tasks.registry import is_data_set_task, is_registered_elsewhere, task_data_sets
from t5x_lab.prompts.templates.files import TEMPLATE_SETS, data_sets_in


class TaskFamily(NamedTuple):
    """A family of task names that is registered outside of this package, such as the T5 suite.

    Attributes:
      register: f(name, prompts) -> whether it registered a task or mixture of this name.
      exclude: f(name, tasks) -> name of the mixture without these tasks, "" if it is not the family's.
      names: f() -> all names.
    """

    register: Callable[[str, Any], bool]
    exclude: Callable[[str, Sequence[str]], str]
    names: Callable[[], list[str]]


FAMILIES: list[TaskFamily] = []


def register_by_name(name: str, prompts: Any) -> bool:
    """Registers the task or mixture of this name. See `Prompts.register`."""
    if is_registered_elsewhere(name):
        return False
    if name not in prompts.collections:
        if any(family.register(name, prompts) for family in FAMILIES):
            return True
        if classification := prompts.classification(name):
            classification_task.register_classification_task(name, classification, prompts)
            return True
    if not _pending:
        data_sets_in.cache_clear()  # files may have changed since
        _registered.clear()
        _check_template_folders(prompts)
    elif name in _registered:
        return True
    if name in _pending:
        raise UserError(f'The collection "{name}" contains itself, directly or through a member. Change its members.')
    base, shots = _split_shots(name)
    suffix = name[len(base) :]
    _pending.append(name)
    try:
        mixtures = CollectionMixtures(prompts, shots, suffix, register_by_name)
        registered = mixtures.register(base) or _register_data_set_task(base, prompts, shots, suffix)
    finally:
        _pending.pop()
    _registered.update({name} if registered else ())
    return bool(registered)


_pending: list[str] = []  # the name that is being registered, and the members that it needs
_registered: set[str] = set()


def _check_template_folders(prompts: Any) -> None:
    for folder in prompts.templates:
        if not data_sets_in((folder,)):
            raise NotHere(f"TEMPLATES contains the folder {folder}, which has no <data set>/templates.yaml.")


def _register_data_set_task(name: str, prompts: Any, shots: int | None, suffix: str) -> str | None:
    template_set = next((entry for entry in TEMPLATE_SETS if name.startswith(entry.prefix)), None)
    name = name.removeprefix(template_set.prefix) if template_set else name
    # The longest name first: "squad_v2" is not a template of "squad".
    data_sets = sorted(all_data_sets(prompts).values(), key=lambda data_set: len(data_set.name), reverse=True)
    for data_set in data_sets:
        if name.startswith(task_slug(data_set.source_name)):
            registered = DataSetTasks(data_set, prompts, template_set, shots, suffix).register(name)
            if registered:
                return registered
    return None


def exclude(name: str, tasks: Iterable[str]) -> str:
    """Returns the name of a collection without the data sets of these tasks. See `Prompts.without`."""
    tasks = list(tasks)
    for family in FAMILIES:
        if reduced := family.exclude(name, tasks):
            return reduced
    excluded, (base, _) = task_data_sets(tasks), _split_shots(name)
    base, _ = split_form(base)
    is_collection = excluded and not is_data_set_task(name)
    return f"{base}_without_{'_and_'.join(excluded)}{name[len(base) :]}" if is_collection else ""


def names(prompts: Any) -> list[str]:
    """Returns names of data sets and collections. See `Prompts.names`."""
    family_names = [name for family in FAMILIES for name in family.names()]
    data_sets = map(task_slug, all_data_sets(prompts))
    return [*prompts.collections, *COLLECTION_NAMES, *family_names, *prompts.classification_names(), *data_sets]


def _split_shots(name: str) -> tuple[str, int | None]:
    """Splits a name into the name without the few-shot suffix, and the number of exemplars, None for "many"."""
    match = re.fullmatch(r"(.+?)_(\d+|many)_shot", name)
    if not match:
        return name, 0
    return match[1], None if match[2] == "many" else int(match[2])
