"""What was put into SeqIO's registries from here: it may be put there anew, and what others put there may not."""

from collections.abc import Iterable

import seqio

_made: set[str] = set()
_data_sets: dict[str, str] = {}  # of tasks, as names have them


def is_somebodys(name: str) -> bool:
    """Whether a task or mixture of that name is in SeqIO's registries, and not from here."""
    return name not in _made and _is_there(name)


def _is_there(name: str) -> bool:
    return name in seqio.TaskRegistry.names() or name in seqio.MixtureRegistry.names()


def register(made: seqio.Task | seqio.Mixture, data_set: str = "") -> str:
    """Puts it into SeqIO's registry, and notes of what is of one data set which; returns its name."""
    registry = seqio.TaskRegistry if isinstance(made, seqio.Task) else seqio.MixtureRegistry
    registry.remove(made.name)
    registry.add_provider(made.name, made)
    _made.add(made.name)
    if data_set:
        _data_sets[made.name] = data_set
    return made.name


def data_sets_of(tasks: Iterable[str]) -> list[str]:
    """The data sets of those tasks that are from here, as names have them."""
    return sorted({_data_sets[task] for task in tasks if task in _data_sets})


def is_of_data_set(name: str) -> bool:
    return name in _data_sets
