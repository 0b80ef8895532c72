"""One logical shard of a source: one of DATA_SHARDS equal parts of its records, whatever files they are in."""

import contextlib
import copy
import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from t5x_lab.config.errors import UserError
from t5x_lab.data.cache.reading import CachedFiles, unbatch_examples
from t5x_lab.data.pipeline.graph import Shard, shared_shard_seed
from t5x_lab.data.pipeline.seeds import derive_seed
from t5x_lab.data.sources.sharding import (
    MAX_IMBALANCE,
    can_split_by_bytes,
    file_sizes,
    have_equal_shards,
    longest_record_bytes,
    read_file_shares,
)


class Strategy(enum.Enum):
    """Strategies to divide a source into shards of equal size."""

    WHOLE = enum.auto()  # every shard reads all records, each in its own order
    ROTATED = enum.auto()  # every shard reads all records, each from another start
    WHOLE_FILES = enum.auto()  # the source divides itself, or shards get whole files of equal size
    BYTE_RANGES = enum.auto()  # shards get ranges of the bytes of large files
    RECORD_RANGES = enum.auto()  # shards get ranges of records, as TFDS divides them
    EVERY_NTH = enum.auto()  # shards read all records and keep every n-th


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Division of a source into shards.

    Attributes:
      strategy: the strategy.
      num_records: number of records of a small source, for WHOLE and ROTATED.
      sizes: bytes of the files, for BYTE_RANGES.
    """

    strategy: Strategy
    num_records: int | None = None
    sizes: Sequence[int | None] = ()


def plan_sharding(source: seqio.DataSource, split: str, shards: int, fixed_order: bool, in_graph: bool) -> ShardingPlan:
    """Chooses how to divide a source.

    A source with so few records that shards would differ is not divided: each shard reads all of it in its own order. Neither
    is a source whose tasks may drop so many records (`min_kept_fraction`) that nothing of a shard might remain: each shard
    starts at another record.

    Args:
      source: the source.
      split: the split.
      shards: number of shards.
      fixed_order: whether every epoch must have the same order.
      in_graph: whether the shard number is a tensor. TFDS cannot divide a source then.

    Raises:
      UserError: if the split is empty.
    """
    if shards == 1:
        return ShardingPlan(Strategy.WHOLE)
    num_records = None if fixed_order else _count_if_small(source, split, shards)
    if num_records == 0:
        raise UserError(f"There are no records in {', '.join(source.list_shards(split)[:3])}, the split {split}.")
    kept_fraction = getattr(source, "min_kept_fraction", 1.0)
    if num_records is not None and (kept_fraction < 1 or num_records % shards):
        return ShardingPlan(Strategy.WHOLE, num_records)
    if num_records is None and kept_fraction < 1:
        few = _count_if_small(source, split, shards, kept_fraction)
        if few is not None:
            return ShardingPlan(Strategy.ROTATED, few)
    sizes, longest_record = _file_sizes(source, split, shards, num_records)
    if source.supports_arbitrary_sharding or have_equal_shards(sizes, shards):
        return ShardingPlan(Strategy.WHOLE_FILES)
    if longest_record is not None and can_split_by_bytes(sizes, shards, longest_record):
        return ShardingPlan(Strategy.BYTE_RANGES, sizes=sizes)
    has_ranges = isinstance(source, seqio.TfdsDataSource) or (isinstance(source, CachedFiles) and source.origin.addends)
    if num_records is None and not in_graph and has_ranges:
        return ShardingPlan(Strategy.RECORD_RANGES)
    return ShardingPlan(Strategy.EVERY_NTH)


class SourceShard(seqio.DataSource):
    """One shard of a source.

    Args:
      source: source that is divided.
      shard: number of the shard.
      shards: number of shards.
      seed: seed of the file order, the same for all shards, so that they stay disjoint.
      fixed_order: whether every epoch has the same order. `unique_tokens` must repeat the same documents.
    """

    def __init__(self, source: seqio.DataSource, shard: Shard, shards: int, seed: int, fixed_order: bool = False):
        super().__init__(splits=source.splits)
        self._source, self._shard, self._shards, self._seed, self._fixed_order = source, shard, shards, seed, fixed_order

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return ["0"]

    def is_one_file(self, split: str) -> bool:
        return len(self._source.list_shards(split=split)) == 1

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        source, shuffle, in_graph = self._source, not self._fixed_order, tf.is_tensor(self._shard)
        shard_info = seqio.ShardInfo(index=self._shard, num_shards=self._shards)
        with tf.init_scope():
            plan = plan_sharding(source, split, self._shards, self._fixed_order, in_graph)
        # A graph has one source for all shards. With a seed per shard each would order the files differently.
        with shared_shard_seed() if in_graph else contextlib.nullcontext():
            match plan.strategy:
                case Strategy.WHOLE_FILES:
                    return source.get_dataset(split=split, shuffle=shuffle, seed=self._seed, shard_info=shard_info)
                case Strategy.BYTE_RANGES:
                    return _read_byte_range(source, split, plan.sizes, shard_info, self._seed if shuffle else None)
                case Strategy.RECORD_RANGES:
                    return _read_record_range(source, split, shard_info, shuffle, self._seed)
            records = source.get_dataset(split=split, shuffle=shuffle, seed=self._seed)
        match plan.strategy:
            case Strategy.ROTATED:
                assert plan.num_records is not None
                start = plan.num_records * self._shard // self._shards
                return records.skip(start).concatenate(records.take(start))
            case Strategy.WHOLE:
                own_seed = derive_seed(self._seed, self._shard)
                return records.shuffle(plan.num_records, seed=own_seed) if plan.num_records and shuffle else records
        return records.shard(self._shards, self._shard)


def _read_byte_range(
    source: seqio.DataSource, split: str, sizes: Sequence[int | None], shard_info: seqio.ShardInfo, seed: int | None
) -> tf.data.Dataset:
    files = source.list_shards(split)
    if isinstance(source, CachedFiles) and source.origin.together > 1:
        batch = source.origin.together
        shares = read_file_shares(source.read_batches, files, sizes, shard_info, seed, batch, batched=True)
        return unbatch_examples(shares)
    return read_file_shares(source._reader, files, sizes, shard_info, seed)


def _read_record_range(
    source: seqio.DataSource, split: str, shard_info: seqio.ShardInfo, shuffle: bool, seed: int
) -> tf.data.Dataset:
    if isinstance(source, CachedFiles):
        return source.even_split(split, shard_info, shuffle, seed)
    loader = copy.copy(source.tfds_dataset)
    parts = tfds.even_splits(loader._map_split(split), n=shard_info.num_shards, drop_remainder=False)
    loader._map_split = lambda split: parts[shard_info.index]
    return loader.load(split, shuffle_files=shuffle, seed=seed)


def _file_sizes(
    source: seqio.DataSource, split: str, shards: int, num_records: int | None
) -> tuple[Sequence[int | None], Callable[[], float] | None]:
    """Returns (bytes of the files, f() -> bytes of the longest records).

    The first is empty if the source cannot be divided by files, the second None if a shard cannot read parts of files.
    """
    if isinstance(source, CachedFiles):  # divided like the source that it was made of
        longest = source.origin.longest
        by_size = num_records is None or source.origin.splits_itself
        return source.origin.sizes if by_size else [], None if longest is None else lambda: longest
    files, is_file = source.list_shards(split), isinstance(source, seqio.FileDataSource)
    if num_records is not None or source.supports_arbitrary_sharding or not (is_file or not len(files) % shards):
        return [], None
    sizes = file_sizes(files)
    # A subclass with its own get_dataset may not read its files one by one.
    reads_files = is_file and type(source).get_dataset is seqio.FileDataSource.get_dataset
    return sizes, (lambda: longest_record_bytes(source._reader, files, sizes)) if reads_files else None


def _count_if_small(source: seqio.DataSource, split: str, shards: int, kept_fraction: float = 1.0) -> int | None:
    """Returns the number of records if shards would differ noticeably, given the fraction that is kept, else None."""
    enough = round(shards / MAX_IMBALANCE / kept_fraction)
    number = source.num_input_examples(split) if type(source) in _WITH_KNOWN_LENGTH else None
    if number is None:
        # Templates over one data set have a source each.
        key = (type(source), *source.list_shards(split)) if type(source) in _FILE_SOURCES else source
        if (key, enough) not in _record_counts:
            records = source.get_dataset(split=split, shuffle=False).take(enough)
            _record_counts[key, enough] = int(records.reduce(np.int64(0), lambda count, _: count + 1))
        number = _record_counts[key, enough]
    return number if number < enough else None


_record_counts: dict[tuple, int] = {}  # number of records of a source, up to a limit
_FILE_SOURCES = (seqio.TextLineDataSource, seqio.TFExampleDataSource, seqio.ProtoDataSource)
_WITH_KNOWN_LENGTH = (*_FILE_SOURCES, seqio.TfdsDataSource, CachedFiles)
