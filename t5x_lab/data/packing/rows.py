"""Packing of examples into rows of fixed length, with segment ids.

SeqIO packs one example at a time with a loop of TensorFlow ops, which takes as long as the objective. Here a group of examples
is assigned to rows at once.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from t5x_lab.config.log import log

GROUP = 512  # examples that are packed together
MAX_OPEN_ROWS = 10  # rows that are not full and may still take an example

_reported_lengths: set[int] = set()  # row lengths for which longer examples were reported
# A stream is one sequence of a row: all of its features have equal length, that of the first one. A feature called
# `<stream>_segment_ids` numbers the texts of an example from 1.
Streams = Mapping[str, Mapping[str, tf.RaggedTensor]]


def pack_batches(
    dataset: tf.data.Dataset, to_streams: Callable, finish: Callable, lengths: Mapping[str, int], rows: int, *, pack: bool,
    num_tasks: int, drop_remainder: bool, eos: Mapping[str, int], passthrough: tuple[str, ...] = (),
) -> tf.data.Dataset:  # fmt: skip
    """Packs examples into rows and batches rows.

    Args:
      dataset: examples with their features, the scalar `raw_tokens`, and for several tasks the scalar `task`, a number below
        `num_tasks`. Without `raw_tokens`, none are counted.
      to_streams: f(group of examples with ragged features) -> {stream: {feature: ragged tokens}}.
      finish: f(features of rows) -> features of rows, for features derived from others. It is called on many rows at once.
      lengths: tokens of a row by stream.
      rows: rows per batch.
      pack: whether a row may hold several examples.
      num_tasks: number of tasks.
      drop_remainder: whether a last batch with fewer rows is dropped.
      eos: EOS token by stream. A sequence longer than a row is truncated before it.
      passthrough: features that are kept unchanged if rows hold one example.

    Returns:
      A dataset of batches. Features are [rows, length], int32 unless they are floats. `raw_tokens` is [rows]. For several
      tasks, `task_tokens` [rows, num_tasks] counts the tokens of all streams by task. If rows or examples hold several texts,
      there are `<stream>_segment_ids` (from 1, 0 = padding) and `<stream>_positions` (from 0 in each segment).
    """

    @tf.autograph.experimental.do_not_convert
    def to_rows(group):
        ragged = {name: x if name in passthrough else _as_ragged(x) for name, x in group.items()}
        streams = {name: _truncate(stream, lengths[name], eos[name]) for name, stream in to_streams(ragged).items()}
        sizes = [next(iter(streams[name].values())).row_lengths() for name in lengths]
        examples = tf.cast(tf.stack(sizes, axis=1), tf.int32)
        ids = {name: streams[name].pop(f"{name}_segment_ids", None) for name in lengths}
        text_counts = [tf.reduce_max(x, axis=1) for x in ids.values() if x is not None]
        texts = tf.maximum(tf.reduce_max(tf.stack(text_counts), axis=0), 1) if text_counts else tf.ones_like(examples[:, 0])
        row, segment = _assign_rows(examples, texts, list(lengths.values())) if pack else _one_example_per_row(examples)
        order = tf.argsort(row, stable=True)  # examples of a row become adjacent
        num_rows = tf.reduce_max(row) + 1

        features = {}
        for (name, length), size in zip(lengths.items(), sizes, strict=True):
            flat = {feature: tf.gather(x, order).values for feature, x in streams[name].items()}
            sorted_sizes = tf.gather(size, order)
            row_sizes = tf.math.segment_sum(sorted_sizes, tf.gather(row, order))
            if pack or text_counts:
                text_sizes = tf.cast(sorted_sizes, tf.int32)
                segments = tf.repeat(tf.gather(segment, order), sorted_sizes)
                if ids[name] is not None:
                    text_ids = tf.gather(ids[name], order).values
                    text_sizes = _run_lengths(tf.repeat(tf.range(tf.size(order)), sorted_sizes), text_ids)
                    segments += text_ids - 1
                flat[f"{name}_segment_ids"] = segments
                flat[f"{name}_positions"] = tf.ragged.range(text_sizes).values
            for feature, values in flat.items():
                number = values if values.dtype.is_floating else tf.cast(values, tf.int32)
                by_row = tf.RaggedTensor.from_row_lengths(number, row_sizes, validate=False)
                features[feature] = by_row.to_tensor(shape=[None, length])
        if "raw_tokens" in group:
            features["raw_tokens"] = tf.math.unsorted_segment_sum(tf.cast(group["raw_tokens"], tf.int32), row, num_rows)
        if num_tasks > 1:
            tokens = tf.reduce_sum(examples, axis=1)
            by_task = tf.math.unsorted_segment_sum(tokens, row * num_tasks + group["task"], num_rows * num_tasks)
            features["task_tokens"] = tf.reshape(by_task, [num_rows, num_tasks])
        return finish({**features, **{name: group[name] for name in passthrough}})

    return dataset.ragged_batch(GROUP).map(to_rows, tf.data.AUTOTUNE).rebatch(rows, drop_remainder)


def _truncate(stream: Mapping[str, tf.RaggedTensor], length: int, eos: int) -> Mapping[str, tf.RaggedTensor]:
    """Truncates sequences to `length`, before their EOS token. Only a user's preprocessors make longer ones."""
    tokens = next(iter(stream.values()))
    sizes = tokens.row_lengths()

    def truncate():
        size = tf.minimum(sizes, length)
        position = tf.ragged.range(size, row_splits_dtype=tokens.row_splits.dtype)
        last = tf.gather(tokens.values, tf.maximum(tokens.row_limits() - 1, 0))
        has_eos = (sizes > length) & (last == tf.cast(eos, last.dtype))
        is_eos = tf.repeat(has_eos, size) & (position.values == length - 1)
        source = tf.where(is_eos, tf.repeat(sizes - 1, size), position.values)
        source += tf.repeat(tokens.row_starts(), size)
        return {name: position.with_values(tf.gather(x.values, source)) for name, x in stream.items()}

    return tf.cond(_has_longer(sizes, length), truncate, lambda: dict(stream))


def _has_longer(sizes: tf.Tensor, length: int) -> tf.Tensor:
    """Returns whether any sequence is longer than `length`. Logs the first one."""

    def any_longer(sizes: np.ndarray) -> np.ndarray:
        longest = int(sizes.max(initial=0))
        if longest > length and length not in _reported_lengths:
            _reported_lengths.add(length)
            log(
                f"Some examples have {longest} tokens or more, but a row has {length}. They are truncated before their EOS "
                "token. Respect TASK_FEATURE_LENGTHS in the preprocessors of the task or objective, or increase them."
            )
        return np.array(longest > length)

    return tf.ensure_shape(tf.numpy_function(any_longer, [sizes], tf.bool, stateful=False), [])


def _as_ragged(x):
    """Converts features of static length, which are batched as matrices, to ragged tensors."""
    return tf.RaggedTensor.from_tensor(x) if isinstance(x, tf.Tensor) and x.shape.rank == 2 else x


def _run_lengths(*keys: tf.Tensor) -> tf.Tensor:
    """Returns the length of each run of equal keys."""
    begins = tf.reduce_any(tf.stack([key[1:] != key[:-1] for key in keys]), axis=0)
    number = tf.cumsum(tf.pad(tf.cast(begins, tf.int32), [[1, 0]]))[: tf.size(keys[0])]
    return tf.math.segment_sum(tf.ones_like(number), number)


def _one_example_per_row(examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    row = tf.range(tf.shape(examples)[0])
    return row, tf.ones_like(row)


def _assign_rows(examples: tf.Tensor, texts: tf.Tensor, limits: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    fit = lambda sizes, texts: first_fit(sizes, limits, texts)
    assignment = tf.numpy_function(fit, [examples, texts], tf.int32, stateful=False)
    return tuple(tf.unstack(tf.ensure_shape(assignment, [None, 2]), axis=1))


def first_fit(sizes: np.ndarray, limits: list[int], texts: np.ndarray | None = None) -> np.ndarray:
    """Assigns each example to the first open row with enough room in every stream, else to a new row.

    A row is closed when any stream is full, or when there are ten newer open rows.

    Args:
      sizes: tokens, int [examples, streams].
      limits: tokens of a row by stream.
      texts: number of texts of each example, int [examples]. Default: one.

    Returns:
      int32 [examples, 2]: row, and segment number (from 1) of the example's first text.
    """
    assignment = np.empty((len(sizes), 2), np.int32)
    open_rows: list[list] = []  # [row, segments, used in each stream]
    num_rows = 0
    counts = [1] * len(sizes) if texts is None else texts.tolist()
    for example, size in enumerate(sizes.tolist()):
        for open_row in open_rows:
            if all(used + added <= limit for used, added, limit in zip(open_row[2], size, limits, strict=True)):
                break
        else:
            open_row = [num_rows, 0, [0] * len(limits)]
            open_rows.append(open_row)
            num_rows += 1
        row, segments, used = open_row
        assignment[example] = [row, segments + 1]
        open_row[1], open_row[2] = segments + counts[example], [a + b for a, b in zip(used, size, strict=True)]
        if any(used == limit for used, limit in zip(open_row[2], limits, strict=True)):
            open_rows.remove(open_row)  # it is full
        del open_rows[:-MAX_OPEN_ROWS]
    return assignment
