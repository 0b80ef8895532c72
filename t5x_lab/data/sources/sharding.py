"""Division of a source's files among data shards: whole files, or ranges of bytes."""

import bisect
import concurrent.futures
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.data.sources.storage import file_size

SAMPLED_FILES = 16  # files whose first records are read to estimate the length of records
MAX_IMBALANCE = 0.02  # relative difference of the sizes of shards
LARGE = 1 << 30  # bytes; of a smaller source each shard reads all and keeps every n-th record
_NUM_SLOTS = 1 << 32  # slots that the records of a file are spread over evenly
_SLOT_STEP = 2_654_435_769  # 2**32 divided by the golden ratio (Knuth, volume 3, 6.4)


def single_file_source(source: seqio.FileDataSource, split: str, file: str) -> seqio.FileDataSource:
    """Returns a copy of the source with one of its files."""
    single = copy.copy(source)
    single.list_shards = lambda split: [file]  # type: ignore[method-assign]  # the name may look like a pattern
    return single


def file_sizes(files: Sequence[str]) -> list[int | None]:
    """Returns the bytes of each file, None if a name is not that of a file."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        # Storage errors are raised: another shard might not see them and divide the text differently.
        return list(pool.map(file_size, files))


def have_equal_shards(sizes: Sequence[int | None], shards: int) -> bool:
    """Returns whether shards of whole files of these sizes are equal within 2 %."""
    if not sizes or len(sizes) % shards or None in sizes:  # None is the name of no file
        return False
    shard_sizes = np.array([sum(sizes[shard::shards]) for shard in range(shards)])  # type: ignore[arg-type]
    return bool(np.ptp(shard_sizes) <= MAX_IMBALANCE * shard_sizes.mean())


def can_split_by_bytes(sizes: Sequence[int | None], shards: int, longest: Callable[[], float]) -> bool:
    """Returns whether shards should read ranges of bytes: files are large, and a range has enough records.

    Args:
      sizes: bytes of the files.
      shards: number of shards.
      longest: returns `longest_record_bytes`.
    """
    if not sizes or None in sizes or sum(sizes) < LARGE:  # type: ignore[arg-type]
        return False
    return longest() <= MAX_IMBALANCE * sum(sizes) / shards  # type: ignore[arg-type]


def longest_record_bytes(read: Callable, files: Sequence[str], sizes: Sequence[int | None]) -> float:
    """Returns the mean bytes of a record in the file with the longest records, among a sample of files."""
    sample = {files[i * len(files) // SAMPLED_FILES] for i in range(min(SAMPLED_FILES, len(files)))}
    largest = files[int(np.argmax([size or 0 for size in sizes]))]
    return max(_mean_record_bytes(read, file) for file in (*sample, largest))


def _mean_record_bytes(read: Callable, file: str) -> float:
    """Returns the mean bytes of the first records of a file."""
    texts = [x for x in tf.nest.flatten(list(read(file).take(10).as_numpy_iterator())) if isinstance(x, bytes | np.ndarray)]
    lengths = [len(text) for x in texts for text in np.ravel(np.array(x, object))[:10] if isinstance(text, bytes)]
    return float(np.mean(lengths or [0]))


def read_file_shares(
    read: Callable,
    files: Sequence[str],
    sizes: Sequence[int | None],
    shard_info: seqio.ShardInfo,
    seed: int | None,
    batch: int = 1,
    batched: bool = False,
) -> tf.data.Dataset:
    """Returns a shard's equal part of the bytes of all files: some whole files, and shares of the first and last one.

    A file that several shards read is divided by record numbers, so that each record is in exactly one shard. Of 1,024 files,
    each of a thousand shards reads two or three.

    Args:
      read: f(file name) -> dataset of its records.
      files: file names.
      sizes: bytes of the files.
      shard_info: shard and number of shards. The shard may be a tensor.
      seed: seed of the file order. None = unchanged.
      batch: records that are read from one file before the next one.
      batched: whether `read` returns batches of this size, [n, ...]. The result is then batched too.
    """
    shares, first = _divide_bytes([size or 0 for size in sizes], shard_info.num_shards)
    share_numbers = tf.range(tf.gather(first, shard_info.index), tf.gather(first, shard_info.index + 1))
    own_shares = tf.data.Dataset.from_tensor_slices(tf.gather(shares, share_numbers))
    own_shares = own_shares if seed is None else own_shares.shuffle(int(np.diff(first).max()), seed=seed)
    names = tf.constant(list(files))

    def is_in_share(numbers: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        slot = numbers * _SLOT_STEP % _NUM_SLOTS
        return (slot >= share[1]) & (slot < share[2])

    def read_share(share: tf.Tensor) -> tf.data.Dataset:
        records = read(names[share[0]])
        if not batched:
            return records.enumerate().filter(lambda n, _: is_in_share(n, share)).map(lambda _, record: record)

        def filter_batch(start: tf.Tensor, records: Any):
            column = tf.nest.flatten(records)[0]
            end = start + (column.nrows() if isinstance(column, tf.RaggedTensor) else tf.shape(column, tf.int64)[0])
            mask = is_in_share(tf.range(start, end), share)
            return end, tf.nest.map_structure(lambda x: tf.ragged.boolean_mask(x, mask), records)

        return records.scan(np.int64(0), filter_batch).unbatch().ragged_batch(batch)

    block_length = 1 if batched else batch
    return own_shares.interleave(read_share, cycle_length=16, block_length=block_length, num_parallel_calls=tf.data.AUTOTUNE)


def _divide_bytes(sizes: Sequence[int], shards: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides the bytes of files into equal shards.

    Returns:
      (int64 [shares, 3]: file number, first slot, last slot + 1; int64 [shards + 1]: number of each shard's first share)
    """
    ends = list(itertools.accumulate(sizes))
    bounds = [ends[-1] * shard // shards for shard in range(shards + 1)]
    shares_by_shard: list[list[tuple[int, int, int]]] = []
    for low, high in itertools.pairwise(bounds):
        first, last = bisect.bisect_right(ends, low), bisect.bisect_left(ends, high)
        file_starts = [(file, ends[file] - sizes[file]) for file in range(first, last + 1) if sizes[file]]
        slot = lambda byte, file, start: min(max(byte - start, 0), sizes[file]) * _NUM_SLOTS // sizes[file]
        shares_by_shard.append([(file, slot(low, file, start), slot(high, file, start)) for file, start in file_starts])
    starts = list(itertools.accumulate(map(len, shares_by_shard), initial=0))
    shares = [share for group in shares_by_shard for share in group]
    return np.reshape(shares, (-1, 3)).astype(np.int64), np.array(starts)
