"""Subsets of record sources: some splits, the first records."""

import weakref
from collections.abc import Sequence

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


class FirstRecords(seqio.DataSource):
    """Source with the first N training records of another source, and all of its other splits."""

    def __init__(self, source: seqio.DataSource, first: int):
        super().__init__(splits=source.splits)
        self._source, self._first = source, first
        self.min_kept_fraction = getattr(source, "min_kept_fraction", 1.0)

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return self._source.list_shards(split) and [f"the first {self._first}" if split == "train" else split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        if split != "train":
            return self._source.get_dataset(split, shuffle, seed, shard_info)
        dataset = self._source.get_dataset(split, shuffle=False).take(self._first)
        return dataset.shard(shard_info.num_shards, shard_info.index) if shard_info else dataset

    def num_input_examples(self, split: str) -> int | None:
        number = self._source.num_input_examples(split)
        return min(number, self._first) if number is not None and split == "train" else number


def first_records(source: seqio.DataSource, records: Records, split: str, count: int) -> list[bytes]:
    """Returns the first records of a split as JSON. They are read once per source."""
    cache = _first_records.setdefault(source, {})
    if (split, count) not in cache:
        lines = json_records(source.get_dataset(split, shuffle=False), records).take(count)
        cache[split, count] = [example["record"] for example in lines.as_numpy_iterator()]
    return cache[split, count]


_first_records: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
