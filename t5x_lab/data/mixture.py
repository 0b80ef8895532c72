"""What a run reads: its tasks, the lengths of their features, and the rates at which they are drawn."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.config.gin_files import flag
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objective import Lengths, Objective, row_lengths
from t5x_lab.data.tasks import Member, members
from t5x_lab.data.texts import ObjectiveTask
from t5x_lab.data.vocabularies import build_vocabulary, sentinels_of
from t5x_lab.observe.console import say


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a run.

    Attributes:
      task: the SeqIO task.
      lengths: tokens per feature, SeqIO's `sequence_length`.
      weigh: computes how often it is drawn from, relative to the others.
    """

    task: seqio.Task
    lengths: Lengths
    weigh: Callable[[], float]

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
      sample_fn: the mixture's own way to mix them, SeqIO's by default: f(datasets, rates, seed) -> dataset.
    """

    name: str
    architecture: str
    vocabulary: seqio.Vocabulary
    parts: tuple[Part, ...]
    sample_fn: Callable = tf.data.Dataset.sample_from_datasets

    @functools.cached_property
    def trained(self) -> tuple[Part, ...]:
        """The tasks to train on: those that have training examples, and a rate above 0.

        Raises:
          UserError: when there is none, or when rates cannot be computed.
        """
        with_split = [part for part in self.parts if "train" in part.task.splits]
        found = tuple(part for part in with_split if part.rate > 0)
        if not found:
            splits = sorted({split for part in self.parts for split in part.task.splits})
            has = f"it has {', '.join(splits)}" if not with_split else "the rates of all its tasks are 0"
            kind = "task" if len(self.parts) == 1 else "mixture"
            raise UserError(f'The {kind} "{self.name}" has no split "train" to train on; {has}. Name another task.')
        if len(found) < len(self.parts):
            names = [part.task.name for part in self.parts if part not in found]
            say(f"Of {self.name} are not trained on, for want of training examples or of a rate above 0: {', '.join(names)}.")
        return found

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a row for the encoder (0 without one) and for the decoder."""
        return row_lengths(self.architecture, [part.lengths for part in self.parts])

    @property
    def input_eos(self) -> bool:
        """Whether inputs end with an end token."""
        feature = self.parts[0].task.output_features.get("inputs")
        return feature is not None and feature.add_eos


def resolve(config: DataConfig, architecture: str) -> WeightedTasks:
    """What `config.mixture_or_task_name` is for a model. No data are opened.

    Raises:
      UserError: with the nearest name when there is no such task or mixture; when an objective or a task does not go together
        with the architecture or the lengths.
    """
    found = members(config)
    parts = []
    for member in found:
        task = member.task
        lengths = (
            _lengths_of_objective(task, config, architecture)
            if isinstance(task, ObjectiveTask)
            else _lengths_of_examples(task, config, architecture)
        )
        parts.append(Part(task, lengths, functools.partial(_rate, member, config)))
    _check_numbers(found, config)
    if config.unique_tokens and not all(part.is_text for part in parts):
        raise UserError(
            f'DataConfig.unique_tokens limits text that an objective is applied to; "{config.mixture_or_task_name}" has tasks '
            "with examples of their own. Remove it."
        )
    mixture, vocabulary = found[0].mixture, build_vocabulary(config.vocabulary)
    own = {} if mixture is None else {"sample_fn": mixture._sample_fn}
    return WeightedTasks(config.mixture_or_task_name, architecture, vocabulary, tuple(parts), **own)


def _lengths_of_objective(task: ObjectiveTask, config: DataConfig, architecture: str) -> Lengths:
    refused = task.objective.refusal(architecture)
    if refused:
        raise UserError(f'The model is of architecture "{architecture}" and cannot be trained on "{task.name}". {refused}')
    sentinels = len(sentinels_of(task.output_features["targets"].vocabulary))
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


def _rate(member: Member, config: DataConfig) -> float:
    mixing, mixture, task = config.mixing, member.mixture, member.original
    if mixture is None or task is None:
        return 1.0
    try:
        if mixing is None:
            return float(mixture.get_rate(task))
        if mixing.equal:
            return mixing.rate(1)
        known = (mixing.num_examples or {}).get(task.name)
        number = member.task.num_input_examples("train") if known is None else known
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
