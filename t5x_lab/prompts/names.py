"""What names stand for: tasks and mixtures of data sets in words, made when they are asked for.

Of a data set such as "super_glue/rte":
  super_glue_rte_<template>              with this template, as T0 calls it
  super_glue_rte                         with one drawn for each example and epoch
  super_glue_rte_4templates              with one drawn of the first four
  super_glue_rte_plain, …_named          without an instruction; with the data set's name in place of one
  super_glue_rte_<template>_score_eval   all choices, to rank
  super_glue_rte_score_eval              the same, with all templates that ask for the data set's own task
  flan_super_glue_rte, …                 with t5x_lab's own templates
  t5_super_glue_rte, …                   in T5's words, see `t5_suite`
  classify_super_glue_rte, …             for a classification head, see `classified`

Of collections: t0_train, t0_eval, flan, flan_without_<cluster>, flan_3_clusters, flan_eval_<cluster> and those of COLLECTIONS,
with "_without_<data set>_and_<data set>", "_4templates", "_plain" or "_named" behind them.

"_5_shot" or "_many_shot" at the end of any of these puts exemplars before each question.
"""

import re
from collections.abc import Iterable

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.prompts import classified, t5_suite
from t5x_lab.prompts.collections import Collections, built_in_names
from t5x_lab.prompts.config import Prompts, in_names
from t5x_lab.prompts.forms import OWN, TasksOfDataSet, known_data_sets, split_form
from t5x_lab.prompts.registry import data_sets_of, is_of_data_set, is_somebodys
from t5x_lab.prompts.templates import data_sets_in


def declare(name: str, prompts: Prompts) -> bool:
    """See `Prompts.declare`."""
    if is_somebodys(name):
        return False
    if name not in prompts.collections and (t5_suite.declare(name, prompts) or classified.declare(name, prompts)):
        return True
    if not _in_the_making:
        data_sets_in.cache_clear()  # files may have changed since
        _made.clear()
        _check_folders(prompts)
    elif name in _made:
        return True
    if name in _in_the_making:
        raise UserError(f'The collection "{name}" is a member of itself, or of one of its members. Name others.')
    base, shots = _split_shots(name)
    end = name[len(base) :]
    _in_the_making.append(name)
    try:
        found = Collections(prompts, shots, end, declare).called(base) or _of_data_set(base, prompts, shots, end)
    finally:
        _in_the_making.pop()
    _made.update({name} if found else ())
    return bool(found)


_in_the_making: list[str] = []  # of the name that was asked for, and those that it needs
_made: set[str] = set()


def _check_folders(prompts: Prompts) -> None:
    for folder in prompts.templates:
        if not data_sets_in((folder,)):
            raise NotHere(f"TEMPLATES names the folder {folder}, in which there is no <data set>/templates.yaml.")


def _of_data_set(name: str, prompts: Prompts, shots: int | None, end: str) -> str | None:
    own, known = name.startswith(OWN), known_data_sets(prompts)
    name = name.removeprefix(OWN)
    # The longest name first: "squad_v2" is no template of "squad".
    for data_set in sorted(known.values(), key=lambda entry: len(entry.name), reverse=True):
        if name.startswith(in_names(data_set.whole)):
            found = TasksOfDataSet(data_set, prompts, own, shots, end).called(name)
            if found:
                return found
    return None


def without(name: str, tasks: Iterable[str]) -> str:
    """See `Prompts.without`."""
    if of_suite := t5_suite.without(name, list(tasks)):
        return of_suite
    left_out, (base, _) = data_sets_of(tasks), _split_shots(name)
    base, _ = split_form(base)
    return f"{base}_without_{'_and_'.join(left_out)}{name[len(base) :]}" if left_out and not is_of_data_set(name) else ""


def names(prompts: Prompts) -> list[str]:
    """See `Prompts.names`."""
    data_sets = map(in_names, known_data_sets(prompts))
    return [*prompts.collections, *built_in_names(), *t5_suite.names(), *prompts.classified_names(), *data_sets]


def _split_shots(name: str) -> tuple[str, int | None]:
    """A name without the end that says exemplars, and their number; None for many."""
    found = re.fullmatch(r"(.+?)_(\d+|many)_shot", name)
    if not found:
        return name, 0
    return found[1], None if found[2] == "many" else int(found[2])
