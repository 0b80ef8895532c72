"""Datasets of rows with a model's features: the examples of a mixture, mixed, shuffled and converted."""

import functools
from collections.abc import Sequence
from typing import Any

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import describe_error, describe_user_code_error
from t5x_lab.data.config import DataConfig
from t5x_lab.data.packing.feature_converter import FeatureConverter
from t5x_lab.data.pipeline.examples import add_mixture_features, mixture_features, passthrough_features
from t5x_lab.data.pipeline.graph import Shard, interleave_shards
from t5x_lab.data.pipeline.reading import are_separate, task_shard
from t5x_lab.data.pipeline.seeds import derive_seed
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.data.vocabularies.build import build_vocabulary


def build_shards(
    mixture: ResolvedMixture, config: DataConfig, seed: int, rates: list[float], rows: int, shards: tuple[int, ...]
) -> tf.data.Dataset:
    """Returns endless shuffled blocks of rows of model features of one logical shard, or of several in turn."""
    build = functools.partial(training_shard, mixture, config, seed, rates, rows)
    if not are_separate(len(mixture.train_components)):
        seeds = [1 + derive_seed(seed, shard) % (2**31 - 2) for shard in shards]
        return interleave_shards(build, shards, seeds, derive_seed(seed))
    (shard,) = shards
    return build(shard).with_options(dataset_options())


def dataset_options() -> tf.data.Options:
    """Returns options for a deterministic order without autotuning.

    Autotuning costs more CPU-seconds than it saves, and the end of an iterator waits for the tuning thread, which sleeps for up
    to a minute.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return options


def training_shard(
    mixture: ResolvedMixture, config: DataConfig, seed: int, rates: list[float], rows: int, shard: Shard
) -> tf.data.Dataset:
    """Returns blocks of rows of model features of one logical shard."""
    components = mixture.train_components
    features = mixture_features(components, mixture.architecture, config)
    numbers = range(len(components)) if len(components) > 1 else [None]
    sampled = [entry for entry in zip(numbers, components, rates, strict=True) if entry[2] > 0]
    datasets = [
        add_mixture_features(
            task_shard(component, config, seed, shard, len(components), rate / sum(rates)),
            component,
            number,
            features,
            mixture.architecture,
        )
        for number, component, rate in sampled
    ]
    mixed, shard_seed = datasets[0], derive_seed(seed, shard)
    if len(datasets) > 1:
        mixed = mixture.sample_fn(datasets, [rate for _, _, rate in sampled], shard_seed)
    if config.shuffle and not are_separate(len(components)):
        mixed = mixed.shuffle(config.shuffle_buffer_size or seqio.SHUFFLE_BUFFER_SIZE, seed=shard_seed)
    return convert(mixed, mixture, components, config, rows)


def batch_features(mixture: ResolvedMixture, config: DataConfig) -> dict[str, tf.TensorSpec]:
    """Returns shapes and types of a training batch of all processes. The converter runs on no examples; no data are read."""
    try:
        components = mixture.train_components
    except Exception:  # a user's source may raise anything if its data are not on this machine
        components = mixture.components
    features = {**mixture_features(components, mixture.architecture, config), "raw_tokens": tf.TensorSpec([], tf.int32)}
    if len(components) > 1:
        features["task"] = tf.TensorSpec([], tf.int32)
    batch = _convert_specs(features, mixture, components, config)
    if all(spec.shape.is_fully_defined() for spec in batch.values()):
        return batch
    # The preprocessors may know more sizes than the declared features.
    element_spec = task_shard(components[0], config, 0, 0, len(components)).element_spec
    specs = {name: element_spec.get(name, spec) for name, spec in features.items()}
    batch = _convert_specs(specs, mixture, components, config)
    for name, spec in batch.items():
        if not spec.shape.is_fully_defined():
            raise UserError(
                f'The converter makes "{name}" of shape {list(spec.shape)}. A compiled program needs all sizes. Pad it to a '
                "length of TASK_FEATURE_LENGTHS."
            )
    return batch


def _convert_specs(
    features: dict[str, tf.TensorSpec], mixture: ResolvedMixture, components: Sequence[Component], config: DataConfig
) -> dict[str, tf.TensorSpec]:
    empty = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=features)
    placeholder_ids = 0, 1  # the real ids would need the vocabulary file
    return convert(empty, mixture, components, config, config.batch_size, start_and_eos=placeholder_ids).element_spec


def convert(
    dataset: tf.data.Dataset,
    mixture: ResolvedMixture,
    components: Sequence[Component],
    config: DataConfig,
    rows: int,
    drop_remainder: bool = True,
    start_and_eos: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """Returns the converter's batches of examples of `components`."""
    converter: Any = config.converter or _default_converter(mixture, components, config, start_and_eos)
    try:
        if hasattr(converter, "batches"):
            return converter.batches(dataset, mixture.lengths, rows, drop_remainder)
        return converter(dataset, mixture.lengths).batch(rows, drop_remainder)
    except Exception as error:
        if config.converter is None or isinstance(error, UserError):
            raise
        reason = describe_user_code_error(error) or describe_error(error)
        raise UserError(
            f"The converter {type(converter).__name__} fails on examples with {', '.join(dataset.element_spec)} at the lengths "
            f"{dict(mixture.lengths)}: {reason}."
        ) from error


def _default_converter(
    mixture: ResolvedMixture, components: Sequence[Component], config: DataConfig, start_and_eos: tuple[int, int] | None
) -> FeatureConverter:
    input_eos = None
    if start_and_eos is None:
        eos = mixture.vocabulary.eos_id
        start_and_eos = config.special_tokens.id_before_texts(eos), eos
        input_eos = build_vocabulary(config.vocabulary_of("inputs")).eos_id if config.input_vocabulary else None
    passthrough = passthrough_features(mixture_features(components, mixture.architecture, config))
    return FeatureConverter(
        mixture.architecture, config.pack, *start_and_eos, input_eos, num_tasks=len(components), passthrough=passthrough
    )
