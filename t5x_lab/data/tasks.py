"""Every name that MIXTURE_OR_TASK_NAME can say, and the SeqIO tasks behind it, made when they are asked for.

Texts with their objectives are t5x_lab's own; all else is SeqIO's. Own tasks are in SeqIO's registry too, so that mixtures
and SeqIO's tools find them there, in a vocabulary of bytes; a run's have its own vocabulary. Those whose names `t5.data.tasks`
uses (`c4_v220_span_corruption`, …) are not, but take the place of their namesakes in a run, also inside a mixture: T5's are
tied to a version of C4 that few can read.
"""

import copy
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterable, Iterator

import seqio

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.data.config import ALL_TEXTS, DataConfig, Vocabulary
from t5x_lab.data.objective import Objective
from t5x_lab.data.objectives import OBJECTIVES, get_objective
from t5x_lab.data.sources import text_files
from t5x_lab.data.texts import VOCABULARY, OpenedWhenRead, documents_of_task, text_task, with_objective
from t5x_lab.data.vocabularies import is_made_of, unread_vocabulary
from t5x_lab.observe.console import say

_TEXTS: dict[str, seqio.DataSource] = {}
_T5S = re.compile(r"c4_v\d+.*|c4_prefix_lm_objective_.*")  # what `t5.data.tasks` registers itself


def register_text(name: str, source: seqio.DataSource) -> None:
    """Makes a text known: a task of its own name for use with OBJECTIVE, and tasks `<name>_<objective>`.

    Args:
      name: of the text.
      source: of {"text": document}.
    """
    _TEXTS[name] = source
    register_in_seqio(text_task(name, source))
    for objective in OBJECTIVES:
        task = f"{name}_{objective}"
        register_in_seqio(with_objective(task, text_task(task, source), OBJECTIVES[objective]))


def register_in_seqio(task: seqio.Task) -> None:
    """Puts a task into SeqIO's registry, in place of one that has been there by its name; T5's names are left to T5."""
    if not _T5S.fullmatch(task.name):
        seqio.TaskRegistry.remove(task.name)
        seqio.TaskRegistry.add_provider(task.name, task)


def remove_text(name: str) -> None:
    """Forgets a text and its tasks."""
    del _TEXTS[name]
    for task in _own_names([name]):
        seqio.TaskRegistry.remove(task)


def known_names(config: DataConfig | None = None) -> list[str]:
    """All names, those of the run's texts among them."""
    importlib.import_module("t5x_lab.tasks")
    own = _own_names([*_texts(config), *([ALL_TEXTS] if config and config.texts else [])])
    of_prompts = config.prompts.names() if config and config.prompts else ()
    return sorted({*own, *seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names(), *of_prompts})


def _texts(config: DataConfig | None) -> dict[str, seqio.DataSource]:
    if config is None:
        return _TEXTS
    of_run = {"files": config.files, **config.texts}
    taken = [name for name in config.texts if name in _TEXTS]
    if taken:
        raise UserError(f'TEXTS has a text called "{taken[0]}", as one that is known already. Call it otherwise.')
    opened = {
        name: OpenedWhenRead(functools.partial(text_files, files, name), files.splits, repr(files))
        for name, files in of_run.items()
    }
    return {**_TEXTS, **opened}


def _own_names(texts: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """(text, objective) by name."""
    with_objectives = {f"{text}_{objective}": (text, objective) for text in texts for objective in OBJECTIVES}
    return {**with_objectives, **{text: (text, None) for text in texts}}


def says_its_objective(name: str, config: DataConfig) -> bool:
    """Whether a name is that of a text with its objective."""
    return _own_names([*_texts(config), ALL_TEXTS]).get(name, (name, None))[1] is not None


@dataclasses.dataclass(frozen=True)
class Member:
    """A task that a name stands for.

    Attributes:
      task: in the run's vocabulary, with OBJECTIVE where that applies.
      mixture: the SeqIO mixture that it is a part of, if any.
      original: what the mixture knows it as.
      rate: of one of TEXTS among the others; None where there are no others, or a mixture says it.
      other_vocabulary: whether its own is another than the run's.
    """

    task: seqio.Task
    mixture: seqio.Mixture | None = None
    original: seqio.Task | None = None
    rate: float | None = None
    other_vocabulary: bool = False


def members(config: DataConfig, need_objective: bool = True) -> list[Member]:
    """The tasks that `config.mixture_or_task_name` stands for. No file is opened.

    Args:
      config: of the run.
      need_objective: whether a plain text is refused where OBJECTIVE is not set.

    Raises:
      UserError: with the nearest name when there is no such task or mixture; when OBJECTIVE and a name do not go together.
    """
    name = config.mixture_or_task_name
    importlib.import_module("t5x_lab.tasks")  # texts may be members of what is declared
    if config.prompts and name not in _own_names([*_texts(config), ALL_TEXTS]):
        config.prompts.declare(name)
    known = known_names(config)
    if name in _own_names([ALL_TEXTS]) and name not in known:
        raise UserError(f'"{name}" are those of TEXTS, which has none: TEXTS = {{"mine": @mine/TextFiles()}}, for example.')
    if name not in known:
        raise UserError(
            f'There is no task or mixture "{name}".{nearest(name, known)} If it is your own, import its module from '
            "a gin file, for example: import my_tasks"
        )
    of_run = InVocabulary(config.vocabulary)
    if name in seqio.MixtureRegistry.names() and name not in _own_names(_texts(config)):
        mixture = seqio.MixtureRegistry.get(name)
        found = [
            dataclasses.replace(_member(task.name, config, of_run, need_objective), mixture=mixture, original=task)
            for task in mixture.tasks
        ]
    elif name in (all_texts := _own_names([ALL_TEXTS])) and config.texts:
        objective = all_texts[name][1]
        found = [
            dataclasses.replace(
                _member(f"{text}_{objective}" if objective else text, config, of_run, need_objective), rate=files.rate
            )
            for text, files in config.texts.items()
        ]
    else:
        found = [_member(name, config, of_run, need_objective)]
    changed = [member.task.name for member in found if member.other_vocabulary]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        say(f"Read with VOCABULARY, {config.vocabulary}, in place of their own: {', '.join(changed[:3])}{more}.")
    return found


def _member(name: str, config: DataConfig, of_run: "InVocabulary", need_objective: bool) -> Member:
    texts = _texts(config)
    text, named = _own_names(texts).get(name, (None, None))
    if named and config.objective and get_objective(named) != get_objective(config.objective):
        raise UserError(
            f'MIXTURE_OR_TASK_NAME "{name}" makes {named} of {text}, but OBJECTIVE is "{config.objective}". Name the text '
            f"alone: --gin.MIXTURE_OR_TASK_NAME={text}"
        )
    changed = False
    if text is None:
        registered = seqio.TaskRegistry.get(name)
        task = of_run(registered)
        own = (feature.vocabulary for feature in registered.output_features.values())
        changed = task is not registered and any(not _is_nobodys(vocabulary) for vocabulary in own)
        # What has inputs of its own, or is the work of an objective already, is no plain text.
        objective = config.objective if set(task.output_features) == {"targets"} else None
    else:
        task = text_task(name, texts[text], of_run.vocabulary)
        objective = named or config.objective
    if objective is None:
        if text and need_objective:
            raise UserError(
                f'"{text}" is plain text. Say what to make of it, for example --gin.OBJECTIVE=span_corruption or '
                f"--gin.MIXTURE_OR_TASK_NAME={text}_span_corruption."
            )
        return Member(task, other_vocabulary=changed)
    made = with_objective(_name_with(config.objective, name), task, get_objective(objective))
    if text:
        register_in_seqio(made)  # the run's own takes the place of the one in bytes
    return Member(made, other_vocabulary=changed)


def _is_nobodys(vocabulary: seqio.Vocabulary) -> bool:
    """Whether it stands in the place of a run's, or is of numbers."""
    return vocabulary is VOCABULARY or isinstance(vocabulary, seqio.PassThroughVocabulary)


def _name_with(objective: str | Objective | None, name: str) -> str:
    """A task's name says what is made of its text, also where OBJECTIVE does."""
    of = objective if isinstance(objective, str) else type(objective).__name__
    return name if objective is None or name.endswith(f"_{of}") else f"{name}_{of}"


class InVocabulary:
    """Tasks with the run's vocabulary in place of their own, where that is another; features without text keep theirs.

    Attributes:
      vocabulary: the run's.
    """

    def __init__(self, config: Vocabulary):
        self._config, self.vocabulary = config, unread_vocabulary(config)
        self._compared: dict[int, bool] = {}  # vocabularies are shared by many tasks, and their files are compared once

    def __call__(self, task: seqio.Task) -> seqio.Task:
        changed = {
            name: dataclasses.replace(feature, vocabulary=self.vocabulary)
            for name, feature in task.output_features.items()
            if not isinstance(feature.vocabulary, seqio.PassThroughVocabulary) and not self._is_same(feature.vocabulary)
        }
        if not changed:
            return task
        other = copy.copy(task)  # SeqIO's `replace` would make a plain Task of a subclass
        other._output_features = {**task.output_features, **changed}
        return other

    def _is_same(self, vocabulary: seqio.Vocabulary) -> bool:
        if id(vocabulary) not in self._compared:
            self._compared[id(vocabulary)] = is_made_of(vocabulary, self._config)
        return self._compared[id(vocabulary)]


def documents(config: DataConfig, limit: int = -1) -> Iterator[str]:
    """Texts of the training split of a text or of the user's own tasks, before any preprocessing; -1 = all."""
    for member in members(config, need_objective=False):
        yield from documents_of_task(member.task, limit)


def name_in_seqio(task: seqio.Task) -> str:
    """A name by which SeqIO's own functions find this very task."""
    registered = seqio.TaskRegistry._REGISTRY.get(task.name)
    if registered is task:
        return task.name
    name = f"{task.name}@run"
    seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add_provider(name, task)
    return name
