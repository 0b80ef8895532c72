"""Mixtures of data sets in words: T0's, FLAN's, and those of the user."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import seqio

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.prompts import flan
from t5x_lab.prompts.catalogue import T0_EVAL, T0_TRAIN, find
from t5x_lab.prompts.config import Collection, Prompts, in_names
from t5x_lab.prompts.forms import Form, TasksOfDataSet, known_data_sets, split_form
from t5x_lab.prompts.registry import register
from t5x_lab.prompts.templates import read_templates

Rates = list[tuple[str, float | Callable]]  # names of tasks, and how often they are drawn


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Data sets whose choices are ranked, with each of their templates; those that have no choices are left out."""

    members: tuple[str, ...]


def _of_t0(which: str) -> Collection | Ranked:
    if which == "train":
        return Collection(tuple(entry.name for entry in T0_TRAIN))
    return Ranked(tuple(entry.name for entry in T0_EVAL))


def _of_flan(members: Sequence[str]) -> Collection | None:
    return Collection(tuple(members), form="drawn", cap=None, maximum=flan.MOST_RATE) if members else None


BUILT_IN: dict[str, Callable] = {
    "t0_(train|eval)": _of_t0,
    "flan": lambda: _of_flan([member for members in flan.CLUSTERS.values() for member in members]),
    r"flan_([1-7])_clusters": lambda number: _of_flan(flan.first_clusters(int(number))),
    r"flan_without_(\w+)": lambda cluster: _of_flan(flan.trained_without(cluster)),
    r"flan_eval_(\w+)": lambda cluster: Ranked(flan.held_out(cluster)) if flan.held_out(cluster) else None,
}


def built_in_names() -> list[str]:
    of_flan = [f"flan_{kind}_{cluster}" for kind in ("without", "eval") for cluster in (*flan.CLUSTERS, *flan.PAPERS_NAMES)]
    return ["t0_train", "t0_eval", "flan", *(f"flan_{n}_clusters" for n in range(1, len(flan.IN_ORDER) + 1)), *of_flan]


class Collections:
    """Makes the mixtures of collections, and puts them into SeqIO's registry.

    Args:
      prompts: of the run.
      shots: exemplars before each question; None = many.
      end: of the names, which says so.
      declare: makes another name's task or mixture, `names.declare`.
    """

    def __init__(self, prompts: Prompts, shots: int | None, end: str, declare: Callable[[str, Prompts], bool]):
        self._prompts, self._shots, self._end, self._declare = prompts, shots, end, declare

    def called(self, name: str) -> str | None:
        """Registers the mixture of this name, without `end`; None where no collection has it.

        Raises:
          UserError: as `TasksOfDataSet`; when a member is nothing that is known.
        """
        base, form = (name, None) if name in self._prompts.collections else split_form(name)
        found = self._members(base)
        if found is None and form:
            found, form = self._members(name), None
        if isinstance(found, Ranked):
            return None if form else self._register(name, [(mixture, 1.0) for mixture in self._ranked(found, name)])
        return self._register(name, list(self._tasks(found, base if form else name, form))) if found else None

    def _register(self, name: str, tasks: Rates) -> str:
        if not tasks:
            raise UserError(f'Nothing is left of the collection "{name}". Leave out less.')
        return register(seqio.Mixture(f"{name}{self._end}", tasks))

    def _members(self, name: str) -> Collection | Ranked | None:
        own = self._prompts.collections.get(name)
        if own:
            return Ranked(own.members) if own.form == "ranked" else own
        for pattern, make in BUILT_IN.items():
            words = re.fullmatch(pattern, name)
            if words and (made := make(*words.groups())):
                return made
        base, _, rest = name.rpartition("_without_")
        found = self._members(base) if base else None
        return found and self._left_out(found, base, rest)

    def _left_out(self, of: Collection | Ranked, base: str, rest: str) -> Collection | Ranked:
        """A collection without the data sets of "a_and_b", which may be its members' members."""
        slugs = self._slugs(of)
        without = _among(rest, {slug: slug for slug in slugs})
        if not without:
            raise UserError(f'"{base}_without_{rest}": {base} has no data set "{rest}".{nearest(rest, slugs)}')
        kept: dict[str, str] = {}  # members that are left, and what they are without some of their own
        for member in of.members:
            inside = self._members(member)
            own = set(self._slugs(inside)) if inside else {in_names(member)}
            if not own & without:
                kept[member] = member
            elif own - without:
                kept[member] = f"{member}_without_{'_and_'.join(sorted(own & without))}"
        if isinstance(of, Ranked):
            return Ranked(tuple(kept.values()))
        rates = {kept[member]: rate for member, rate in of.rates.items() if member in kept}
        return dataclasses.replace(of, members=tuple(kept.values()), rates=rates)

    def _slugs(self, of: Collection | Ranked) -> list[str]:
        """The data sets of a collection and of those that are its members, as names have them."""
        inside = {member: self._members(member) for member in of.members}
        return [slug for m, found in inside.items() for slug in (self._slugs(found) if found else [in_names(m)])]

    def _of(self, member: str, name: str) -> TasksOfDataSet | None:
        """The tasks of a member of the collection, where that is a data set.

        Raises:
          NotHere: for one of T0's that only t5x_lab itself has templates of, which are others.
        """
        data_set, prompts = find(member, known_data_sets(self._prompts)), self._prompts
        whose = self._whose(name)
        if data_set and whose == "t0":
            read_templates(prompts.templates, data_set.whole)
        return TasksOfDataSet(data_set, prompts, whose == "flan", self._shots, self._end) if data_set else None

    def _ranked(self, of: Ranked, name: str) -> list[str]:
        mixtures = []
        for member in of.members:
            data_set = self._of(member, name)
            mixtures += [mixture for mixture in [data_set.ranked() if data_set else self._mixture(member, name)] if mixture]
        if not mixtures:
            raise UserError(f'"{name}" has no data set whose templates have choices to rank; measure its metrics instead.')
        return mixtures

    def _tasks(self, of: Collection, name: str, form: Form | None) -> Iterator[tuple[str, float | Callable]]:
        for member in of.members:
            is_collection = member in self._prompts.collections or self._members(member)
            data_set = None if is_collection else self._of(member, name)
            tasks = _of_data_set(data_set, of, form) if data_set else self._of_mixture(member, name, form)
            yield from _at_rate(tasks, of.rates[member]) if member in of.rates else tasks

    def _of_mixture(self, member: str, of: str, form: Form | None) -> Rates:
        """The tasks of a member that is another collection, or a mixture or task of SeqIO's."""
        name = self._mixture(member, of, form.end if form else "")
        if name in seqio.TaskRegistry.names():
            return [(name, seqio.mixing_rate_num_examples)]
        return [(task.name, functools.partial(_rate_in, name)) for task in seqio.MixtureRegistry.get(name).tasks]

    def _mixture(self, member: str, of: str, end: str = "") -> str:
        """The name of a member that is no data set, once it is in SeqIO's registries.

        Raises:
          UserError: when there is none.
        """
        name = f"{member}{end}{self._end}"
        if not self._declare(name, self._prompts):
            name = member
        if name not in seqio.TaskRegistry.names() and name not in seqio.MixtureRegistry.names():
            known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names(), *known_data_sets(self._prompts)]
            raise UserError(
                f'The collection "{of}" has the member "{member}", which is no data set, collection, task or mixture.'
                f"{nearest(member, known)}"
            )
        return name

    def _whose(self, name: str) -> str:
        """Whose a collection is, also without some of its data sets: "t0"'s has promptsource's templates, "flan"'s our own, and
        the "user"'s both."""
        while name and name not in self._prompts.collections:
            known = next((words for pattern in BUILT_IN if (words := re.fullmatch(pattern, name))), None)
            if known and BUILT_IN[known.re.pattern](*known.groups()):
                return name.partition("_")[0]
            name = name.rpartition("_without_")[0]
        return "user"


def _among(text: str, slugs: dict[str, str]) -> set[str]:
    """Those of "a_and_b", whose names may hold "_and_" themselves; none where a part is no name."""
    parts = text.split("_and_")
    for count in range(len(parts), 0, -1):
        first, rest = slugs.get("_and_".join(parts[:count])), "_and_".join(parts[count:])
        others = _among(rest, slugs) if rest else set()
        if first and (others or not rest):
            return {first, *others}
    return set()


def _of_data_set(data_set: TasksOfDataSet, of: Collection, form: Form | None) -> Rates:
    """Tasks of a data set, and their rates: a task for each template, or one of the form."""
    templates = len(data_set.asking)
    each = data_set.asking if of.form == "each" and form is None else ()
    tasks = [data_set.with_template(template) for template in each] or [data_set.drawn(form or Form())]

    def rate(number: int) -> float:
        if of.maximum:
            return min(number, of.maximum) / len(tasks)
        of_template = number if of.cap is None or number <= of.cap else of.cap // templates
        return of_template * templates / len(tasks)

    known = data_set.records.num_examples
    return [(task, rate(known) if known else functools.partial(_rate_of_counted, rate)) for task in tasks]


def _rate_in(mixture: str, task: seqio.Task) -> float:
    return float(seqio.MixtureRegistry.get(mixture).get_rate(task))


def _rate_of_counted(rate: Callable[[int], float], task: seqio.Task) -> float:
    number = task.num_input_examples("train") if "train" in task.splits else 0
    if number is None:
        raise UserError(
            f'Nobody knows how many training records the data set of "{task.name}" has. Say it with Records.num_examples.'
        )
    return rate(number)


def _at_rate(tasks: Rates, rate: float) -> Rates:
    """The tasks of a member that is to have this rate as a whole, divided as they are."""
    value = lambda name, own: own(seqio.TaskRegistry.get(name)) if callable(own) else own
    total = functools.cache(lambda: sum(value(*task) for task in tasks))  # some may have to be counted, when they are asked for
    if not any(callable(own) for _, own in tasks):
        return [(name, rate * own / total()) for name, own in tasks]  # type: ignore[operator]
    return [(name, lambda task, own=own: rate * value(task.name, own) / total()) for name, own in tasks]
