"""Checks before anything is read: vocabulary, model and tasks fit together, and data are available."""

import json
from collections.abc import Collection, Iterable

import seqio

from t5x_lab.config.errors import NotHere, UserError, did_you_mean
from t5x_lab.config.gin_files import gin_flag
from t5x_lab.config.log import log
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.examples import mixture_features
from t5x_lab.data.pipeline.reading import task_shard
from t5x_lab.data.sources.text_files import must_read_to_count
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.data.vocabularies.build import build_vocabulary, uses_id_0
from t5x_lab.data.vocabularies.config import Vocabulary


def check_vocabulary(
    tasks: ResolvedMixture, config: DataConfig, vocab_size: int, additional_ids: Collection[int] | None = None
) -> None:
    """Opens the vocabulary file. Raises a `UserError` if it does not fit the model or the tasks.

    Args:
      tasks: the resolved mixture.
      config: data configuration.
      vocab_size: number of ids that the model embeds.
      additional_ids: further ids that the model embeds, such as those of a soft prompt. None = not checked.
    """
    if config.input_vocabulary and tasks.architecture != "encoder_decoder":
        raise UserError("INPUT_VOCABULARY is set, but only an encoder-decoder reads inputs apart from targets. Remove it.")
    for setting in dict.fromkeys(map(config.vocabulary_of, ("targets", "inputs"))):
        _check_special_tokens(build_vocabulary(setting), setting, tasks, config)
    _check_lengths_are_read(tasks, config)
    _log_unused_settings(tasks, config)
    if additional_ids is not None:
        _check_additional_ids(tasks, vocab_size, additional_ids)
    for component in tasks.components:
        _check_special_ids(component, vocab_size)
        for name, feature in component.task.output_features.items():
            if name in component.lengths and feature.vocabulary.vocab_size > vocab_size:
                raise UserError(
                    f'The vocabulary of feature "{name}" of task "{component.task.name}" has {feature.vocabulary.vocab_size} '
                    f"ids, but the model has {vocab_size}. Set --gin.TransformerConfig.vocab_size to at least that, or use the "
                    "model's vocabulary."
                )


def _check_special_tokens(
    vocabulary: seqio.Vocabulary, setting: Vocabulary, tasks: ResolvedMixture, config: DataConfig
) -> None:
    """Raises a `UserError` if a vocabulary has no EOS token where one is needed, or uses the id of padding."""
    with_eos = (
        feature.add_eos
        for component in tasks.components
        for name, feature in component.task.output_features.items()
        if name in component.lengths and config.vocabulary_of(name) == setting
    )
    if vocabulary.eos_id is None and (config.converter is None or any(with_eos)):
        raise UserError(
            f"{setting} has no EOS token, which training appends to documents. Use one with an EOS token: a "
            'SentencePiece model trained with an eos_id of 0 or more, or a tokenizer with "eos_token" in tokenizer_config.json.'
        )
    if not config.pack and uses_id_0(vocabulary):
        raise UserError(
            "DataConfig.pack is False, but unpacked rows are padded with id 0, which is a token of "
            f"{setting}. Set DataConfig.pack = True."
        )


def _check_lengths_are_read(tasks: ResolvedMixture, config: DataConfig) -> None:
    """Raises a `UserError` if a decoder's rows, which are as long as the sum, would miss a length that no task reads."""
    lengths, used = config.task_feature_lengths, set(tasks.lengths)
    if tasks.architecture in ("encoder", "encoder_decoder") or not used < {"inputs", "targets"} <= set(lengths):
        return
    (read,), (unread,) = used, {"inputs", "targets"} - used
    raise UserError(
        f'TASK_FEATURE_LENGTHS has a length for "{unread}", which "{tasks.name}" does not read with a decoder: rows would have '
        f"{lengths[read]} tokens, not {sum(lengths[name] for name in ('inputs', 'targets'))}. Set for example "
        + gin_flag("TASK_FEATURE_LENGTHS", json.dumps({read: lengths["inputs"] + lengths["targets"]}))
        + ". Lengths that only an evaluation needs belong to its own `lengths`."
    )


def _check_additional_ids(tasks: ResolvedMixture, vocab_size: int, additional_ids: Collection[int]) -> None:
    """Raises a `UserError` if ids before inputs are not embedded, or no task has `additional_ids` before its inputs."""
    embedded = {*range(vocab_size), *additional_ids}
    for component in tasks.train_components:
        unknown = [i for i in component.input_prefix if i not in embedded]
        if unknown:
            raise UserError(
                f'SpecialTokens.input_start puts {len(unknown)} ids before the inputs of "{component.task.name}" that the '
                f"model does not embed, such as {unknown[0]}. For a soft prompt, set SOFT_PROMPT_LENGTH, which sets both "
                "lengths."
            )
    if not additional_ids:
        return
    components = tasks.train_components
    unprompted = [c.task.name for c in components if not set(additional_ids) <= set(c.input_prefix)]
    if unprompted and len(unprompted) == len(components):
        raise UserError(
            f'The soft prompt of {len(additional_ids)} ids precedes no input of "{tasks.name}", so it would not be trained. '
            "Use tasks with inputs, and SpecialTokens.input_start as in peft/soft_prompt.gin."
        )
    if unprompted:
        log(f"The soft prompt is not trained on {', '.join(unprompted)}: these tasks have no inputs.")


def _check_special_ids(component: Component, vocab_size: int) -> None:
    """Raises a `UserError` if the model does not embed the special ids of a task."""
    ids = getattr(component.task, "special_ids", ())
    if max(ids, default=0) >= vocab_size:
        raise UserError(
            f'The task "{component.task.name}" uses the special ids {", ".join(map(str, ids))}, but the model has '
            f"{vocab_size} ids. "
            f"Set TransformerConfig.vocab_size = {max(ids) + 1} with "
            'RestoreCheckpointConfig.extend = ["vocab"], which appends rows to those of INITIAL_CHECKPOINT_PATH. Or set '
            "Classification.tokens to ids that texts do not use."
        )


def check_readable(tasks: ResolvedMixture, config: DataConfig) -> None:
    """Opens the tasks' sources. Raises their errors if data are not available."""
    check_data_available(tasks.train_components, tasks.split, tasks.name, config)
    for component in tasks.train_components:
        if not must_read_to_count(component.task.source):
            component.compute_rate()
        if not set(component.lengths) <= set(component.task.output_features):
            task_shard(
                component, config, 0, 0, len(tasks.train_components)
            )  # raises if its preprocessors do not make undeclared features


def check_data_available(
    components: Iterable[Component], split: str, name: str, config: DataConfig, setting: str = "MIXTURE_OR_TASK_NAME"
) -> None:
    """Raises a `NotHere` if data are missing.

    Args:
      components: tasks to check.
      split: split to read.
      name: name of the mixture.
      config: data configuration.
      setting: the gin setting of `name`, for the hint how to leave out the missing data sets.
    """
    by_source: dict[seqio.DataSource, list[str]] = {}  # templates over one data set have one source
    for component in components:
        by_source.setdefault(component.task.source, []).append(component.task.name)
    missing: dict[str, list[str]] = {}
    for source, tasks in by_source.items():
        try:
            source.list_shards(split)
        except NotHere as error:
            missing.setdefault(error.sentence, []).extend(tasks)
    if missing:
        first = next(iter(missing))
        count = f" {len(missing) - 1} more data sets are missing." if len(missing) > 1 else ""
        names = [task for tasks in missing.values() for task in tasks]
        reduced = config.prompts.without(name, names) if config.prompts else ""
        raise NotHere(f"{first}{count}" + (f" To run without them, set {gin_flag(setting, reduced)}" if reduced else ""))


def _log_unused_settings(tasks: ResolvedMixture, config: DataConfig) -> None:
    """Logs settings and features that the run does not use, one line each."""
    eos, stop_ids = tasks.vocabulary.eos_id, config.special_tokens.stop_ids
    if stop_ids and eos not in stop_ids:
        log(
            f"Training texts end with the vocabulary's EOS token {eos}, but generation stops at SpecialTokens.end = "
            f"{config.special_tokens.end}. Make them equal."
        )
    used = set(tasks.lengths)
    for name in sorted(set(config.task_feature_lengths) - used):
        log(
            f'TASK_FEATURE_LENGTHS has a length for "{name}", which is not used.{did_you_mean(name, used)} Used are '
            f"{', '.join(sorted(used))}."
        )
    for component in tasks.components:
        features = mixture_features([component], tasks.architecture, config)
        unused = [
            f'"{name}"' for name, feature in component.task.output_features.items() if feature.required and name not in features
        ]
        if unused:
            log(
                f'{", ".join(unused)} of the task "{component.task.name}" is not used. A model reads inputs and targets. With '
                "DataConfig.pack = False it also gets scalars, and other features with a length in TASK_FEATURE_LENGTHS. "
                "Or set a DataConfig.converter that makes model features of them."
            )
