"""What a run reads: its tasks, the lengths of their features, and the rates at which they are drawn."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.config.gin_files import flag
from t5x_lab.data.caches import CacheOfTask, Caches, known_to_seqio, with_cache
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objective import SIDES, Lengths, Objective
from t5x_lab.data.sentinels import number_of_sentinels
from t5x_lab.data.tasks import Member, members
from t5x_lab.data.texts import ObjectiveTask
from t5x_lab.data.vocabularies import unread_vocabulary
from t5x_lab.observe.console import say


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a run.

    Attributes:
      task: the SeqIO task.
      lengths: tokens of each feature that is read.
      weigh: computes how often it is drawn from, relative to the others; it may count examples.
      is_drawn: whether it is drawn from at all, as far as is known before anything is counted.
      sequence_length: what SeqIO's steps are given: `lengths`, and for a task with examples of its own all of
        TASK_FEATURE_LENGTHS, less what stands before inputs.
      before_inputs: ids before the inputs of a task with examples of its own, `SpecialTokens.input_start`; they take of the
        inputs' length.
    """

    task: seqio.Task
    lengths: Lengths
    weigh: Callable[[], float]
    is_drawn: bool
    sequence_length: Lengths
    before_inputs: tuple[int, ...] = ()

    @functools.cached_property
    def rate(self) -> float:
        return self.weigh()

    @property
    def is_text(self) -> bool:
        """Whether an objective makes its examples of text: they are no longer than they may be."""
        return isinstance(self.task, ObjectiveTask)


@dataclasses.dataclass(frozen=True)
class WeightedTasks:
    """A task or mixture, flat: what a run reads.

    Attributes:
      name: as in gin.
      architecture: of the model that reads it.
      vocabulary: the run's.
      parts: its tasks.
      split: to train on.
      sample_fn: the mixture's own way to mix them, SeqIO's by default: f(datasets, rates, seed) -> dataset.
    """

    name: str
    architecture: str
    vocabulary: seqio.Vocabulary
    parts: tuple[Part, ...]
    split: str = "train"
    sample_fn: Callable = tf.data.Dataset.sample_from_datasets

    @functools.cached_property
    def trained(self) -> tuple[Part, ...]:
        """The tasks to train on: those that have training examples, and a rate that is not set to 0.

        Raises:
          UserError: when there is none.
        """
        with_split = [part for part in self.parts if self.split in part.task.splits]
        found = tuple(part for part in with_split if part.is_drawn)
        if not found:
            splits = sorted({split for part in self.parts for split in part.task.splits})
            has = f"it has {', '.join(splits)}" if not with_split else "the rates of all its tasks are 0"
            kind = "task" if len(self.parts) == 1 else "mixture"
            raise UserError(
                f'The {kind} "{self.name}" has no split "{self.split}" to train on; {has}. Name another task, or '
                "DataConfig.split."
            )
        if len(found) < len(self.parts):
            names = [part.task.name for part in self.parts if part not in found]
            say(f"Of {self.name} are not trained on, for want of training examples or of a rate above 0: {', '.join(names)}.")
        return found

    def rates(self) -> list[float]:
        """How often each of the tasks to train on is drawn from, relative to the others.

        Raises:
          UserError: when they cannot be computed, or are all 0.
        """
        found = [part.rate for part in self.trained]
        if not any(found):
            raise UserError(f'All tasks of the mixture "{self.name}" have the rate 0, or no training examples.')
        return found

    @property
    def lengths(self) -> Lengths:
        """Tokens of each feature, for the longest of the tasks."""
        names = sorted({name for part in self.parts for name in part.lengths})
        return {name: max(part.lengths.get(name, 0) for part in self.parts) for name in names}

    @property
    def input_eos(self) -> bool:
        """Whether inputs end with an end token."""
        feature = self.parts[0].task.output_features.get("inputs")
        return feature is not None and feature.add_eos


def resolve(config: DataConfig, architecture: str) -> WeightedTasks:
    """What `config.mixture_or_task_name` is for a model. Neither data nor the vocabulary's file are opened.

    Raises:
      UserError: with the nearest name when there is no such task or mixture; when an objective or a task does not go together
        with the architecture or the lengths.
    """
    found, parts = members(config), list[Part]()
    found = [dataclasses.replace(member, task=with_cache(member.task, config)) for member in found]
    drawn = [(m.original, m.task.source) for m in found if m.original and _is_drawn(m, config)]
    caches = [(task, source) for task, source in drawn if isinstance(source, CacheOfTask)]
    sentinels = number_of_sentinels(config.vocabulary) if any(isinstance(m.task, ObjectiveTask) for m in found) else 0
    for member in found:
        task = member.task
        if isinstance(task, ObjectiveTask):
            lengths = given = _lengths_of_objective(task, config, architecture, sentinels)
        else:
            lengths, given = _lengths_of_examples(task, config, architecture), config.task_feature_lengths
        before = () if isinstance(task, ObjectiveTask) or "inputs" not in lengths else config.special_tokens.input_start
        rate = functools.partial(_rate, member, config, caches)
        left = {"inputs": _left_for_inputs(task, lengths["inputs"], before)} if before else {}
        parts.append(Part(task, lengths, rate, _is_drawn(member, config), {**given, **lengths, **left}, before))
    _check_numbers(found, config)
    _check_mixed(parts)
    if config.unique_tokens and not all(part.is_text for part in parts):
        raise UserError(
            f'DataConfig.unique_tokens limits text that an objective is applied to; "{config.mixture_or_task_name}" has tasks '
            "with examples of their own. Remove it."
        )
    mixture, vocabulary = found[0].mixture, unread_vocabulary(config.vocabulary)
    own = {} if mixture is None else {"sample_fn": mixture._sample_fn}
    return WeightedTasks(config.mixture_or_task_name, architecture, vocabulary, tuple(parts), config.split, **own)


def _left_for_inputs(task: seqio.Task, length: int, before: tuple[int, ...]) -> int:
    if len(before) >= length:
        raise UserError(
            f'{len(before)} ids stand before the inputs of "{task.name}" (SpecialTokens.input_start), and TASK_FEATURE_LENGTHS '
            f"gives these {length} tokens in all. Give them more."
        )
    return length - len(before)


def _lengths_of_objective(task: ObjectiveTask, config: DataConfig, architecture: str, sentinels: int) -> Lengths:
    refused = task.objective.refusal(architecture)
    if refused:
        raise UserError(f'The model is of architecture "{architecture}" and cannot be trained on "{task.name}". {refused}')
    lengths = task.objective.complete(config.task_feature_lengths, architecture, sentinels)
    _tell_what_stays_empty(task.name, task.objective, lengths, sentinels)
    return lengths


def _tell_what_stays_empty(name: str, objective: Objective, lengths: Lengths, sentinels: int) -> None:
    used = objective.share_of_inputs(lengths, sentinels)
    if used < 0.85:
        say(
            f"{name}: the vocabulary's {sentinels} sentinels allow examples that fill {used:.0%} of inputs of "
            f"{lengths['inputs']} tokens. More extra_ids or shorter TASK_FEATURE_LENGTHS leave less padding."
        )


def _check_numbers(found: Sequence[Member], config: DataConfig) -> None:
    names = [member.original.name for member in found if member.original]
    for known in (config.mixing and config.mixing.num_examples) or {}:
        if names and known not in names:
            raise UserError(
                f'Mixing.num_examples names "{known}".{nearest(known, names)} The tasks of "{config.mixture_or_task_name}" are '
                f"{', '.join(names)}."
            )


def _is_drawn(member: Member, config: DataConfig) -> bool:
    """Whether the rate may be above 0; nothing is counted for that."""
    mixture, task = member.mixture, member.original
    if mixture is None or task is None or config.mixing is not None:
        return True
    return _is_computed(mixture) or float(mixture.get_rate(task)) > 0


def _is_computed(mixture: seqio.Mixture) -> bool:
    return any(map(callable, mixture.rate_per_task_name.values())) or any(map(_is_computed, mixture._sub_mixtures))


def _rate(member: Member, config: DataConfig, caches: Caches) -> float:
    mixing, mixture, task = config.mixing, member.mixture, member.original or member.task
    if mixture is None and member.rate is None:
        return 1.0
    try:
        if mixing is None:
            if mixture is None:
                return member.rate or 1.0
            with known_to_seqio(caches if _is_computed(mixture) else ()):
                return float(mixture.get_rate(task))
        if mixing.equal:
            return mixing.rate(1)
        known = (mixing.num_examples or {}).get(task.name)
        number = member.task.num_input_examples(config.split) if known is None else known
        if number is None:
            raise UserError(
                f'Nobody knows how many training examples the task "{task.name}" has. Say it: '
                + flag("Mixing.num_examples", f'{{"{task.name}": NUMBER}}')
            )
        return mixing.rate(number)
    except (TypeError, ValueError) as error:
        raise UserError(f'The mixing rates of "{config.mixture_or_task_name}" cannot be computed: {error}') from error


def _check_mixed(parts: Sequence[Part]) -> None:
    """Raises a `UserError` where some tasks have a model's own features, and others inputs and targets."""
    kinds = {has_model_features(part.lengths): part.task.name for part in parts}
    if len(kinds) > 1:
        raise UserError(
            f'The task "{kinds[True]}" has a model\'s own features, and "{kinds[False]}" inputs and targets: one batch cannot '
            "hold both. Give all tasks of a mixture the same features."
        )


def has_model_features(names: Iterable[str]) -> bool:
    """Whether some are called as a model's features are, `decoder_target_tokens` for example."""
    return any(name.startswith(SIDES) for name in names)


def _lengths_of_examples(task: seqio.Task, config: DataConfig, architecture: str) -> Lengths:
    """The lengths of the features that are read of a task with examples of its own."""
    features, given = task.output_features, config.task_feature_lengths
    if config.converter is not None:
        return given  # it says itself what it misses
    if "targets" not in features and has_model_features(features):
        return _given(task, [name for name in features if name.startswith(SIDES)], given)
    if architecture == "encoder" and "loss_weights" not in features:
        raise UserError(
            f'The task "{task.name}" has inputs and targets of their own, but an encoder alone predicts tokens in place: it '
            "needs inputs, targets and loss_weights of one length. Use the objective masked_lm on a text."
        )
    # Some tasks declare their targets alone, and their preprocessors make inputs.
    has_inputs = "inputs" in features or (architecture == "encoder_decoder" and "inputs" in given)
    if architecture == "encoder_decoder" and not has_inputs:
        raise UserError(no_inputs(task))
    if "targets" not in features:
        raise UserError(
            f'The task "{task.name}" has the features {", ".join(sorted(features))}; give it inputs and targets, which are '
            "made into a model's features here, or name a DataConfig.converter that makes them of its own."
        )
    passed = [] if config.pack else [name for name in features if name in given and features[name].rank]
    return _given(task, list(dict.fromkeys([*(["inputs"] if has_inputs else []), "targets", *passed])), given)


def no_inputs(task: seqio.Task) -> str:
    """What is said of a task for an encoder-decoder that has none."""
    return (
        f'The task "{task.name}" has no inputs, so an encoder would have nothing to read. Use a decoder model, or say with '
        "OBJECTIVE what to make of its text."
    )


def _given(task: seqio.Task, needed: list[str], given: Lengths) -> Lengths:
    missing = [name for name in needed if name not in given]
    if missing:
        raise UserError(
            f'The task "{task.name}" needs a length for "{missing[0]}"; TASK_FEATURE_LENGTHS gives only '
            f"{', '.join(given)}. Set for example " + flag("TASK_FEATURE_LENGTHS", json.dumps(dict.fromkeys(needed, 512)))
        )
    return {name: given[name] for name in needed}
