"""SeqIO preprocessors of the objectives, built on the `t5` library's functions.

Input examples are {"targets": tokens of a document}. Output examples also have `raw_tokens`, the number of tokens of text that
they were made of. Lengths and vocabulary come from SeqIO's `sequence_length` and `output_features`.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from t5.data import preprocessors as t5

from t5x_lab.config.errors import UserError
from t5x_lab.data.vocabularies.build import sentinel_ids, text_ids

# For functions of TensorFlow operations alone: AutoGraph would take seconds at every start.
no_autograph = tf.autograph.experimental.do_not_convert

MAX_DOCUMENT = 65_536  # tokens; of longer documents a random part is used (the `t5` library's number)
MERGED_DOCUMENTS = 128


def chunk(
    sizes: Callable[[Mapping[str, int], int], Sequence[int]],
    rates: Sequence[float] = (1.0,),
    *,
    merge_documents: bool = True,
    end_documents: bool = False,
) -> Callable:
    """Returns a preprocessor that divides documents into chunks. The last chunk of every 128 documents (or of each) is shorter.

    Args:
      sizes: f(lengths of features, number of sentinels) -> tokens of a chunk, for each kind of chunk.
      rates: sampling rate of each kind. The feature `kind` is its index.
      merge_documents: whether documents are concatenated first.
      end_documents: whether each document ends with EOS, if the task's targets do (`add_eos`).
    """
    bounds = np.cumsum(rates) / np.sum(rates)

    @seqio.map_over_dataset(num_seeds=1)
    @no_autograph
    def divide(document, seed, lengths, eos):
        tokens = document["targets"]
        n = tf.size(tokens)
        samples = tf.random.stateless_uniform([n // min(lengths) + 1], seed)
        kinds = tf.minimum(tf.searchsorted(tf.constant(bounds, tf.float32), samples, side="right"), len(lengths) - 1)
        ends = tf.minimum(tf.cumsum(tf.gather(tf.constant(lengths, tf.int32), kinds)), n)
        starts = tf.pad(ends[:-1], [[1, 0]])
        chunk_sizes = tf.boolean_mask(ends - starts, starts < n)
        chunks = tf.RaggedTensor.from_row_lengths(tokens, chunk_sizes)
        is_text = tf.cast(tokens != eos, tf.int32) if end_documents else tf.ones_like(tokens, tf.int32)
        raw_tokens = tf.reduce_sum(chunks.with_values(is_text), axis=1)
        return {"targets": chunks, "raw_tokens": raw_tokens, "kind": kinds[: tf.size(chunk_sizes)]}

    def to_chunks(dataset: tf.data.Dataset, sequence_length, output_features) -> tf.data.Dataset:
        vocabulary = output_features["targets"].vocabulary
        lengths = sizes(_require_lengths(sequence_length), len(sentinel_ids(vocabulary)))
        dataset = t5.select_random_chunk(dataset, output_features, max_length=MAX_DOCUMENT, feature_key="targets")
        if merge_documents or end_documents:

            @no_autograph
            def concatenate(documents):
                tokens = documents["targets"]
                if end_documents and output_features["targets"].add_eos:
                    ends = tf.fill([tokens.nrows(), 1], tf.cast(vocabulary.eos_id, tokens.dtype))
                    tokens = tf.concat([tokens, ends], axis=1)
                return {"targets": tokens.values}

            dataset = dataset.ragged_batch(MERGED_DOCUMENTS if merge_documents else 1).map(concatenate, tf.data.AUTOTUNE)
        return divide(dataset, lengths=lengths, eos=vocabulary.eos_id).unbatch()

    return to_chunks


def _require_lengths(sequence_length: Mapping[str, int] | None) -> Mapping[str, int]:
    if sequence_length is None:
        raise UserError("The examples of an objective depend on the lengths. Pass sequence_length to get_dataset.")
    return sequence_length


def split_prefix(dataset: tf.data.Dataset, sequence_length) -> tf.data.Dataset:
    """Splits chunks into inputs and targets.

    For an encoder-decoder, whose inputs have a length, it joins two chunks per row.
    """
    return split_pairs(sequence_length["targets"])(dataset) if "inputs" in sequence_length else split_anywhere(dataset)


@seqio.map_over_dataset(num_seeds=1)
@no_autograph
def split_anywhere(chunk, seed):
    """Splits a chunk of n tokens into inputs and targets at a point uniform in 1 … n-1."""
    tokens = chunk["targets"]
    point = _sample_point(tf.size(tokens), seed)
    return {"inputs": tokens[:point], "targets": tokens[point:], "raw_tokens": chunk["raw_tokens"]}


def split_pairs(length: int) -> Callable:
    """Returns a preprocessor that joins two chunks of n tokens, the first split at a uniform point i, the second at n - i.

    The inputs of both fill a row, and so do their targets. `<feature>_segment_ids` are 1 and 2, as in SeqIO's packed examples.
    They stay one example, so that shuffling does not separate them.
    """

    @seqio.map_over_dataset(num_seeds=1)
    @no_autograph
    def join(pair, seed):
        tokens, sizes = pair["targets"].values, tf.cast(pair["targets"].row_lengths(), tf.int32)
        first, second = sizes[0], tf.reduce_sum(sizes[1:])  # the last chunk may be alone
        point = _sample_point(tf.constant(length), seed)
        cut1 = tf.clip_by_value(point, 1, tf.maximum(first - 1, 1))
        cut2 = first + tf.minimum(tf.clip_by_value(length - point, 1, tf.maximum(second - 1, 1)), second)
        numbers = tf.constant([1, 2])
        return {
            "inputs": tf.concat([tokens[:cut1], tokens[first:cut2]], axis=0),
            "inputs_segment_ids": tf.repeat(numbers, [cut1, cut2 - first]),
            "targets": tf.concat([tokens[cut1:first], tokens[cut2:]], axis=0),
            "targets_segment_ids": tf.repeat(numbers, [first - cut1, tf.size(tokens) - cut2]),
            "raw_tokens": tf.reduce_sum(pair["raw_tokens"]),
        }

    return lambda dataset: join(dataset.ragged_batch(2))


def _sample_point(n: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform((), minval=1, maxval=tf.maximum(n, 2), seed=seed, dtype=tf.int32)


def denoise(objective: Any, kinds: Sequence[Any]) -> Callable:
    """Returns a preprocessor that corrupts chunks and appends EOS, with the `t5` library's functions.

    Args:
      objective: the objective, which completes lengths.
      kinds: a `Denoising` for each kind of chunk.
    """

    def append_eos(tokens, length, vocabulary):
        return tf.pad(tokens[: length - 1], [[0, 1]], constant_values=vocabulary.eos_id)

    def add_noise(dataset: tf.data.Dataset, sequence_length, output_features) -> tf.data.Dataset:
        sentinels = len(sentinel_ids(output_features["targets"].vocabulary))
        lengths = objective.complete(_require_lengths(sequence_length), "encoder_decoder", sentinels)

        def corrupt(chunk, seed):
            branches = [functools.partial(_add_noise, kind, sentinels, chunk, seed, output_features) for kind in kinds]
            example = branches[0]() if len(branches) == 1 else tf.switch_case(chunk["kind"], branches)
            ended = {
                name: append_eos(tokens, lengths[name], output_features[name].vocabulary) for name, tokens in example.items()
            }
            return {**ended, "raw_tokens": chunk["raw_tokens"]}

        # A user's function may need AutoGraph, for a Python `if` on tensors.
        has_user_view = any(callable(view) for kind in kinds for view in (kind.inputs, kind.targets))
        return seqio.map_over_dataset(corrupt if has_user_view else no_autograph(corrupt), num_seeds=1)(dataset)

    return add_noise


def _add_noise(objective, sentinels: int, chunk, seed, output_features):
    example = t5.single_example_denoise(
        chunk,
        seed,
        output_features=output_features,
        noise_density=objective.noise_density,
        noise_mask_fn=_noise_mask(objective, sentinels),
        inputs_fn=_INPUTS.get(objective.inputs, objective.inputs),
        targets_fn=_TARGETS.get(objective.targets, objective.targets),
    )
    if objective.mode is not None:
        mode = sentinel_ids(output_features["inputs"].vocabulary)[::-1][objective.mode]
        example["inputs"] = tf.pad(example["inputs"], [[1, 0]], constant_values=mode)
    return example


def _with_sentinels(function: Callable) -> Callable:
    """Wraps a function of the `t5` library, whose sentinels count down from the last id, to use the vocabulary's sentinels."""

    def apply(tokens, noise_mask, vocabulary, seeds):
        ids, size = sentinel_ids(vocabulary), vocabulary.vocab_size
        extended = types.SimpleNamespace(vocab_size=size + len(ids))  # ids that no text has
        result = function(tokens, noise_mask, extended, seeds)
        return tf.where(result < size, result, ids.start + ids.step * (extended.vocab_size - 1 - result))

    return apply


def _noise_mask(objective, sentinels: int) -> Callable:
    if objective.mean_noise_span_length is not None:
        return lambda length, density, seeds: t5.random_spans_noise_mask(
            length, density, seeds, mean_noise_span_length=objective.mean_noise_span_length
        )

    def iid(length, density, seeds):
        """Removes spans without an available sentinel, which are rare at the computed lengths."""
        mask = t5.iid_noise_mask(length, density, seeds)
        starts = mask & ~tf.pad(mask[:-1], [[1, 0]])
        return mask & (tf.cumsum(tf.cast(starts, tf.int32)) < objective.available_sentinels(sentinels))

    needs_sentinels = any(objective._costs("sentinels"))
    return iid if needs_sentinels else t5.iid_noise_mask


_token_to_sentinel = _with_sentinels(t5.noise_token_to_sentinel)


def random_or_sentinel(tokens, noise_mask, vocabulary, seeds):
    """Replaces noise by random tokens (10 %) or the first sentinel (90 %), without random sentinels.

    See `t5.data.preprocessors.noise_token_to_random_token_or_sentinel`.
    """
    use_random = tf.random.stateless_uniform(tf.shape(tokens), seed=seeds[0]) < 0.1
    return tf.where(
        use_random,
        tf.where(noise_mask, _random_tokens(tokens, vocabulary, seeds[1]), tokens),
        _token_to_sentinel(tokens, noise_mask, vocabulary, seeds=()),
    )


def _random_tokens(tokens, vocabulary, seed):
    ids = tf.constant(text_ids(vocabulary), tokens.dtype)
    return tf.gather(ids, tf.random.stateless_uniform(tf.shape(tokens), seed, 0, tf.size(ids), dtype=tf.int32))


_INPUTS = {
    "sentinel_per_span": _with_sentinels(t5.noise_span_to_unique_sentinel),
    "sentinel_per_token": _token_to_sentinel,
    "random_or_sentinel": random_or_sentinel,
    "without_noise": t5.drop_noise_tokens,
    "permuted": t5.permute_noise_tokens,
}
_TARGETS = {
    "whole": None,
    "noise_by_sentinel": _with_sentinels(t5.nonnoise_span_to_unique_sentinel),
    "noise_alone": t5.drop_nonnoise_tokens,
}


def mask_in_place(noise_density: float) -> Callable:
    """Returns a preprocessor for `MaskedLm`: corrupted inputs, the whole text as targets, loss weights on the noise."""

    def mask(dataset: tf.data.Dataset, output_features) -> tf.data.Dataset:
        vocabulary = output_features["inputs"].vocabulary

        @seqio.map_over_dataset(num_seeds=1)
        @no_autograph
        def corrupt(chunk, seed):
            tokens, seeds = chunk["targets"], tf.unstack(tf.random.split(seed, 3))
            noise = t5.iid_noise_mask(tf.size(tokens), noise_density, seeds[:1])
            kind = tf.random.stateless_uniform(tf.shape(tokens), seeds[1])
            sentinel = _token_to_sentinel(tokens, noise, vocabulary, seeds=())
            random = tf.where(noise, _random_tokens(tokens, vocabulary, seeds[2]), tokens)
            inputs = tf.where(kind < 0.8, sentinel, tf.where(kind < 0.9, random, tokens))
            return {**chunk, "inputs": inputs, "loss_weights": tf.cast(noise, tf.int32)}

        return corrupt(dataset)

    return mask


def truncate_corpus(tokens: int) -> Callable:
    """Returns a preprocessor that keeps the first N tokens of the corpus, to study repeated data."""

    def truncate(dataset: tf.data.Dataset) -> tf.data.Dataset:
        def take(before, document):
            n = tf.cast(tf.size(document["targets"]), tf.int64)
            remaining = tokens - before
            kept_tokens = document["targets"][: tf.maximum(remaining, 0)]
            return before + n, {**document, "targets": kept_tokens, "remaining": remaining}

        dataset = dataset.scan(tf.constant(0, tf.int64), take).take_while(lambda document: document["remaining"] > 0)
        return dataset.map(lambda document: {name: x for name, x in document.items() if name != "remaining"})

    return truncate
