"""The resolved task or mixture of a run: its components, the lengths of their features, and their mixing rates."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.log import log
from t5x_lab.data.cache.reading import CachedTaskSource, Caches, register_cache_stats, use_cache
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.objective import FEATURE_PREFIXES, Lengths, Objective
from t5x_lab.data.tasks.names import Member, find_members
from t5x_lab.data.tasks.text_tasks import ObjectiveTask
from t5x_lab.data.vocabularies.build import lazy_vocabulary
from t5x_lab.data.vocabularies.sentinels import num_sentinels


@dataclasses.dataclass(frozen=True)
class Component:
    """One task of a mixture.

    Attributes:
      task: the SeqIO task.
      lengths: tokens of each feature that the model reads.
      compute_rate: returns the mixing rate. It may count examples.
      may_be_sampled: whether the rate may be above 0, as far as is known before anything is counted.
      sequence_length: lengths that SeqIO's preprocessors get: `lengths`; for tasks with their own examples all of
        TASK_FEATURE_LENGTHS, with the length of inputs reduced by the prefix.
      input_prefix: ids before the inputs of a task with its own examples, `SpecialTokens.input_start`. They count towards the
        length of inputs.
    """

    task: seqio.Task
    lengths: Lengths
    compute_rate: Callable[[], float]
    may_be_sampled: bool
    sequence_length: Lengths
    input_prefix: tuple[int, ...] = ()

    @functools.cached_property
    def rate(self) -> float:
        """Mixing rate. Rates need not sum to 1."""
        return self.compute_rate()

    @property
    def is_text(self) -> bool:
        """Whether an objective makes its examples from text. Such examples never exceed the lengths."""
        return isinstance(self.task, ObjectiveTask)


@dataclasses.dataclass(frozen=True)
class ResolvedMixture:
    """A task or mixture as a flat list of components.

    Attributes:
      name: name in gin.
      architecture: architecture of the model that reads it.
      vocabulary: the run's vocabulary.
      components: its tasks.
      split: split to train on.
      sample_fn: f(datasets, rates, seed) -> dataset, the mixture's own or SeqIO's default.
    """

    name: str
    architecture: str
    vocabulary: seqio.Vocabulary
    components: tuple[Component, ...]
    split: str = "train"
    sample_fn: Callable = tf.data.Dataset.sample_from_datasets

    @functools.cached_property
    def train_components(self) -> tuple[Component, ...]:
        """Components with a training split and a rate that is not set to 0.

        Raises:
          UserError: if there is none.
        """
        with_split = [component for component in self.components if self.split in component.task.splits]
        components = tuple(component for component in with_split if component.may_be_sampled)
        if not components:
            noun = "task" if len(self.components) == 1 else "mixture"
            if with_split:
                raise UserError(f'All tasks of the {noun} "{self.name}" have rate 0. Change its rates, or set MIXING.')
            splits = sorted({split for component in self.components for split in component.task.splits})
            raise UserError(
                f'The {noun} "{self.name}" has no split "{self.split}" to train on; it has {", ".join(splits)}. Use another '
                "task, or set DataConfig.split."
            )
        if len(components) < len(self.components):
            names = [component.task.name for component in self.components if component not in components]
            log(f'Tasks of {self.name} without the split "{self.split}" or with rate 0 are skipped: {", ".join(names)}.')
        return components

    def rates(self) -> list[float]:
        """Returns the mixing rate of each training component. Rates need not sum to 1.

        Raises:
          UserError: if they cannot be computed, or are all 0.
        """
        rates = [component.rate for component in self.train_components]
        if not any(rates):
            raise UserError(f'All tasks of the mixture "{self.name}" have rate 0 or no training examples.')
        return rates

    @property
    def lengths(self) -> Lengths:
        """Tokens of each feature, the maximum over components."""
        names = sorted({name for component in self.components for name in component.lengths})
        return {name: max(component.lengths.get(name, 0) for component in self.components) for name in names}

    @property
    def input_eos(self) -> bool:
        """Whether inputs end with an EOS token."""
        feature = self.components[0].task.output_features.get("inputs")
        return feature is not None and feature.add_eos


def resolve_mixture(config: DataConfig, architecture: str) -> ResolvedMixture:
    """Resolves `config.mixture_or_task_name` for a model. Neither data nor the vocabulary file are opened.

    Raises:
      UserError: for an unknown name, with the nearest one, or an objective or task that does not fit the architecture or the
        lengths.
    """
    members = [dataclasses.replace(member, task=use_cache(member.task, config)) for member in find_members(config)]
    sampled = [(m.registered_task, m.task.source) for m in members if m.registered_task and _may_be_sampled(m, config)]
    caches = [(task, source) for task, source in sampled if isinstance(source, CachedTaskSource)]
    has_objective = any(isinstance(member.task, ObjectiveTask) for member in members)
    sentinels = num_sentinels(config.vocabulary) if has_objective else 0
    components = [_make_component(member, config, architecture, sentinels, caches) for member in members]
    _check_num_examples(members, config)
    _check_same_features(components)
    if config.unique_tokens and not all(component.is_text for component in components):
        raise UserError(
            f'DataConfig.unique_tokens limits the text of an objective, but "{config.mixture_or_task_name}" has tasks with '
            "their own examples. Remove it."
        )
    mixture, vocabulary = members[0].mixture, lazy_vocabulary(config.vocabulary)
    sampling = {} if mixture is None else {"sample_fn": mixture._sample_fn}
    return ResolvedMixture(config.mixture_or_task_name, architecture, vocabulary, tuple(components), config.split, **sampling)


def _make_component(member: Member, config: DataConfig, architecture: str, sentinels: int, caches: Caches) -> Component:
    task = member.task
    rate = functools.partial(_compute_rate, member, config, caches)
    may_be_sampled = _may_be_sampled(member, config)
    if isinstance(task, ObjectiveTask):
        lengths = _objective_lengths(task, config, architecture, sentinels)
        return Component(task, lengths, rate, may_be_sampled, lengths)
    lengths = _example_lengths(task, config, architecture)
    prefix = config.special_tokens.input_start if "inputs" in lengths else ()
    input_length = {"inputs": _length_after_prefix(task, lengths["inputs"], prefix)} if prefix else {}
    sequence_length = {**config.task_feature_lengths, **lengths, **input_length}
    return Component(task, lengths, rate, may_be_sampled, sequence_length, prefix)


def _length_after_prefix(task: seqio.Task, length: int, prefix: tuple[int, ...]) -> int:
    if len(prefix) >= length:
        raise UserError(
            f'SpecialTokens.input_start puts {len(prefix)} ids before the inputs of "{task.name}", but TASK_FEATURE_LENGTHS '
            f"has only {length} tokens for both. Increase it."
        )
    return length - len(prefix)


def _objective_lengths(task: ObjectiveTask, config: DataConfig, architecture: str, sentinels: int) -> Lengths:
    refusal = task.objective.refusal(architecture)
    if refusal:
        raise UserError(f'A model of architecture "{architecture}" cannot be trained on "{task.name}". {refusal}')
    lengths = task.objective.complete(config.task_feature_lengths, architecture, sentinels)
    _log_unused_length(task.name, task.objective, lengths, sentinels)
    return lengths


def _log_unused_length(name: str, objective: Objective, lengths: Lengths, sentinels: int) -> None:
    used = objective.share_of_inputs(lengths, sentinels)
    if used < 0.85:
        log(
            f"{name}: with {sentinels} sentinels in the vocabulary, examples fill {used:.0%} of inputs of {lengths['inputs']} "
            "tokens. More extra_ids or shorter TASK_FEATURE_LENGTHS leave less padding."
        )


def _check_num_examples(members: Sequence[Member], config: DataConfig) -> None:
    names = [member.registered_task.name for member in members if member.registered_task]
    for name in (config.mixing and config.mixing.num_examples) or {}:
        if names and name not in names:
            raise UserError(
                f'Mixing.num_examples has a number for "{name}".{did_you_mean(name, names)} The tasks of '
                f'"{config.mixture_or_task_name}" are {", ".join(names)}.'
            )


def _may_be_sampled(member: Member, config: DataConfig) -> bool:
    """Returns whether the rate may be above 0. Nothing is counted."""
    mixture, task = member.mixture, member.registered_task
    if mixture is None or task is None or config.mixing is not None:
        return True
    return _has_computed_rates(mixture) or float(mixture.get_rate(task)) > 0


def _has_computed_rates(mixture: seqio.Mixture) -> bool:
    return any(map(callable, mixture.rate_per_task_name.values())) or any(map(_has_computed_rates, mixture._sub_mixtures))


def _compute_rate(member: Member, config: DataConfig, caches: Caches) -> float:
    mixing, mixture, task = config.mixing, member.mixture, member.registered_task or member.task
    if mixture is None and member.rate is None:
        return 1.0
    try:
        if mixing is None:
            if mixture is None:
                return 1.0 if member.rate is None else member.rate
            with register_cache_stats(caches if _has_computed_rates(mixture) else ()):
                return float(mixture.get_rate(task))
        if mixing.equal:
            return mixing.rate(1)
        configured = (mixing.num_examples or {}).get(task.name)
        num_examples = member.task.num_input_examples(config.split) if configured is None else configured
        if num_examples is None:
            raise _unknown_size(task)
        return mixing.rate(num_examples)
    except (TypeError, ValueError) as error:
        if mixing is None and member.task.num_input_examples(config.split) is None:  # SeqIO's rates compare the None
            raise _unknown_size(task) from error
        raise UserError(f'The mixing rates of "{config.mixture_or_task_name}" cannot be computed: {error}') from error


def _unknown_size(task: seqio.Task) -> UserError:
    flag = gin_flag("Mixing.num_examples", f'{{"{task.name}": NUMBER}}')
    return UserError(
        f'The number of training examples of the task "{task.name}" is unknown, so its mixing rate cannot be computed. Set '
        f"MIXING = @Mixing() and {flag}"
    )


def _check_same_features(components: Sequence[Component]) -> None:
    """Raises a `UserError` if some tasks have model features, and others inputs and targets."""
    by_type = {are_model_features(component.lengths): component.task.name for component in components}
    if len(by_type) > 1:
        raise UserError(
            f'The task "{by_type[True]}" has model features, and "{by_type[False]}" inputs and targets. They cannot share a '
            "batch. All tasks of a mixture must have the same features."
        )


def are_model_features(names: Iterable[str]) -> bool:
    """Returns whether some names are those of model features, such as `decoder_target_tokens`."""
    return any(name.startswith(FEATURE_PREFIXES) for name in names)


def _example_lengths(task: seqio.Task, config: DataConfig, architecture: str) -> Lengths:
    """Returns the lengths of the features that are read from a task with its own examples."""
    features, lengths = task.output_features, config.task_feature_lengths
    if config.converter is not None:
        return lengths  # the converter checks them itself
    if "targets" not in features and are_model_features(features):
        return _select_lengths(task, [name for name in features if name.startswith(FEATURE_PREFIXES)], lengths)
    if architecture == "encoder" and "loss_weights" not in features:
        raise UserError(
            f'The task "{task.name}" has separate inputs and targets, but an encoder-only model predicts tokens in place. It '
            "needs inputs, targets and loss_weights of equal length. Use the objective masked_lm on a text."
        )
    # Some tasks declare only targets, and their preprocessors make inputs.
    has_inputs = "inputs" in features or (architecture == "encoder_decoder" and "inputs" in lengths)
    if architecture == "encoder_decoder" and not has_inputs:
        raise UserError(describe_missing_inputs(task))
    if "targets" not in features:
        raise UserError(
            f'The task "{task.name}" has the features {", ".join(sorted(features))}. It needs inputs and targets, or set a '
            "DataConfig.converter that makes model features from its own."
        )
    unpacked = [] if config.pack else [name for name in features if name in lengths and features[name].rank]
    names = [*(["inputs"] if has_inputs else []), "targets", *unpacked]
    return _select_lengths(task, list(dict.fromkeys(names)), lengths)


def describe_missing_inputs(task: seqio.Task) -> str:
    """Returns the message for a task without inputs and an encoder-decoder model."""
    return f'The task "{task.name}" has no inputs for the encoder. Use a decoder, or set OBJECTIVE if the task is plain text.'


def _select_lengths(task: seqio.Task, names: list[str], lengths: Lengths) -> Lengths:
    missing = [name for name in names if name not in lengths]
    if missing:
        raise UserError(
            f'The task "{task.name}" needs a length for "{missing[0]}". TASK_FEATURE_LENGTHS has only '
            f"{', '.join(lengths)}. Set for example " + gin_flag("TASK_FEATURE_LENGTHS", json.dumps(dict.fromkeys(names, 512)))
        )
    return {name: lengths[name] for name in names}
