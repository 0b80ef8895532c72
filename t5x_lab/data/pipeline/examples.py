"""Common features of the examples of a mixture's tasks, so that they can be mixed and converted."""

from collections.abc import Iterable, Mapping, Sequence

import seqio
import tensorflow as tf

from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.objective import FEATURE_PREFIXES
from t5x_lab.data.tasks.mixture import Component, are_model_features
from t5x_lab.data.vocabularies.build import sentinel_ids, uses_id_0

# Features that the library's converter reads.
CONVERTER_FEATURES = ("inputs", "targets", "inputs_segment_ids", "targets_segment_ids", "loss_weights")


def mixture_features(components: Sequence[Component], architecture: str, config: DataConfig) -> dict[str, tf.TensorSpec]:
    """Returns the features of the mixture's examples: sequences that any task has, and other features that all tasks have."""
    merged: dict[str, tf.TensorSpec] = {}
    by_component = [_component_features(component, architecture, config) for component in components]
    for features in by_component:
        # Loss weights may be integers in one task and floats in another.
        merged.update({name: spec for name, spec in features.items() if name not in merged or spec.dtype.is_floating})
    is_common = lambda name: all(name in features for features in by_component)
    return {name: spec for name, spec in merged.items() if spec.shape.rank == 1 or is_common(name)}


def _component_features(component: Component, architecture: str, config: DataConfig) -> dict[str, tf.TensorSpec]:
    declared = {
        name: tf.TensorSpec([None] * feature.rank, feature.dtype)
        for name, feature in component.task.output_features.items()
        if _is_read(name, feature, component, architecture, config)
    }
    undeclared = [name for name in component.lengths if name not in declared]
    if component.is_text and component.task.objective.has_segments(architecture):
        undeclared += ["inputs_segment_ids", "targets_segment_ids"]
    return {**declared, **dict.fromkeys(undeclared, tf.TensorSpec([None], tf.int32))}


def _is_read(name: str, feature: seqio.Feature, component: Component, architecture: str, config: DataConfig) -> bool:
    if component.is_text or name in component.lengths or name.endswith("_segment_ids"):
        return True
    if name == "loss_weights" and config.converter is None:
        return architecture == "encoder"
    is_passed_through = config.converter is not None or (feature.rank == 0 and not config.pack)
    return is_passed_through and feature.dtype != tf.string and name not in CONVERTER_FEATURES


def passthrough_features(features: Iterable[str]) -> tuple[str, ...]:
    """Returns the features that the library's converter does not change."""
    return tuple(name for name in features if name not in CONVERTER_FEATURES and not name.startswith(FEATURE_PREFIXES))


def add_mixture_features(
    dataset: tf.data.Dataset, component: Component, number: int | None, features: Mapping[str, tf.TensorSpec], architecture: str
) -> tf.data.Dataset:
    """Returns a task's examples, truncated, with the features of the mixture, `raw_tokens`, and the task number `task`.

    Args:
      dataset: examples of the task.
      component: the task.
      number: number of the task in the mixture, None to leave out `task`.
      features: result of `mixture_features`.
      architecture: architecture of the model.

    `raw_tokens` is set by objectives. In other examples, tokens other than padding, sentinels and EOS are counted.
    """
    element_spec = dataset.element_spec
    if number is None and component.is_text and {*features, "raw_tokens"} <= set(element_spec):
        return dataset  # complete already

    @tf.autograph.experimental.do_not_convert
    def complete(example):
        values = {name: _feature(example, name, spec, component) for name, spec in features.items()}
        has_raw_tokens = "raw_tokens" in element_spec
        raw_tokens = example["raw_tokens"] if has_raw_tokens else _raw_tokens(values, component, architecture)
        if component.input_prefix:
            prefix = tf.constant(component.input_prefix, values["inputs"].dtype)
            values["inputs"] = tf.concat([prefix, values["inputs"]], 0)
        return {**values, "raw_tokens": raw_tokens, **({} if number is None else {"task": number})}

    return dataset.map(complete, tf.data.AUTOTUNE)


def _feature(example, name: str, spec: tf.TensorSpec, component: Component) -> tf.Tensor:
    if name in example:
        return tf.cast(_truncate(example[name], name, component), spec.dtype)
    text = name.removesuffix("_segment_ids")
    if text != name and text in example:
        return tf.ones_like(example[text], spec.dtype)  # one segment
    return tf.zeros([0] * spec.shape.rank, spec.dtype)


def _truncate(x: tf.Tensor, name: str, component: Component) -> tf.Tensor:
    """Truncates a feature to its length, as SeqIO does. Examples of objectives never exceed it."""
    feature = component.task.output_features.get(name)
    if component.is_text or feature is None or not feature.rank or name not in component.lengths:
        return x
    return x[: component.sequence_length[name]]


def text_features(component: Component, architecture: str) -> list[str]:
    """Returns the features that hold the task's text, each token once."""
    if are_model_features(component.lengths):
        return [name for name in component.lengths if name.endswith("target_tokens") or name == "encoder_input_tokens"]
    return [name for name in ("inputs", "targets") if name in component.lengths and architecture != "encoder"] or ["targets"]


def _raw_tokens(example, component: Component, architecture: str) -> tf.Tensor:
    names = text_features(component, architecture)
    features = component.task.output_features
    vocabulary_of = lambda name: features[name if name in features else "targets"].vocabulary
    return sum((_count_text_tokens(example[name], vocabulary_of(name)) for name in names if name in example), tf.constant(0))


def _count_text_tokens(tokens: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
    if isinstance(vocabulary, seqio.PassThroughVocabulary):
        return tf.size(tokens)
    # Without extra_ids, sentinels of a byte vocabulary are bytes of text.
    has_no_sentinels = isinstance(vocabulary, seqio.ByteVocabulary) and not vocabulary.extra_ids
    sentinels = sorted(() if has_no_sentinels else sentinel_ids(vocabulary)) or [vocabulary.vocab_size]
    is_text = (tokens != vocabulary.eos_id) & ((tokens < sentinels[0]) | (tokens > sentinels[-1]))
    if not uses_id_0(vocabulary):
        is_text &= tokens != vocabulary.pad_id
    return tf.reduce_sum(tf.cast(is_text, tf.int32))
