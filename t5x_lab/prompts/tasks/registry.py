"""Prompted tasks and mixtures in SeqIO's registries. Ours are replaced when registered again, those of others never."""

from collections.abc import Iterable

import seqio

_registered: set[str] = set()
_data_sets: dict[str, str] = {}  # slug of the data set, by task name


def is_registered_elsewhere(name: str) -> bool:
    """Returns whether someone else registered a task or mixture of this name."""
    return name not in _registered and (name in seqio.TaskRegistry.names() or name in seqio.MixtureRegistry.names())


def register(entry: seqio.Task | seqio.Mixture, data_set: str = "") -> str:
    """Registers a task or mixture with SeqIO and returns its name. `data_set` is the slug of its only data set."""
    registry = seqio.TaskRegistry if isinstance(entry, seqio.Task) else seqio.MixtureRegistry
    registry.remove(entry.name)
    registry.add_provider(entry.name, entry)
    _registered.add(entry.name)
    if data_set:
        _data_sets[entry.name] = data_set
    return entry.name


def task_data_sets(tasks: Iterable[str]) -> list[str]:
    """Returns the slugs of the tasks' data sets. Tasks of others have none."""
    return sorted({_data_sets[task] for task in tasks if task in _data_sets})


def is_data_set_task(name: str) -> bool:
    """Returns whether the name is a task of one data set."""
    return name in _data_sets
