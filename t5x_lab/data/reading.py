"""One shard of a task's training examples: its part of the records, through SeqIO's own steps, without end.

A shard is one of DATA_SHARDS equal parts of a task, whatever files it lies in: documents are drawn alike, and an epoch of all
shards meets each of them once. Seeds come from (run, task, shard): tasks over the same data set do not march in step, and the
n-th examples of two shards are not masked alike.
"""

import contextlib
import copy
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import told
from t5x_lab.data.caches import CachedFiles, opened, single
from t5x_lab.data.config import DataConfig
from t5x_lab.data.many import Shard, as_outside, same_in_all_shards
from t5x_lab.data.mixture import Part, no_inputs
from t5x_lab.data.preprocessors import truncated
from t5x_lab.data.sources import UNEVEN, can_be_shared, files_are_alike, longest_records, shares_of_files, sizes_of
from t5x_lab.observe.console import say

MANY = 16  # tasks, beyond which one buffer shuffles what was mixed: one for each would be gigabytes of position
ROTATION = 256  # records, at most, that a task begins behind the first where it is not shuffled by itself


def seed_of(*parts: int | str | tf.Tensor) -> int:
    """A seed of 31 bits from numbers and names; a shard that is a tensor adds nothing, as its graph has the shard's seed."""
    numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts if not tf.is_tensor(part)]
    return int(np.random.default_rng(numbers).integers(2**31))


def shard_of_task(part: Part, config: DataConfig, run_seed: int, shard: Shard, tasks: int) -> tf.data.Dataset:
    """Examples of one shard, endless; shuffled where a run has few tasks.

    Args:
      part: the task and its lengths.
      config: number of shards, buffer, `unique_tokens`.
      run_seed: SEED.
      shard: which; a tensor in a graph of all shards, which has the shard's seed.
      tasks: how many the run has.

    Raises:
      UserError: when the task needs a cache that is not there, or a preprocessor fails.
    """
    task = part.task
    seed = seed_of(run_seed, task.name, shard)
    always_alike = bool(config.unique_tokens) or not config.shuffle
    of_split = opened(task.source, config.split)
    source = ShardOfSource(of_split, shard, config.shards, seed_of(run_seed, task.name), in_order=always_alike)
    few = tasks <= MANY
    buffer = config.shuffle_buffer_size or task.shuffle_buffer_size
    try:
        if type(task).get_dataset is not seqio.Task.get_dataset:  # a class of the user's that reads in its own way
            own = copy.copy(task)
            own._source = source
            options = dict(num_epochs=None, try_in_mem_cache=False, trim_output_features=not part.is_text)
            return own.get_dataset(
                part.sequence_length, config.split, shuffle=config.shuffle, shuffle_buffer_size=buffer, seed=seed, **options
            )

        def without_end(dataset: tf.data.Dataset) -> tf.data.Dataset:
            if config.unique_tokens:
                share, rest = divmod(config.unique_tokens, config.shards)
                dataset = truncated(share + (shard < rest))(dataset)
            dataset = dataset.repeat()
            return dataset.skip(seed % ROTATION) if not few and config.shuffle and source.is_one_file(config.split) else dataset

        def through_steps() -> tf.data.Dataset:
            cached = task.preprocess_precache(source.get_dataset(config.split, seed=seed), seed=seed)
            return task.preprocess_postcache(without_end(cached), sequence_length=part.sequence_length, seed=seed)

        dataset = as_outside(through_steps)
        _check_features(dataset, part)
        return dataset.shuffle(buffer, seed=seed) if few and buffer and config.shuffle else dataset
    except (UserError, tf.errors.OpError):  # the latter are of what is read, see `failures`
        raise
    except Exception as error:
        raise UserError(f'The task "{task.name}" cannot be read at the lengths {dict(part.lengths)}: {told(error)}.') from error


def in_order(part: Part, split: str, trim: bool = False) -> tf.data.Dataset:
    """All examples of a split, once, in the order of the files; `trim` cuts them to their lengths."""
    return part.task.get_dataset(part.sequence_length, split, shuffle=False, seed=0, num_epochs=1, trim_output_features=trim)


def _check_features(dataset: tf.data.Dataset, part: Part) -> None:
    """Raises a `UserError` where the preprocessors do not make what is read; says what they make and nothing reads."""
    task, made = part.task, {name: spec for name, spec in dataset.element_spec.items() if spec.dtype != tf.string}
    required = [name for name, feature in task.output_features.items() if feature.required]
    for name in sorted({*required, *part.lengths}):
        if name not in made and name == "inputs" and name not in task.output_features:
            raise UserError(no_inputs(task))
        if name not in made and (name not in task.output_features or name in required):
            raise UserError(
                f'The preprocessors of task "{task.name}" make no "{name}", which its output_features or TASK_FEATURE_LENGTHS '
                f"promise; they make {', '.join(made)}."
            )
    if "inputs" in made and "inputs" not in {*task.output_features, *part.lengths} and "targets" in part.lengths:
        _say_unread_inputs(task.name)


@functools.cache
def _say_unread_inputs(task: str) -> None:
    say(f'The preprocessors of task "{task}" make inputs, which nothing reads: its output_features do not have them. Add them.')


class ShardOfSource(seqio.DataSource):
    """One of a number of equal parts of a source's records.

    Whole files where these are alike, TFDS's even splits, shares of large files, else every n-th record. A source with so few
    records that the parts would differ is not split: each shard reads all of it, in an order of its own. So is one whose tasks
    may leave out so many (`least_kept`) that nothing of a part were left: each shard begins at another place of it.

    Args:
      source: what is split.
      shard: which part.
      shards: how many there are.
      seed: of the order of files, the same for all parts, so that they stay disjoint.
      in_order: every epoch in the same order: `unique_tokens` must meet the same documents.
    """

    def __init__(self, source: seqio.DataSource, shard: Shard, shards: int, seed: int, in_order: bool = False):
        super().__init__(splits=source.splits)
        self._source, self._shard, self._shards, self._seed, self._in_order = source, shard, shards, seed, in_order

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return ["0"]

    def is_one_file(self, split: str) -> bool:
        return len(self._source.list_shards(split=split)) == 1

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        source, shards, shuffle = self._source, self._shards, not self._in_order
        part = seqio.ShardInfo(index=self._shard, num_shards=shards)
        in_graph = tf.is_tensor(self._shard)
        with tf.init_scope():
            number = None if shards == 1 or self._in_order else _number_if_small(source, split, shards)
            if number == 0:
                raise UserError(f"There is nothing to read in {', '.join(source.list_shards(split)[:3])}, the split {split}.")
            kept = getattr(source, "least_kept", 1.0)
            few = _number_if_small(source, split, shards, kept) if number is None and kept < 1 and shards > 1 else None
            is_split = shards > 1 and few is None and (number is None or (kept == 1 and not number % shards))
            sizes, longest = _bytes_of(source, split, shards, number) if is_split else ([], None)
            by_parts = is_split and (source.supports_arbitrary_sharding or files_are_alike(sizes, shards))
            by_shares = longest is not None and not by_parts and can_be_shared(sizes, shards, longest)
        # A graph has a source for each shard: one for all would draw the order of its files in turn, whoever comes first.
        with same_in_all_shards() if in_graph else contextlib.nullcontext():
            if by_shares:
                files, seed = source.list_shards(split), self._seed if shuffle else None
                if isinstance(source, CachedFiles) and source.origin.together > 1:
                    together = source.origin.together
                    return single(shares_of_files(source.read_together, files, sizes, part, seed, together, batched=True))
                return shares_of_files(source._reader, files, sizes, part, seed)
            read = source.get_dataset(split=split, shuffle=shuffle, seed=self._seed, shard_info=part if by_parts else None)
        if by_parts:
            return read
        if few is not None:
            before = few * self._shard // shards
            return read.skip(before).concatenate(read.take(before))
        if not is_split:
            own = seed_of(self._seed, self._shard)
            return read.shuffle(number, seed=own) if number and shuffle else read
        if number is None and not in_graph:
            if isinstance(source, seqio.TfdsDataSource):
                return _even_split(source, split, part, shuffle, self._seed)
            if isinstance(source, CachedFiles) and source.origin.addends:
                return source.even_split(split, part, shuffle, self._seed)
        return read.shard(shards, self._shard)


def _bytes_of(
    source: seqio.DataSource, split: str, shards: int, number: int | None
) -> tuple[Sequence[int | None], Callable[[], float] | None]:
    """Bytes of the files by which a source may be divided, and of the longest records where a shard may read parts of files.

    Args:
      source, split: what is divided into `shards`.
      number: as of `_number_if_small`.
    """
    if isinstance(source, CachedFiles):  # what it was made of decides
        longest = source.origin.longest
        by_size = number is None or source.origin.splits_itself
        return source.origin.sizes if by_size else [], None if longest is None else lambda: longest
    files, is_file = source.list_shards(split), isinstance(source, seqio.FileDataSource)
    if number is not None or source.supports_arbitrary_sharding or not (is_file or not len(files) % shards):
        return [], None
    sizes = sizes_of(files)
    # A class that reads in its own way is not read by its files.
    by_bytes = is_file and type(source).get_dataset is seqio.FileDataSource.get_dataset
    return sizes, (lambda: longest_records(source._reader, files, sizes)) if by_bytes else None


def _number_if_small(source: seqio.DataSource, split: str, shards: int, kept: float = 1.0) -> int | None:
    """Records of a source that has so few that parts of it would not be alike if this share is kept; None of any other."""
    enough = round(shards / UNEVEN / kept)
    known = source.num_input_examples(split) if type(source) in _KNOW_THEIR_NUMBER else None
    if known is None:
        # Templates over one data set have a source each.
        key = (type(source), *source.list_shards(split)) if type(source) in _OF_FILES else source
        if (key, enough) not in _counted:
            records = source.get_dataset(split=split, shuffle=False).take(enough)
            _counted[key, enough] = int(records.reduce(np.int64(0), lambda count, _: count + 1))
        known = _counted[key, enough]
    return known if known < enough else None


_counted: dict[tuple, int] = {}  # records of a source, as far as they matter
_OF_FILES = (seqio.TextLineDataSource, seqio.TFExampleDataSource, seqio.ProtoDataSource)
_KNOW_THEIR_NUMBER = (*_OF_FILES, seqio.TfdsDataSource, CachedFiles)


def _even_split(source: seqio.TfdsDataSource, split: str, part: seqio.ShardInfo, shuffle: bool, seed: int) -> tf.data.Dataset:
    loader = copy.copy(source.tfds_dataset)
    piece = tfds.even_splits(loader._map_split(split), n=part.num_shards, drop_remainder=False)[part.index]
    loader._map_split = lambda split: piece
    return loader.load(split, shuffle_files=shuffle, seed=seed)
