"""Subsets of record sources: some splits, a sample of the records."""

import functools
import heapq
import weakref
from collections.abc import Sequence

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import NotHere
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.records.json_records import json_records


class OnlySplits(seqio.DataSource):
    """Source with some of the splits of another source.

    Elements are {split: record}, so that preprocessors know the split. If the source has none of the splits, they are listed
    all the same, and reading them raises `NotHere`.

    Args:
      source: source with all splits.
      splits: splits to keep.
      dataset: name of the data set, for messages.
    """

    def __init__(self, source: seqio.DataSource, splits: Sequence[str], dataset: str):
        self._source, self._only, self._dataset = source, splits, dataset
        super().__init__(splits=splits)
        self.min_kept_fraction = getattr(source, "min_kept_fraction", 1.0)

    @property
    def splits(self) -> list[str]:
        return [split for split in self._only if split in self._source.splits] or list(self._only)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return self._source.supports_arbitrary_sharding

    def list_shards(self, split: str) -> Sequence[str]:
        if split not in self._source.splits:
            raise NotHere(
                f'The records of the data set "{self._dataset}" have no split "{split}". They have '
                f"{', '.join(self._source.splits)}. Add its files, or remove the task."
            )
        return self._source.list_shards(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **options) -> tf.data.Dataset:
        self.list_shards(split)
        return self._source.get_dataset(split, shuffle, seed, shard_info, **options).map(lambda record: {split: record})

    def num_input_examples(self, split: str) -> int | None:
        return self._source.num_input_examples(split)


class SampledRecords(seqio.DataSource):
    """Source with a sample of the training records of another source, and all of its other splits.

    The records are chosen by their hash and, if shuffled, read in one random order: many files are sorted by class. They are
    held in memory.

    Args:
      source: the source.
      number: number of training records. If the source has fewer, it keeps them all.
    """

    def __init__(self, source: seqio.DataSource, number: int):
        super().__init__(splits=source.splits)
        self._source, self._number = source, number
        self.min_kept_fraction = getattr(source, "min_kept_fraction", 1.0)

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return self._source.list_shards(split) and [f"{self._number} of the records" if split == "train" else split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        if split != "train":
            return self._source.get_dataset(split, shuffle, seed, shard_info)
        with tf.init_scope():
            records = self._records
        order = np.random.default_rng(seed or 0).permutation(len(records)) if shuffle else range(len(records))
        numbers = tf.data.Dataset.range(len(records))
        numbers = numbers.shard(shard_info.num_shards, shard_info.index) if shard_info else numbers

        @tf.autograph.experimental.do_not_convert
        def lookup(number: tf.Tensor) -> tf.Tensor:
            record = tf.numpy_function(lambda number: records[order[number]], [number], tf.string, stateful=False)
            return tf.ensure_shape(record, [])

        return numbers.map(lookup)

    def num_input_examples(self, split: str) -> int | None:
        number = self._source.num_input_examples(split)
        return min(number, self._number) if number is not None and split == "train" else number

    @functools.cached_property
    def _records(self) -> list[bytes]:
        return sample_records(self._source, None, "train", self._number)


def sample_records(source: seqio.DataSource, records: Records | None, split: str, number: int) -> list[bytes]:
    """Returns the records of a split with the smallest hashes, as JSON, in the order of the source. They are read once.

    Args:
      source: source of the records.
      records: settings of the records. `each` is applied.
      split: split to read.
      number: number of records. -1 = all.
    """
    cache = _samples.setdefault(source, {})
    if (split, number) not in cache:
        lines = json_records(source.get_dataset(split, shuffle=False), records).map(lambda example: example["record"])
        if number < 0:
            cache[split, number] = list(lines.as_numpy_iterator())
        else:
            hashed = lines.map(lambda line: (tf.strings.to_hash_bucket_fast(line, 1 << 62), line)).as_numpy_iterator()
            chosen = heapq.nsmallest(number, ((key, position, line) for position, (key, line) in enumerate(hashed)))
            cache[split, number] = [line for _, _, line in sorted(chosen, key=lambda record: record[1])]
    return cache[split, number]


_samples: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
