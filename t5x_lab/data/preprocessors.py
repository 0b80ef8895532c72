"""SeqIO preprocessors of the objectives, made of the `t5` library's functions where it has them.

All start from {"targets": a document's tokens} and give `raw_tokens` beside their features: how many tokens of text the
example was made of. Lengths and vocabulary are those that SeqIO gives them, `sequence_length` and `output_features`.
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
from t5x_lab.data.vocabularies import sentinels_of

# Made of TensorFlow's own operations, with nothing for AutoGraph to convert: that would take seconds at every start.
as_it_is = tf.autograph.experimental.do_not_convert

MAX_DOCUMENT = 65_536  # tokens; of longer documents a random part is taken (t5's number)
MERGED_DOCUMENTS = 128


def chunks(
    sizes: Callable[[Mapping[str, int], int], Sequence[int]],
    rates: Sequence[float] = (1.0,),
    *,
    merge_documents: bool = True,
    end_documents: bool = False,
) -> Callable:
    """Pieces of text for an objective, the last of every 128 documents (or of each, unmerged) shorter.

    Args:
      sizes: f(lengths of features, number of sentinels) -> tokens of a piece, for each kind there is.
      rates: how often each kind is drawn; `kind` of a piece is its index.
      merge_documents: whether documents are joined before they are cut.
      end_documents: whether each document is ended with an end token first, where the task's targets are (`add_eos`).
    """
    bounds = np.cumsum(rates) / np.sum(rates)

    @seqio.map_over_dataset(num_seeds=1)
    @as_it_is
    def cut(document, seed, lengths, end):
        tokens = document["targets"]
        n = tf.size(tokens)
        draws = tf.random.stateless_uniform([n // min(lengths) + 1], seed)
        kinds = tf.minimum(tf.searchsorted(tf.constant(bounds, tf.float32), draws, side="right"), len(lengths) - 1)
        ends = tf.minimum(tf.cumsum(tf.gather(tf.constant(lengths, tf.int32), kinds)), n)
        starts = tf.pad(ends[:-1], [[1, 0]])
        of_pieces = tf.boolean_mask(ends - starts, starts < n)
        pieces = tf.RaggedTensor.from_row_lengths(tokens, of_pieces)
        is_text = tf.cast(tokens != end, tf.int32) if end_documents else tf.ones_like(tokens, tf.int32)
        raw_tokens = tf.reduce_sum(pieces.with_values(is_text), axis=1)
        return {"targets": pieces, "raw_tokens": raw_tokens, "kind": kinds[: tf.size(of_pieces)]}

    def to_chunks(dataset: tf.data.Dataset, sequence_length, output_features) -> tf.data.Dataset:
        vocabulary = output_features["targets"].vocabulary
        lengths = sizes(_needed(sequence_length), len(sentinels_of(vocabulary)))
        dataset = t5.select_random_chunk(dataset, output_features, max_length=MAX_DOCUMENT, feature_key="targets")
        if merge_documents or end_documents:

            @as_it_is
            def joined(documents):
                tokens = documents["targets"]
                if end_documents and output_features["targets"].add_eos:
                    ends = tf.fill([tokens.nrows(), 1], tf.cast(vocabulary.eos_id, tokens.dtype))
                    tokens = tf.concat([tokens, ends], axis=1)
                return {"targets": tokens.values}

            dataset = dataset.ragged_batch(MERGED_DOCUMENTS if merge_documents else 1).map(joined, tf.data.AUTOTUNE)
        return cut(dataset, lengths=lengths, end=vocabulary.eos_id).unbatch()

    return to_chunks


def _needed(sequence_length: Mapping[str, int] | None) -> Mapping[str, int]:
    if sequence_length is None:
        raise UserError("What an objective makes of text depends on the lengths: give get_dataset a sequence_length.")
    return sequence_length


def split(dataset: tf.data.Dataset, sequence_length) -> tf.data.Dataset:
    """Chunks into inputs and targets: two of them in a row where inputs have a length of their own, as an encoder's have."""
    return split_pairs(sequence_length["targets"])(dataset) if "inputs" in sequence_length else split_anywhere(dataset)


@seqio.map_over_dataset(num_seeds=1)
@as_it_is
def split_anywhere(chunk, seed):
    """A chunk into inputs and targets, at a point uniform in 1 … n-1 of its n tokens."""
    tokens = chunk["targets"]
    point = _uniform(tf.size(tokens), seed)
    return {"inputs": tokens[:point], "targets": tokens[point:], "raw_tokens": chunk["raw_tokens"]}


def split_pairs(length: int) -> Callable:
    """Every two chunks as one example, the first split at a uniform point i, the second at n - i of n tokens.

    Inputs of both, then targets of both, fill a row; `<feature>_segment_ids` tell them apart, 1 and 2, as in SeqIO's packed
    examples. They stay one example, so that shuffling does not part them.
    """

    @seqio.map_over_dataset(num_seeds=1)
    @as_it_is
    def join(pair, seed):
        tokens, sizes = pair["targets"].values, tf.cast(pair["targets"].row_lengths(), tf.int32)
        one, other = sizes[0], tf.reduce_sum(sizes[1:])  # the last chunk may be alone
        point = _uniform(tf.constant(length), seed)
        cut = tf.clip_by_value(point, 1, tf.maximum(one - 1, 1))
        second = one + tf.minimum(tf.clip_by_value(length - point, 1, tf.maximum(other - 1, 1)), other)
        numbers = tf.constant([1, 2])
        return {
            "inputs": tf.concat([tokens[:cut], tokens[one:second]], axis=0),
            "inputs_segment_ids": tf.repeat(numbers, [cut, second - one]),
            "targets": tf.concat([tokens[cut:one], tokens[second:]], axis=0),
            "targets_segment_ids": tf.repeat(numbers, [one - cut, tf.size(tokens) - second]),
            "raw_tokens": tf.reduce_sum(pair["raw_tokens"]),
        }

    return lambda dataset: join(dataset.ragged_batch(2))


def _uniform(n: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform((), minval=1, maxval=tf.maximum(n, 2), seed=seed, dtype=tf.int32)


def denoise(whole: Any, objectives: Sequence[Any]) -> Callable:
    """Noise, of the objective that is a chunk's `kind`, and end tokens; by the `t5` library's functions.

    Args:
      whole: the objective that they are kinds of, which completes lengths.
      objectives: a `Denoising` for each kind.
    """

    def end(tokens, length, vocabulary):
        return tf.pad(tokens[: length - 1], [[0, 1]], constant_values=vocabulary.eos_id)

    def add_noise(dataset: tf.data.Dataset, sequence_length, output_features) -> tf.data.Dataset:
        sentinels = len(sentinels_of(output_features["targets"].vocabulary))
        lengths = whole.complete(_needed(sequence_length), "encoder_decoder", sentinels)

        def one(chunk, seed):
            kinds = [functools.partial(_noisy, o, sentinels, chunk, seed, output_features) for o in objectives]
            example = kinds[0]() if len(kinds) == 1 else tf.switch_case(chunk["kind"], kinds)
            ended = {name: end(tokens, lengths[name], output_features[name].vocabulary) for name, tokens in example.items()}
            return {**ended, "raw_tokens": chunk["raw_tokens"]}

        # A function of one's own may have Python's `if` over tensors in it.
        has_own = any(callable(view) for objective in objectives for view in (objective.inputs, objective.targets))
        return seqio.map_over_dataset(one if has_own else as_it_is(one), num_seeds=1)(dataset)

    return add_noise


def _noisy(objective, sentinels: int, chunk, seed, output_features):
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
        mode = sentinels_of(output_features["inputs"].vocabulary)[::-1][objective.mode]
        example["inputs"] = tf.pad(example["inputs"], [[1, 0]], constant_values=mode)
    return example


def _with_sentinels(function: Callable) -> Callable:
    """A function of the `t5` library's, which counts sentinels down from a vocabulary's last id, with the vocabulary's own."""

    def apply(tokens, noise_mask, vocabulary, seeds):
        ids, size = sentinels_of(vocabulary), vocabulary.vocab_size
        beyond = types.SimpleNamespace(vocab_size=size + len(ids))  # no text has these
        made = function(tokens, noise_mask, beyond, seeds)
        return tf.where(made < size, made, ids.start + ids.step * (beyond.vocab_size - 1 - made))

    return apply


def _noise_mask(objective, sentinels: int) -> Callable:
    if objective.mean_noise_span_length is not None:
        return lambda length, density, seeds: t5.random_spans_noise_mask(
            length, density, seeds, mean_noise_span_length=objective.mean_noise_span_length
        )

    def iid(length, density, seeds):
        """Without the spans for which there is no sentinel left, which are rare at the lengths that are computed."""
        mask = t5.iid_noise_mask(length, density, seeds)
        starts = mask & ~tf.pad(mask[:-1], [[1, 0]])
        return mask & (tf.cumsum(tf.cast(starts, tf.int32)) < objective.sentinels_left(sentinels))

    needs_sentinels = any(objective._costs("sentinels"))
    return iid if needs_sentinels else t5.iid_noise_mask


_token_to_sentinel = _with_sentinels(t5.noise_token_to_sentinel)


def random_or_sentinel(tokens, noise_mask, vocabulary, seeds):
    """10 % random tokens, 90 % the first sentinel, as `t5.noise_token_to_random_token_or_sentinel`; but no random sentinels."""
    use_random = tf.random.stateless_uniform(tf.shape(tokens), seed=seeds[0]) < 0.1
    return tf.where(
        use_random,
        tf.where(noise_mask, _random_tokens(tokens, vocabulary, seeds[1]), tokens),
        _token_to_sentinel(tokens, noise_mask, vocabulary, seeds=()),
    )


def _random_tokens(tokens, vocabulary, seed):
    """Any of the vocabulary but padding, end, unknown and sentinels."""
    stop = min(sentinels_of(vocabulary), default=vocabulary.vocab_size)
    return tf.random.stateless_uniform(tf.shape(tokens), seed, 3, stop, dtype=tokens.dtype)


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
    """Inputs with noise in them, the whole text as targets, loss weights on the noise; see `MaskedLm`."""

    def mask(dataset: tf.data.Dataset, output_features) -> tf.data.Dataset:
        vocabulary = output_features["inputs"].vocabulary

        @seqio.map_over_dataset(num_seeds=1)
        @as_it_is
        def one(chunk, seed):
            tokens, seeds = chunk["targets"], tf.unstack(tf.random.split(seed, 3))
            noise = t5.iid_noise_mask(tf.size(tokens), noise_density, seeds[:1])
            kind = tf.random.stateless_uniform(tf.shape(tokens), seeds[1])
            sentinel = _token_to_sentinel(tokens, noise, vocabulary, seeds=())
            random = tf.where(noise, _random_tokens(tokens, vocabulary, seeds[2]), tokens)
            inputs = tf.where(kind < 0.8, sentinel, tf.where(kind < 0.9, random, tokens))
            return {**chunk, "inputs": inputs, "loss_weights": tf.cast(noise, tf.int32)}

        return one(dataset)

    return mask


def truncated(tokens: int) -> Callable:
    """The first N tokens of all documents, the last one cut: the data set of a study of repeats."""

    def truncate(dataset: tf.data.Dataset) -> tf.data.Dataset:
        def take(before, document):
            n = tf.cast(tf.size(document["targets"]), tf.int64)
            left = tokens - before
            return before + n, {**document, "targets": document["targets"][: tf.maximum(left, 0)], "left": left}

        dataset = dataset.scan(tf.constant(0, tf.int64), take).take_while(lambda document: document["left"] > 0)
        return dataset.map(lambda document: {name: x for name, x in document.items() if name != "left"})

    return truncate
