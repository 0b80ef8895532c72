"""Finding a task or mixture by name: texts and what objectives make of them are t5x_lab's own, the rest is SeqIO's.

A text such as "sotu" is a source of documents. "sotu_span_corruption" is what an objective makes of it, and so is "sotu" with
OBJECTIVE = "span_corruption"; the task is made when a run asks for it, with the run's vocabulary, lengths and architecture.

Own tasks may carry the names of tasks in `t5.data.tasks` (`c4_v220_span_corruption`, …), which are tied to a vocabulary and
a data set version that few can read. They live outside SeqIO's registry, so that `t5.data.mixtures` may be imported before
or after, and they take the place of their namesakes wherever a run uses one, also inside a mixture.
"""

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Iterator

import seqio
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objective import Lengths, Objective, PrefixLm, row_lengths
from t5x_lab.data.objectives import OBJECTIVES, get_objective
from t5x_lab.data.vocabularies import build_vocabulary, sentinels_of
from t5x_lab.observe.console import say

Source = Callable[[DataConfig], seqio.DataSource]
_TEXTS: dict[str, Source] = {}


def register_text(name: str, source: Source | seqio.DataSource) -> None:
    """Makes a text known: tasks `<name>_<objective>` for every objective, and `name` itself for use with OBJECTIVE.

    Args:
      name: of the text.
      source: of {"text": document}; or a function that makes it of the run's `DataConfig` when it is asked for.
    """
    if isinstance(source, seqio.DataSource):
        made = source
        _TEXTS[name] = lambda config: made
    else:
        _TEXTS[name] = source


def declare_in_seqio(name: str) -> None:
    """Puts placeholders of a text's tasks into SeqIO's registry, so that mixtures can be declared over their names."""

    def no_text(split, shuffle_files, seed=None):
        raise NotImplementedError(f"{name} is a placeholder; t5x_lab.data.tasks.get_mixture_or_task gives the task.")

    source = seqio.FunctionDataSource(no_text, splits=("train", "validation"))
    vocabulary = seqio.ByteVocabulary(extra_ids=100)
    for objective in ("", *OBJECTIVES):
        task = f"{name}_{objective}" if objective else name
        if task not in seqio.TaskRegistry.names():
            # A text alone gets the OBJECTIVE, most often one with inputs; SeqIO mixes tasks of equal features only.
            names = OBJECTIVES[objective].features if objective else ("inputs", "targets")
            features = {feature: seqio.Feature(vocabulary) for feature in names}
            seqio.TaskRegistry.add(task, source, preprocessors=[], output_features=features)


def known_names() -> list[str]:
    importlib.import_module("t5x_lab.tasks")
    own = [name for text in _TEXTS for name in (text, *(f"{text}_{objective}" for objective in OBJECTIVES))]
    return sorted({*own, *seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a run.

    Attributes:
      task: the SeqIO task, which gives examples with the features that its architecture needs.
      rate: how often it is drawn from, relative to the others.
      lengths: tokens per feature.
      is_text: whether an objective makes its examples of text, so that it can be limited to `unique_tokens`.
      pairs: whether an example may hold two, see `split_pairs`.
    """

    task: seqio.Task
    rate: float
    lengths: Lengths
    is_text: bool
    pairs: bool = False


@dataclasses.dataclass(frozen=True)
class WeightedTasks:
    """A task or mixture, flat: what a run reads.

    Attributes:
      name: as in gin.
      architecture: of the model that reads it.
      parts: its tasks with their rates.
    """

    name: str
    architecture: str
    parts: tuple[Part, ...]

    @property
    def vocabulary(self) -> seqio.Vocabulary:
        return self.parts[0].task.output_features["targets"].vocabulary

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a row for the encoder (0 without one) and for the decoder."""
        return row_lengths(self.architecture, [part.lengths for part in self.parts])

    @property
    def input_eos(self) -> bool:
        """Whether inputs end with an end token."""
        feature = self.parts[0].task.output_features.get("inputs")
        return feature is not None and feature.add_eos


def get_mixture_or_task(config: DataConfig, architecture: str) -> WeightedTasks:
    """Resolves `config.mixture_or_task_name` for a model.

    Raises:
      UserError: with the nearest name when there is no such task or mixture; when an objective or a task does not go together
        with the architecture or the lengths; when rates cannot be computed.
    """
    parts = []
    for task, objective, rate in _members(config):
        name = _name_with_objective(task.name, config)
        if objective is None:
            parts.append(Part(task, rate, _lengths_of_examples(task, config, architecture), is_text=False))
            continue
        refused = objective.refusal(architecture)
        if refused:
            raise UserError(f'The model is of architecture "{architecture}" and cannot be trained on "{name}". {refused}')
        sentinels = len(sentinels_of(task.output_features["targets"].vocabulary))
        lengths = objective.complete(config.task_feature_lengths, architecture, sentinels)
        _tell_what_stays_empty(name, objective, lengths, sentinels)
        made = _with_objective(name, task, objective, lengths, architecture, sentinels)
        pairs = isinstance(objective, PrefixLm) and architecture == "encoder_decoder"
        parts.append(Part(made, rate, lengths, is_text=True, pairs=pairs))
    _check_vocabularies([part.task for part in parts])
    if config.unique_tokens and not all(part.is_text for part in parts):
        raise UserError(
            f'DataConfig.unique_tokens limits text that an objective is applied to; "{config.mixture_or_task_name}" has tasks '
            "with examples of their own. Remove it."
        )
    return WeightedTasks(config.mixture_or_task_name, architecture, tuple(parts))


def _check_vocabularies(tasks: list[seqio.Task]) -> None:
    """Examples of different vocabularies would share batches."""
    expected = tasks[0].output_features["targets"].vocabulary
    for task in tasks:
        for name, feature in task.output_features.items():
            if feature.vocabulary != expected:
                raise UserError(
                    f'The feature "{name}" of task "{task.name}" has the vocabulary {feature.vocabulary}, the targets of '
                    f'"{tasks[0].name}" have {expected}; one model reads both. Give all tasks the '
                    "same, t5x_lab's own texts with VOCABULARY."
                )


def documents(config: DataConfig, limit: int = -1) -> Iterator[str]:
    """Texts of the training split of a text or of the user's own tasks, before any preprocessing; -1 = all."""
    for task, _, _ in _members(config, need_objective=False):
        for example in task.source.get_dataset("train", shuffle=False).take(limit).as_numpy_iterator():
            text = example.get("text", example.get("targets"))
            if text is None:
                raise UserError(f'The examples of task "{task.name}" have no "text"; they have {", ".join(example)}.')
            yield text.decode("utf-8", errors="replace")


def _members(config: DataConfig, need_objective: bool = True) -> list[tuple[seqio.Task, Objective | None, float]]:
    """(task, objective to apply to its text or None, rate) of everything that a name stands for."""
    name = config.mixture_or_task_name
    if name not in known_names():
        raise UserError(
            f'There is no task or mixture "{name}".{nearest(name, known_names())} If it is your own, import its module from '
            "a gin file, for example: import my_tasks"
        )
    if name in seqio.MixtureRegistry.names() and not _text_and_objective(name):
        mixture = seqio.MixtureRegistry.get(name)
        names = [task.name for task in mixture.tasks]
        for known in (config.mixing and config.mixing.num_examples) or {}:
            if known not in names:
                raise UserError(
                    f'Mixing.num_examples names "{known}".{nearest(known, names)} The tasks of "{name}" are {", ".join(names)}.'
                )
        members = [_member(task.name, config, need_objective) for task in mixture.tasks]
        return [(task, objective, _rate(task, mixture, config)) for task, objective in members]
    return [(*_member(name, config, need_objective), 1.0)]


def _member(name: str, config: DataConfig, need_objective: bool) -> tuple[seqio.Task, Objective | None]:
    own = _text_and_objective(name)
    if own is None:
        task = seqio.TaskRegistry.get(name)
        if config.objective is None or set(task.output_features) != {"targets"}:
            return task, None
        return task, get_objective(config.objective)
    text, named = own
    objective = config.objective or named
    if named and config.objective and get_objective(named) != get_objective(config.objective):
        raise UserError(
            f'MIXTURE_OR_TASK_NAME "{name}" makes {named} of {text}, but OBJECTIVE is "{config.objective}". Name the text '
            f"alone: --gin.MIXTURE_OR_TASK_NAME={text}"
        )
    if objective is None and need_objective:
        raise UserError(
            f'"{text}" is plain text. Say what to make of it, for example --gin.OBJECTIVE=span_corruption or '
            f"--gin.MIXTURE_OR_TASK_NAME={text}_span_corruption."
        )
    source = _TEXTS[text](config)
    return _text_task(name, source, build_vocabulary(config.vocabulary)), get_objective(objective) if objective else None


def _text_and_objective(name: str) -> tuple[str, str | None] | None:
    """ "sotu_full_lm" is ("sotu", "full_lm"), "sotu" ("sotu", None); None where the name is not t5x_lab's own."""
    for text in sorted(_TEXTS, key=len, reverse=True):
        if name == text:
            return text, None
        objective = name.removeprefix(f"{text}_")
        if objective != name and objective in OBJECTIVES:
            return text, objective
    return None


def _name_with_objective(name: str, config: DataConfig) -> str:
    """A task's name says what is made of its text, also where OBJECTIVE does."""
    objective = config.objective if isinstance(config.objective, str) else type(config.objective).__name__
    return name if config.objective is None or name.endswith(f"_{objective}") else f"{name}_{objective}"


def _text_task(name: str, source: seqio.DataSource, vocabulary: seqio.Vocabulary) -> seqio.Task:
    """A document's tokens as `targets`, without an end token."""
    return seqio.Task(
        name,
        source,
        output_features={"targets": seqio.Feature(vocabulary, add_eos=False)},
        preprocessors=[
            functools.partial(t5.rekey, key_map={"targets": "text"}),
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
        ],
    )


def _with_objective(
    name: str, text: seqio.Task, objective: Objective, lengths: Lengths, architecture: str, sentinels: int
) -> seqio.Task:
    """The task that makes an objective's examples of a text's tokens."""
    vocabulary = text.output_features["targets"].vocabulary
    features = {name: seqio.Feature(vocabulary, add_eos=name in objective.features_with_eos) for name in objective.features}
    before = [step for step in text.preprocessors if not isinstance(step, seqio.CacheDatasetPlaceholder)]
    after = objective.preprocessors(lengths, architecture, sentinels)
    steps = [*before, seqio.CacheDatasetPlaceholder(), *after]
    return seqio.Task(name, text.source, output_features=features, preprocessors=steps)


def _tell_what_stays_empty(name: str, objective: Objective, lengths: Lengths, sentinels: int) -> None:
    used = objective.share_of_inputs(lengths, sentinels)
    if used < 0.85:
        say(
            f"{name}: the vocabulary's {sentinels} sentinels allow examples that fill {used:.0%} of inputs of "
            f"{lengths['inputs']} tokens. More extra_ids or shorter TASK_FEATURE_LENGTHS leave less padding."
        )


def _rate(task: seqio.Task, mixture: seqio.Mixture, config: DataConfig) -> float:
    mixing = config.mixing
    try:
        if mixing is None:
            return float(mixture.get_rate(task))
        if mixing.equal:
            return mixing.rate(1)
        known = (mixing.num_examples or {}).get(task.name)
        number = task.num_input_examples("train") if known is None else known
        if number is None:
            raise UserError(
                f'Nobody knows how many training examples the task "{task.name}" has. Say it: '
                + flag("Mixing.num_examples", f'{{"{task.name}": NUMBER}}')
            )
        return mixing.rate(number)
    except (TypeError, ValueError) as error:
        raise UserError(f'The mixing rates of "{mixture.name}" cannot be computed: {error}') from error


def _lengths_of_examples(task: seqio.Task, config: DataConfig, architecture: str) -> Lengths:
    """The lengths that a task with examples of its own needs."""
    features = set(task.output_features)
    if architecture == "encoder" and "loss_weights" not in features:
        raise UserError(
            f'The task "{task.name}" has inputs and targets of their own, but an encoder alone predicts tokens in place: it '
            "needs inputs, targets and loss_weights of one length. Use the objective masked_lm on a text."
        )
    if architecture == "encoder_decoder" and "inputs" not in features:
        raise UserError(
            f'The task "{task.name}" has no inputs, so an encoder would have nothing to read. Use a decoder model, or say with '
            "OBJECTIVE what to make of its text."
        )
    if "targets" not in features:
        raise UserError(
            f'The task "{task.name}" has the features {", ".join(sorted(features))}; give it inputs and targets, which are '
            "made into a model's features here."
        )
    needed = [name for name in ("inputs", "targets") if name in features]
    missing = [name for name in needed if name not in config.task_feature_lengths]
    if missing:
        raise UserError(
            f'The task "{task.name}" needs a length for "{missing[0]}"; TASK_FEATURE_LENGTHS gives only '
            f"{', '.join(config.task_feature_lengths)}. Set for example "
            + flag("TASK_FEATURE_LENGTHS", json.dumps(dict.fromkeys(needed, 512)))
        )
    return {name: config.task_feature_lengths[name] for name in needed}
