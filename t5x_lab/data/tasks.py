"""Finding a task or mixture by name: t5x_lab's own are made when asked for, with the run's vocabulary; the rest are SeqIO's.

Own tasks may carry the names of tasks in `t5.data.tasks` (`c4_v220_span_corruption`, …), which are tied to a vocabulary and
a data set version that few can read. They live outside SeqIO's registry, so that `t5.data.mixtures` may be imported before
or after, and they take the place of their namesakes wherever a run uses one, also inside a mixture.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping

import seqio

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.data.config import DataConfig
from t5x_lab.data.vocabularies import build_vocabulary

TaskFactory = Callable[[str, seqio.Vocabulary, DataConfig], seqio.Task]
_FACTORIES: dict[str, TaskFactory] = {}


def register(name: str, factory: TaskFactory, placeholder: seqio.Task | None = None) -> None:
    """Makes `name` known; `factory(name, vocabulary, config)` is called when a run asks for it.

    A `placeholder` is put into SeqIO's registry, so that mixtures can be declared over the name; it is never read.
    """
    _FACTORIES[name] = factory
    if placeholder is not None and name not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add_provider(name, placeholder)


def known_names() -> list[str]:
    importlib.import_module("t5x_lab.tasks")
    return sorted({*_FACTORIES, *seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


@dataclasses.dataclass(frozen=True)
class WeightedTasks:
    """A task or mixture, flat: what a run reads.

    Attributes:
      name: as in gin.
      rates: tasks and their mixing rates.
      vocabulary: of the decoder.
    """

    name: str
    rates: Mapping[seqio.Task, float]
    vocabulary: seqio.Vocabulary

    @property
    def tasks(self) -> list[seqio.Task]:
        return list(self.rates)

    @property
    def output_features(self) -> Mapping[str, seqio.Feature]:
        return self.tasks[0].output_features


def get_mixture_or_task(config: DataConfig) -> WeightedTasks:
    """Resolves `config.mixture_or_task_name`.

    Raises:
      UserError: with the nearest name when there is no such task or mixture, or when its rates cannot be computed.
    """
    name = config.mixture_or_task_name
    if name not in known_names():
        raise UserError(
            f'There is no task or mixture "{name}".{nearest(name, known_names())} If it is your own, import its module from '
            "a gin file, for example: import my_tasks"
        )
    own: dict[str, seqio.Task] = {}

    def resolve(task: seqio.Task) -> seqio.Task:
        if task.name not in _FACTORIES:
            return task
        return own.setdefault(task.name, _make(task.name, config))

    if name in _FACTORIES:
        rates = {_make(name, config): 1.0}
    elif name in seqio.TaskRegistry.names():
        rates = {seqio.TaskRegistry.get(name): 1.0}
    else:
        mixture = seqio.MixtureRegistry.get(name)
        try:
            rates = {resolve(task): float(mixture.get_rate(task)) for task in mixture.tasks}
        except (TypeError, ValueError) as error:
            raise UserError(f'The mixing rates of "{name}" cannot be computed: {error}') from error
    features = next(iter(rates)).output_features
    target = features.get("decoder_target_tokens") or features["targets"]
    return WeightedTasks(name, rates, target.vocabulary)


def documents(config: DataConfig, limit: int = -1) -> Iterator[str]:
    """Texts of the training split of one of t5x_lab's tasks or the user's own, before any preprocessing; -1 = all."""
    for task in get_mixture_or_task(config).tasks:
        for example in task.source.get_dataset("train", shuffle=False).take(limit).as_numpy_iterator():
            text = example.get("text", example.get("targets"))
            if text is None:
                raise UserError(f'The examples of task "{task.name}" have no "text"; they have {", ".join(example)}.')
            yield text.decode("utf-8", errors="replace")


def _make(name: str, config: DataConfig) -> seqio.Task:
    return _FACTORIES[name](name, build_vocabulary(config.vocabulary), config)
