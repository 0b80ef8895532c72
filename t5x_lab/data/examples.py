"""What the examples of a run's tasks have in common, so that they can be mixed and converted."""

from collections.abc import Iterable, Mapping, Sequence

import seqio
import tensorflow as tf

from t5x_lab.data.config import DataConfig
from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer
from t5x_lab.data.mixture import Part, has_model_features
from t5x_lab.data.objective import SIDES
from t5x_lab.data.vocabularies import sentinels_of

READ = ("inputs", "targets", "inputs_segment_ids", "targets_segment_ids", "loss_weights")  # by the library's own converter


def features_of(parts: Sequence[Part], architecture: str, config: DataConfig) -> dict[str, tf.TensorSpec]:
    """The features of examples of these tasks: those that one of them has, of token rows; of others, those that all have."""
    found: dict[str, tf.TensorSpec] = {}
    of_parts = [_features(part, architecture, config) for part in parts]
    for features in of_parts:
        # Weights of a loss may be whole numbers in one task and fractions in another.
        found.update({name: spec for name, spec in features.items() if name not in found or spec.dtype.is_floating})
    return {name: spec for name, spec in found.items() if spec.shape.rank == 1 or all(name in of for of in of_parts)}


def _features(part: Part, architecture: str, config: DataConfig) -> dict[str, tf.TensorSpec]:
    declared = {
        name: tf.TensorSpec([None] * feature.rank, feature.dtype)
        for name, feature in part.task.output_features.items()
        if _is_read(name, feature, part, architecture, config)
    }
    undeclared = [name for name in part.lengths if name not in declared]
    if part.is_text and part.task.objective.has_segments(architecture):
        undeclared += ["inputs_segment_ids", "targets_segment_ids"]
    return {**declared, **dict.fromkeys(undeclared, tf.TensorSpec([None], tf.int32))}


def _is_read(name: str, feature: seqio.Feature, part: Part, architecture: str, config: DataConfig) -> bool:
    if part.is_text or name in part.lengths or name.endswith("_segment_ids"):
        return True
    if name == "loss_weights" and config.converter is None:
        return architecture == "encoder"
    is_passed = config.converter is not None or (feature.rank == 0 and not config.pack)
    return is_passed and feature.dtype != tf.string and name not in READ


def passed(features: Iterable[str]) -> tuple[str, ...]:
    """Those with which the library's own converter has no work."""
    return tuple(name for name in features if name not in READ and not name.startswith(SIDES))


def with_features(
    dataset: tf.data.Dataset, part: Part, number: int | None, features: Mapping[str, tf.TensorSpec], architecture: str
) -> tf.data.Dataset:
    """Examples of a task, trimmed, with `features_of` all in its mixture, `raw_tokens`, and among several its number `task`.

    `raw_tokens` is the objective's; of other examples, tokens which are not padding, sentinels or end tokens.
    """
    given = dataset.element_spec
    if number is None and part.is_text and {*features, "raw_tokens"} <= set(given):
        return dataset  # has all of it

    @tf.autograph.experimental.do_not_convert
    def common(example):
        whole = {name: _feature(example, name, spec, part) for name, spec in features.items()}
        raw = example["raw_tokens"] if "raw_tokens" in given else _raw_tokens(whole, part, architecture)
        if part.before_inputs:
            whole["inputs"] = tf.concat([tf.constant(part.before_inputs, whole["inputs"].dtype), whole["inputs"]], 0)
        return {**whole, "raw_tokens": raw, **({} if number is None else {"task": number})}

    return dataset.map(common, tf.data.AUTOTUNE)


def _feature(example, name: str, spec: tf.TensorSpec, part: Part) -> tf.Tensor:
    if name in example:
        return tf.cast(_trimmed(example[name], name, part), spec.dtype)
    of = name.removesuffix("_segment_ids")
    if of != name and of in example:
        return tf.ones_like(example[of], spec.dtype)  # one text
    return tf.zeros([0] * spec.shape.rank, spec.dtype)


def _trimmed(x: tf.Tensor, name: str, part: Part) -> tf.Tensor:
    """No longer than the feature's length, as SeqIO trims; objectives keep to theirs."""
    feature = part.task.output_features.get(name)
    if part.is_text or feature is None or not feature.rank or name not in part.lengths:
        return x
    return x[: part.sequence_length[name]]


def sequences_of(part: Part, architecture: str) -> list[str]:
    """The features that hold a task's text, each token of it once."""
    if has_model_features(part.lengths):
        return [name for name in part.lengths if name.endswith("target_tokens") or name == "encoder_input_tokens"]
    return [name for name in ("inputs", "targets") if name in part.lengths and architecture != "encoder"] or ["targets"]


def _raw_tokens(example, part: Part, architecture: str) -> tf.Tensor:
    read = sequences_of(part, architecture)
    features = part.task.output_features
    vocabulary_of = lambda name: features[name if name in features else "targets"].vocabulary
    return sum((_count(example[name], vocabulary_of(name)) for name in read if name in example), tf.constant(0))


def _count(tokens: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
    if isinstance(vocabulary, seqio.PassThroughVocabulary):
        return tf.size(tokens)
    among_bytes = isinstance(vocabulary, seqio.ByteVocabulary) and not vocabulary.extra_ids  # nothing tells them from text
    sentinels = sorted(() if among_bytes else sentinels_of(vocabulary)) or [vocabulary.vocab_size]
    raw = (tokens != vocabulary.eos_id) & ((tokens < sentinels[0]) | (tokens > sentinels[-1]))
    if not has_text_at_0(vocabulary):
        raw &= tokens != vocabulary.pad_id
    return tf.reduce_sum(tf.cast(raw, tf.int32))


def has_text_at_0(vocabulary: seqio.Vocabulary) -> bool:
    """Whether the id 0 is a token of text."""
    return isinstance(vocabulary, HuggingFaceTokenizer) and vocabulary.has_text_at_0
