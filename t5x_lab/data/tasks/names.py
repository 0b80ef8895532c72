"""Resolves MIXTURE_OR_TASK_NAME to SeqIO tasks, which are created when a name is used.

Texts and their objectives are the library's own tasks. All other names are SeqIO's. Own tasks are also in SeqIO's registry,
with a byte vocabulary, so that mixtures and SeqIO's tools find them. In a run they have the run's vocabulary. Names that
`t5.data.tasks` registers itself (`c4_v220_span_corruption`, …) are not registered, but replace T5's tasks in a run, also inside
mixtures: T5's tasks need a version of C4 that few can read.
"""

import copy
import dataclasses
import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator

import seqio

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.log import log, log_once
from t5x_lab.data.config import ALL_TEXTS, DataConfig
from t5x_lab.data.objectives.named import OBJECTIVES, get_objective
from t5x_lab.data.objectives.objective import Objective
from t5x_lab.data.sources.storage import read_source_copies
from t5x_lab.data.sources.text_files import text_files
from t5x_lab.data.tasks.text_tasks import BYTE_VOCABULARY, LazySource, objective_task, task_documents, text_task
from t5x_lab.data.vocabularies.build import is_same_vocabulary, lazy_vocabulary, vocabulary_flags
from t5x_lab.data.vocabularies.config import Vocabulary

# Registers the tasks and names of the library when it is imported. It builds on this package, as a user's module of tasks does.
LIBRARY_TASKS = "t5x_lab.tasks"
_TEXTS: dict[str, seqio.DataSource] = {}
_NAMES_OF_T5 = re.compile(r"c4_v\d+.*|c4_prefix_lm_objective_.*")  # `t5.data.tasks` registers these itself


def register_text(name: str, source: seqio.DataSource) -> None:
    """Registers a text: a task of its name for use with OBJECTIVE, and a task `<name>_<objective>` for each objective.

    Args:
      name: name of the text.
      source: source of {"text": document}.
    """
    _TEXTS[name] = source
    _register_text_tasks(name, source)


def _register_text_tasks(name: str, source: seqio.DataSource) -> None:
    register_in_seqio(text_task(name, source))
    for objective in OBJECTIVES:
        task = f"{name}_{objective}"
        register_in_seqio(objective_task(task, text_task(task, source), OBJECTIVES[objective]))


def register_in_seqio(task: seqio.Task) -> None:
    """Adds a task to SeqIO's registry and replaces one of the same name. T5's names are left to the `t5` library."""
    if not _NAMES_OF_T5.fullmatch(task.name):
        seqio.TaskRegistry.remove(task.name)
        seqio.TaskRegistry.add_provider(task.name, task)


def remove_text(name: str) -> None:
    """Removes a text and its tasks."""
    del _TEXTS[name]
    for task in _text_task_names([name]):
        seqio.TaskRegistry.remove(task)


def known_names(config: DataConfig | None = None) -> list[str]:
    """Returns all names, those of the run's texts included."""
    text_names = _text_task_names([*_text_sources(config), *([ALL_TEXTS] if config and config.texts else [])])
    prompt_names = config.prompts.names() if config and config.prompts else ()
    return sorted({*text_names, *seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names(), *prompt_names})


def _text_sources(config: DataConfig | None) -> dict[str, seqio.DataSource]:
    if config is None:
        return _TEXTS
    duplicate = next((name for name in config.texts if name in _TEXTS), None)
    if duplicate:
        raise UserError(f'TEXTS has a text called "{duplicate}", the name of a registered text. Rename it.')
    run_texts = {"files": config.files, **config.texts}
    sources = {
        name: LazySource(functools.partial(text_files, files, name), files.splits, repr(files))
        for name, files in run_texts.items()
    }
    return {**_TEXTS, **sources}


def _text_task_names(texts: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Returns (text, objective or None) by task name."""
    with_objective = {f"{text}_{objective}": (text, objective) for text in texts for objective in OBJECTIVES}
    return {**with_objective, **{text: (text, None) for text in texts}}


def names_an_objective(name: str, config: DataConfig) -> bool:
    """Returns whether a name is that of a text with an objective."""
    return _text_task_names([*_text_sources(config), ALL_TEXTS]).get(name, (name, None))[1] is not None


def text_name(name: str, config: DataConfig) -> str:
    """Returns the name without an objective: that of the text; any other name unchanged."""
    return _text_task_names([*_text_sources(config), ALL_TEXTS]).get(name, (name, None))[0]


@dataclasses.dataclass(frozen=True)
class Member:
    """A task that a name stands for.

    Attributes:
      task: task with the run's vocabulary, and with OBJECTIVE applied if it is plain text.
      mixture: SeqIO mixture that it is a part of, or None.
      registered_task: task as the mixture has it.
      rate: mixing rate of one of TEXTS. None if there are no others, or a mixture defines it.
      own_vocabulary: flags that set the task's own vocabulary, if the run's replaced it. None = it did not.
    """

    task: seqio.Task
    mixture: seqio.Mixture | None = None
    registered_task: seqio.Task | None = None
    rate: float | None = None
    own_vocabulary: str | None = None


def find_members(config: DataConfig, need_objective: bool = True) -> list[Member]:
    """Returns the tasks that `config.mixture_or_task_name` stands for. No file is opened.

    Args:
      config: data configuration of the run.
      need_objective: whether plain text without OBJECTIVE is an error.

    Raises:
      UserError: for an unknown name, with the nearest one, or an OBJECTIVE that contradicts the name.
    """
    importlib.import_module(LIBRARY_TASKS)
    name = config.mixture_or_task_name
    sources = _text_sources(config)
    text_names, joint_names = _text_task_names(sources), _text_task_names([ALL_TEXTS])
    if config.prompts and name not in text_names and name not in joint_names:
        for text in config.texts:  # collections may have them as members
            _register_text_tasks(text, sources[text])
        config.prompts.register(name)
    names = known_names(config)
    if name in joint_names and name not in names:
        raise UserError(
            f'"{name}" stands for all of TEXTS, which is empty. Set it, for example TEXTS = {{"mine": @mine/TextFiles()}}.'
        )
    if name not in names:
        raise UserError(
            f'There is no task or mixture "{name}".{did_you_mean(name, names)} If it is your own, import its module in a gin '
            "file, for example: import my_tasks"
        )
    replace_vocabulary = VocabularyReplacer(config)

    def make_member(name: str) -> Member:
        member = _make_member(name, config, replace_vocabulary, need_objective)
        return dataclasses.replace(member, task=read_source_copies(member.task))

    if name in seqio.MixtureRegistry.names() and name not in text_names:
        mixture = seqio.MixtureRegistry.get(name)
        members = [dataclasses.replace(make_member(task.name), mixture=mixture, registered_task=task) for task in mixture.tasks]
    elif name in joint_names and config.texts:
        objective = joint_names[name][1]
        members = [
            dataclasses.replace(make_member(f"{text}_{objective}" if objective else text), rate=files.rate)
            for text, files in config.texts.items()
        ]
    else:
        members = [make_member(name)]
    replaced = {member.task.name: member.own_vocabulary for member in members if member.own_vocabulary is not None}
    if replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        first, flags = next(iter(replaced.items()))
        advice = f" {first} has its own with {flags}" if flags else ""
        log_once(f"VOCABULARY, {config.vocabulary}, replaces the vocabulary of {', '.join([*replaced][:3])}{more}.{advice}")
    return members


def _make_member(name: str, config: DataConfig, replace_vocabulary: "VocabularyReplacer", need_objective: bool) -> Member:
    sources = _text_sources(config)
    text, named_objective = _text_task_names(sources).get(name, (None, None))
    if named_objective and config.objective and get_objective(named_objective) != get_objective(config.objective):
        raise UserError(
            f'MIXTURE_OR_TASK_NAME "{name}" has the objective {named_objective}, but OBJECTIVE is "{config.objective}". Use '
            f"the name of the text alone: --gin.MIXTURE_OR_TASK_NAME={text}"
        )
    own_flags = None
    if text is None:
        registered = seqio.TaskRegistry.get(name)
        task = replace_vocabulary(registered)
        own = {name: f.vocabulary for name, f in registered.output_features.items() if not _is_placeholder(f.vocabulary)}
        own_flags = vocabulary_flags(own) if own and task is not registered else None
        # A task with inputs, or with an objective already, is not plain text.
        objective = config.objective if set(task.output_features) == {"targets"} else None
    else:
        task = text_task(name, sources[text], replace_vocabulary.vocabulary)
        objective = named_objective or config.objective
    if objective is None:
        if text and need_objective:
            raise UserError(
                f'"{text}" is plain text. Set an objective, for example --gin.OBJECTIVE=span_corruption or '
                f"--gin.MIXTURE_OR_TASK_NAME={text}_span_corruption."
            )
        return Member(task, own_vocabulary=own_flags)
    if config.input_vocabulary:
        raise UserError(f'INPUT_VOCABULARY is set, but "{name}" makes inputs and targets of one text. Remove it.')
    task = objective_task(_add_objective_name(name, config.objective), task, get_objective(objective))
    if text:
        register_in_seqio(task)  # replaces the task with the byte vocabulary
    return Member(task, own_vocabulary=own_flags)


def _is_placeholder(vocabulary: seqio.Vocabulary) -> bool:
    """Returns whether a vocabulary is the placeholder for a run's, or that of numbers."""
    return vocabulary is BYTE_VOCABULARY or isinstance(vocabulary, seqio.PassThroughVocabulary)


def _add_objective_name(name: str, objective: str | Objective | None) -> str:
    """Appends the objective's name to a task name, unless it ends with it."""
    suffix = objective if isinstance(objective, str) else type(objective).__name__
    return name if objective is None or name.endswith(f"_{suffix}") else f"{name}_{suffix}"


class VocabularyReplacer:
    """Replaces the vocabularies of tasks by the run's if they differ. Features without text keep theirs.

    Attributes:
      vocabulary: the run's vocabulary of targets and plain text.
    """

    def __init__(self, config: DataConfig):
        self._config, self._open = config, functools.cache(lazy_vocabulary)  # all tasks share a vocabulary
        self.vocabulary = self._open(config.vocabulary)
        self._is_same: dict[tuple[int, Vocabulary], bool] = {}  # many tasks share a vocabulary, whose files are compared once

    def __call__(self, task: seqio.Task) -> seqio.Task:
        changed = {
            name: dataclasses.replace(feature, vocabulary=self._open(self._config.vocabulary_of(name)))
            for name, feature in task.output_features.items()
            if not isinstance(feature.vocabulary, seqio.PassThroughVocabulary) and not self._compare(name, feature.vocabulary)
        }
        if not changed:
            return task
        other = copy.copy(task)  # SeqIO's `replace` would make a plain Task of a subclass
        other._output_features = {**task.output_features, **changed}
        return other

    def _compare(self, feature: str, vocabulary: seqio.Vocabulary) -> bool:
        config = self._config.vocabulary_of(feature)
        if (id(vocabulary), config) not in self._is_same:
            self._is_same[id(vocabulary), config] = is_same_vocabulary(vocabulary, config)
        return self._is_same[id(vocabulary), config]


def documents(config: DataConfig) -> Iterator[str]:
    """Yields all texts of the training split of a text or of the user's tasks, before any preprocessing."""
    for member in find_members(config, need_objective=False):
        yield from task_documents(member.task)


def sample_documents(config: DataConfig, number: int, seed: int = 0) -> Iterator[str]:
    """Yields a sample of the training texts of a task or mixture, before any preprocessing. No more is read than needed.

    Tasks of a mixture have texts in proportion to their rates. Files are read in a random order, several at a time.

    Args:
      config: data configuration, with the name of the task or mixture.
      number: maximum number of texts.
      seed: seed of the order of files.

    Raises:
      UserError: if the mixture has no rates above 0.
    """
    members = find_members(config, need_objective=False)
    rates = [1.0 if member.mixture is None else float(member.mixture.get_rate(member.registered_task)) for member in members]
    if not sum(rates) > 0.0:
        raise UserError(f'The rates of "{config.mixture_or_task_name}" are {rates}. At least one must be above 0.')
    ends = [round(number * part / sum(rates)) for part in itertools.accumulate(rates, initial=0.0)]
    for member, (start, end) in zip(members, itertools.pairwise(ends), strict=True):
        count = 0
        for text in task_documents(member.task, end - start, shuffle_seed=seed):
            count += 1
            yield text
        if len(members) > 1:
            log(
                f"{count:,} texts of {member.task.name}"
                + (f", which has no more than {count:,}." if count < end - start else ".")
            )


def registered_name(task: seqio.Task) -> str:
    """Returns a name by which SeqIO's functions find this very task."""
    if seqio.TaskRegistry._REGISTRY.get(task.name) is task:
        return task.name
    name = f"{task.name}@run"
    seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add_provider(name, task)
    return name
