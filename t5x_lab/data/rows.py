"""Examples into rows of fixed length: several short ones packed into one, told apart by segment ids.

SeqIO packs one example after the other with a loop of TensorFlow ops, which costs as much as the objective does. Here a
group of examples is assigned to rows at once, and put in their order.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from t5x_lab.observe.console import say

GROUP = 512  # examples that are packed together
LOOK_BACK = 10  # rows that are not full and may still take an example

_said: set[int] = set()  # lengths of rows, of which it was said that examples are longer
# A stream is one sequence of a row; its first feature gives the examples' lengths there, the others are as long. One called
# `<stream>_segment_ids` tells texts apart that come as one example, by numbers from 1.
Streams = Mapping[str, Mapping[str, tf.RaggedTensor]]


def batches_of_rows(
    dataset: tf.data.Dataset, to_streams: Callable, finish: Callable, lengths: Mapping[str, int], rows: int, *, pack: bool,
    num_tasks: int, drop_remainder: bool, end: int, kept: tuple[str, ...] = (),
) -> tf.data.Dataset:  # fmt: skip
    """Batches of rows that examples are put into.

    Args:
      dataset: examples with the scalars `raw_tokens`, and of several tasks `task` (a number below `num_tasks`), beside their
        features; without `raw_tokens`, none are counted.
      to_streams: f(a group of examples, features ragged) -> {stream: {feature: ragged tokens}}.
      finish: f(features of rows) -> features of rows, for what a row's features say of each other. Called on many rows at
        once: on small batches its operations would cost more than their work.
      lengths: tokens of a row by stream.
      rows: of a batch.
      pack: whether a row may hold several examples.
      num_tasks: how many tasks there are.
      drop_remainder: whether a last batch with fewer rows is left out.
      end: the end token: a sequence that is longer than a row is cut before it.
      kept: features that go over as they are, of rows that hold one example.

    Returns:
      a dataset of batches: every feature [rows, length], int32 where it is not of floats; `raw_tokens` [rows] and, of several
      tasks, `task_tokens` [rows, num_tasks], tokens of all streams by task; where rows or examples hold several texts,
      `<stream>_segment_ids` (from 1, 0 = padding) and `<stream>_positions` (from 0 in each segment).
    """

    @tf.autograph.experimental.do_not_convert
    def to_rows(group):
        ragged = {name: x if name in kept else _as_ragged(x) for name, x in group.items()}
        streams = {name: _cut(stream, lengths[name], end) for name, stream in to_streams(ragged).items()}
        sizes = [next(iter(streams[name].values())).row_lengths() for name in lengths]
        examples = tf.cast(tf.stack(sizes, axis=1), tf.int32)
        ids = {name: streams[name].pop(f"{name}_segment_ids", None) for name in lengths}
        several = [tf.reduce_max(x, axis=1) for x in ids.values() if x is not None]
        texts = tf.maximum(tf.reduce_max(tf.stack(several), axis=0), 1) if several else tf.ones_like(examples[:, 0])
        row, segment = _places(examples, texts, list(lengths.values())) if pack else _rows_of_their_own(examples)
        order = tf.argsort(row, stable=True)  # examples of a row one after the other
        num_rows = tf.reduce_max(row) + 1

        features = {}
        for (name, length), size in zip(lengths.items(), sizes, strict=True):
            flat = {feature: tf.gather(x, order).values for feature, x in streams[name].items()}
            in_order = tf.gather(size, order)
            in_rows = tf.math.segment_sum(in_order, tf.gather(row, order))
            if pack or several:
                of_texts = tf.cast(in_order, tf.int32)
                segments = tf.repeat(tf.gather(segment, order), in_order)
                if ids[name] is not None:
                    own = tf.gather(ids[name], order).values
                    of_texts = _runs(tf.repeat(tf.range(tf.size(order)), in_order), own)
                    segments += own - 1
                flat[f"{name}_segment_ids"] = segments
                flat[f"{name}_positions"] = tf.ragged.range(of_texts).values
            for feature, values in flat.items():
                number = values if values.dtype.is_floating else tf.cast(values, tf.int32)
                by_row = tf.RaggedTensor.from_row_lengths(number, in_rows, validate=False)
                features[feature] = by_row.to_tensor(shape=[None, length])
        if "raw_tokens" in group:
            features["raw_tokens"] = tf.math.unsorted_segment_sum(tf.cast(group["raw_tokens"], tf.int32), row, num_rows)
        if num_tasks > 1:
            tokens = tf.reduce_sum(examples, axis=1)
            by_task = tf.math.unsorted_segment_sum(tokens, row * num_tasks + group["task"], num_rows * num_tasks)
            features["task_tokens"] = tf.reshape(by_task, [num_rows, num_tasks])
        return finish({**features, **{name: group[name] for name in kept}})

    return dataset.ragged_batch(GROUP).map(to_rows, tf.data.AUTOTUNE).rebatch(rows, drop_remainder)


def _cut(stream: Mapping[str, tf.RaggedTensor], length: int, end: int) -> Mapping[str, tf.RaggedTensor]:
    """Sequences of at most `length`; what a preprocessor of one's own made longer loses what lies before its end token."""
    tokens = next(iter(stream.values()))
    sizes = tokens.row_lengths()

    def cut():
        size = tf.minimum(sizes, length)
        place = tf.ragged.range(size, row_splits_dtype=tokens.row_splits.dtype)
        last = tf.gather(tokens.values, tf.maximum(tokens.row_limits() - 1, 0))
        ended = (sizes > length) & (last == tf.cast(end, last.dtype))
        source = tf.where(tf.repeat(ended, size) & (place.values == length - 1), tf.repeat(sizes - 1, size), place.values)
        source += tf.repeat(tokens.row_starts(), size)
        return {name: place.with_values(tf.gather(x.values, source)) for name, x in stream.items()}

    return tf.cond(_is_longer(sizes, length), cut, lambda: dict(stream))


def _is_longer(sizes: tf.Tensor, length: int) -> tf.Tensor:
    """Whether any is, which is said once."""

    def any_longer(sizes: np.ndarray) -> np.ndarray:
        longest = int(sizes.max(initial=0))
        if longest > length and length not in _said:
            _said.add(length)
            say(
                f"Some examples have {longest} tokens or more where a row has room for {length}; they are cut before their end "
                "token. Keep to TASK_FEATURE_LENGTHS in the task's or the objective's preprocessors, or raise them."
            )
        return np.array(longest > length)

    return tf.ensure_shape(tf.numpy_function(any_longer, [sizes], tf.bool, stateful=False), [])


def _as_ragged(x):
    """Features whose length TensorFlow knows come as matrices."""
    return tf.RaggedTensor.from_tensor(x) if isinstance(x, tf.Tensor) and x.shape.rank == 2 else x


def _runs(*keys: tf.Tensor) -> tf.Tensor:
    """How long each run of equal keys is."""
    begins = tf.reduce_any(tf.stack([key[1:] != key[:-1] for key in keys]), axis=0)
    number = tf.cumsum(tf.pad(tf.cast(begins, tf.int32), [[1, 0]]))[: tf.size(keys[0])]
    return tf.math.segment_sum(tf.ones_like(number), number)


def _rows_of_their_own(examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    row = tf.range(tf.shape(examples)[0])
    return row, tf.ones_like(row)


def _places(examples: tf.Tensor, texts: tf.Tensor, limits: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    fit = lambda sizes, texts: first_fit(sizes, limits, texts)
    place = tf.numpy_function(fit, [examples, texts], tf.int32, stateful=False)
    return tuple(tf.unstack(tf.ensure_shape(place, [None, 2]), axis=1))


def first_fit(sizes: np.ndarray, limits: list[int], texts: np.ndarray | None = None) -> np.ndarray:
    """Puts each example into the first open row with enough room in every stream, else into a new one.

    A row is closed when it is full in any stream, and when there are ten newer open ones.

    Args:
      sizes: int [examples, streams].
      limits: of each stream.
      texts: int [examples], of each; one by default.

    Returns:
      int32 [examples, 2]: row, and segment (from 1) of the first text in it.
    """
    place = np.empty((len(sizes), 2), np.int32)
    open_rows: list[list] = []  # [row, segments, used in each stream]
    num_rows = 0
    counts = [1] * len(sizes) if texts is None else texts.tolist()
    for example, size in enumerate(sizes.tolist()):
        for found in open_rows:
            if all(used + more <= limit for used, more, limit in zip(found[2], size, limits, strict=True)):
                break
        else:
            found = [num_rows, 0, [0] * len(limits)]
            open_rows.append(found)
            num_rows += 1
        row, segments, used = found
        place[example] = [row, segments + 1]
        found[1], found[2] = segments + counts[example], [a + b for a, b in zip(used, size, strict=True)]
        if any(used == limit for used, limit in zip(found[2], limits, strict=True)):
            open_rows.remove(found)  # it is full
        del open_rows[:-LOOK_BACK]
    return place
