"""Mixtures of prompted data sets: built-in collections such as T0's and FLAN's, and the user's."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

import seqio

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.log import log_once
from t5x_lab.prompts.config import Collection, PromptConfig, task_slug
from t5x_lab.prompts.data_sets import find_data_set
from t5x_lab.prompts.tasks.data_set_tasks import DataSetTasks, Form, all_data_sets, split_form
from t5x_lab.prompts.tasks.generation_metrics import METRICS
from t5x_lab.prompts.tasks.registry import register
from t5x_lab.prompts.templates.files import TemplateSet, read_templates

Rates = list[tuple[str, float | Callable]]  # task names and mixing rates


@dataclasses.dataclass(frozen=True)
class BuiltInCollection(Collection):
    """Collection of a paper.

    Attributes:
      template_set: the only templates to use.
      needs_user_templates: whether every data set must have templates in TEMPLATES, because the library's are different ones.
    """

    template_set: TemplateSet | None = None
    needs_user_templates: bool = False


# Built-in collections: regular expression of their names -> f(groups of the match), which may return None.
COLLECTIONS: dict[str, Callable[..., BuiltInCollection | None]] = {}
COLLECTION_NAMES: list[str] = []  # names to suggest for a mistyped one


class CollectionMixtures:
    """Builds and registers the mixtures of collections.

    Args:
      prompts: settings of the run.
      shots: number of exemplars before each question. None = as many as fit.
      suffix: suffix of task names for the number of exemplars.
      register: registers the task or mixture of another name, see `names.register_by_name`.
    """

    def __init__(self, prompts: PromptConfig, shots: int | None, suffix: str, register: Callable[[str, PromptConfig], bool]):
        self._prompts, self._shots, self._suffix, self._register_by_name = prompts, shots, suffix, register

    def register(self, name: str) -> str | None:
        """Registers the mixture of this name, which has no suffix. Returns its full name, None if no collection has the name.

        Raises:
          UserError: see `DataSetTasks.register`. Also for an unknown member.
        """
        base, form = (name, None) if name in self._prompts.collections else split_form(name)
        collection = self._find(base)
        if collection is None and form:
            collection, form = self._find(name), None
        if collection is None or (form and collection.form == "ranked"):
            return None
        if collection.form == "ranked":
            return self._register(name, [(mixture, 1.0) for mixture in self._evaluation_mixtures(collection, name)])
        mixture_name = f"{base}{form.suffix}" if form else name
        return self._register(mixture_name, list(self._tasks(collection, base if form else name, form)))

    def _register(self, name: str, tasks: Rates) -> str:
        if not tasks:
            raise UserError(f'The collection "{name}" has no members left. Exclude fewer data sets.')
        return register(seqio.Mixture(f"{name}{self._suffix}", tasks))

    def _find(self, name: str) -> Collection | None:
        """Returns the collection of this name, also of the form <collection>_without_<data set>_and_<data set>."""
        if name in self._prompts.collections:
            return self._prompts.collections[name]
        for pattern, make in COLLECTIONS.items():
            match = re.fullmatch(pattern, name)
            if match and (built_in := make(*match.groups())):
                return built_in
        base, _, excluded = name.rpartition("_without_")
        collection = self._find(base) if base else None
        return collection and self._exclude(collection, base, excluded)

    def _exclude(self, collection: Collection, base: str, names: str) -> Collection:
        """Removes the data sets "a_and_b" from a collection and from the collections that are its members."""
        slugs = self._slugs(collection)
        excluded = _split_names(names, set(slugs))
        if not excluded:
            raise UserError(f'"{base}_without_{names}": {base} has no data set "{names}".{did_you_mean(names, slugs)}')
        remaining: dict[str, str] = {}  # members that are kept, and their names without some of their own members
        for member in collection.members:
            nested = self._find(member)
            member_slugs = set(self._slugs(nested)) if nested else {task_slug(member)}
            if not member_slugs & excluded:
                remaining[member] = member
            elif member_slugs - excluded:
                remaining[member] = f"{member}_without_{'_and_'.join(sorted(member_slugs & excluded))}"
        rates = {remaining[member]: rate for member, rate in collection.rates.items() if member in remaining}
        return dataclasses.replace(collection, members=tuple(remaining.values()), rates=rates)

    def _slugs(self, collection: Collection) -> list[str]:
        """Returns the slugs of all data sets, those of nested collections included."""
        nested = {member: self._find(member) for member in collection.members}
        return [slug for member, inner in nested.items() for slug in (self._slugs(inner) if inner else [task_slug(member)])]

    def _data_set_tasks(self, member: str, collection: Collection) -> DataSetTasks | None:
        """Returns the tasks of a member that is a data set, None if it is not one.

        Raises:
          NotHere: if the collection needs the user's templates and there are none.
        """
        data_set = find_data_set(member, all_data_sets(self._prompts))
        if data_set is None:
            return None
        template_set = getattr(collection, "template_set", None)
        if getattr(collection, "needs_user_templates", False):
            read_templates(self._prompts.templates, data_set.source_name)
        return DataSetTasks(data_set, self._prompts, template_set, self._shots, self._suffix)

    def _evaluation_mixtures(self, collection: Collection, name: str) -> list[str]:
        """Returns a mixture for each member: its ranking tasks, or its generation tasks if it has no choices to rank."""
        mixtures: list[str] = []
        neither: list[str] = []
        for member in collection.members:
            tasks = self._data_set_tasks(member, collection)
            mixture = (tasks.ranking_mixture() or tasks.generation_mixture()) if tasks else self._register_member(member, name)
            (mixtures if mixture else neither).append(mixture or member)
        if neither:
            reason = f"no template has choices to rank or one of the metrics {', '.join(METRICS)}"
            if not mixtures:
                raise UserError(f'"{name}" has no data set to evaluate: {reason}.')
            log_once(f'{", ".join(neither)} of "{name}" cannot be evaluated: {reason}.')
        return mixtures

    def _tasks(self, collection: Collection, name: str, form: Form | None) -> Iterator[tuple[str, float | Callable]]:
        for member in collection.members:
            is_collection = member in self._prompts.collections or self._find(member)
            data_set = None if is_collection else self._data_set_tasks(member, collection)
            rates = _data_set_rates(data_set, collection, form) if data_set else self._member_rates(member, name, form)
            yield from _scale_rates(rates, collection.rates[member]) if member in collection.rates else rates

    def _member_rates(self, member: str, collection: str, form: Form | None) -> Rates:
        """Returns the tasks of a member that is a collection, a SeqIO mixture or a SeqIO task."""
        name = self._register_member(member, collection, form.suffix if form else "")
        if name in seqio.TaskRegistry.names():
            return [(name, seqio.mixing_rate_num_examples)]
        return [(task.name, functools.partial(_mixture_rate, name)) for task in seqio.MixtureRegistry.get(name).tasks]

    def _register_member(self, member: str, collection: str, form_suffix: str = "") -> str:
        """Registers a member that is not a data set and returns its name.

        Raises:
          UserError: for an unknown name.
        """
        name = f"{member}{form_suffix}{self._suffix}"
        if not self._register_by_name(name, self._prompts):
            name = member
        if name not in seqio.TaskRegistry.names() and name not in seqio.MixtureRegistry.names():
            names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names(), *all_data_sets(self._prompts)]
            raise UserError(
                f'The collection "{collection}" has the member "{member}", which is not a data set, collection, task or '
                f"mixture.{did_you_mean(member, names)}"
            )
        return name


def _split_names(text: str, slugs: set[str]) -> set[str]:
    """Splits "a_and_b" into slugs, which may contain "_and_" themselves. Returns an empty set if a part is not a slug."""
    parts = text.split("_and_")
    for count in range(len(parts), 0, -1):
        first, rest = "_and_".join(parts[:count]), "_and_".join(parts[count:])
        others = _split_names(rest, slugs) if rest else set()
        if first in slugs and (others or not rest):
            return {first, *others}
    return set()


def _data_set_rates(data_set: DataSetTasks, collection: Collection, form: Form | None) -> Rates:
    """Returns the tasks of a data set and their rates: one task per template, or one task of the form."""
    templates = data_set.instruction_templates
    separate = templates if collection.form == "each" and form is None else ()
    tasks = [data_set.template_task(template) for template in separate] or [data_set.sampled_task(form or Form())]

    def rate(num_examples: int) -> float:
        if collection.maximum:
            return min(num_examples, collection.maximum) / len(tasks)
        is_capped = collection.cap is not None and num_examples > collection.cap
        template_rate = (collection.cap or 0) // len(templates) if is_capped else num_examples
        return template_rate * len(templates) / len(tasks)

    num_examples = data_set.records.num_examples
    return [(task, rate(num_examples) if num_examples else functools.partial(_counted_rate, rate)) for task in tasks]


def _mixture_rate(mixture: str, task: seqio.Task) -> float:
    return float(seqio.MixtureRegistry.get(mixture).get_rate(task))


def _counted_rate(rate: Callable[[int], float], task: seqio.Task) -> float:
    num_examples = task.num_input_examples("train") if "train" in task.splits else 0
    if num_examples is None:
        raise UserError(
            f'The number of training records of the data set of "{task.name}" is unknown. Set Records.num_examples.'
        )
    return rate(num_examples)


def _scale_rates(tasks: Rates, rate: float) -> Rates:
    """Scales the rates of a member's tasks so that they sum to `rate`."""
    value = lambda name, own: own(seqio.TaskRegistry.get(name)) if callable(own) else own
    total = functools.cache(lambda: sum(value(*task) for task in tasks))  # lazy: some may have to be counted
    if not any(callable(own) for _, own in tasks):
        return [(name, rate * own / total()) for name, own in tasks]  # type: ignore[operator]
    return [(name, lambda task, own=own: rate * value(task.name, own) / total()) for name, own in tasks]
