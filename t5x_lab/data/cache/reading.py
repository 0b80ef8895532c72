"""Reading of SeqIO caches in place of a task's source, in the order of the source itself."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.config.temporary import copy_file, make_temporary_folder
from t5x_lab.data.config import DataConfig
from t5x_lab.data.sources.storage import is_known_to_tensorflow, list_matches, read_copies
from t5x_lab.data.vocabularies.build import fingerprint
from t5x_lab.data.vocabularies.config import Vocabulary

COMPLETED = "COMPLETED"
MANIFEST = "t5x_lab.json"  # beside SeqIO's files: the vocabulary, and properties of each split's source


@dataclasses.dataclass(frozen=True)
class Origin:
    """Properties of a split's source that decide how it is divided among shards and in which order it is read.

    Attributes:
      sizes: bytes of its files, None for a shard that is not a file.
      splits_itself: its `supports_arbitrary_sharding`.
      longest: `longest_record_bytes` if shards may read ranges of bytes, else None.
      examples: its `num_input_examples` if known without counting.
      addends: examples of each summand of a TFDS split ("train[:90%]+test" has two), empty for other sources.
      together: records that it reads as one element of the interleaved files.
      cycle_length, block_length, file_shuffle_buffer_size: see `seqio.FileDataSource`.
      min_kept_fraction: minimum share of the records that a task keeps.
    """

    sizes: Sequence[int | None]
    splits_itself: bool
    longest: float | None = None
    examples: int | None = None
    addends: Sequence[int] = ()
    together: int = 1
    cycle_length: int = 16
    block_length: int = 16
    file_shuffle_buffer_size: int | None = None
    min_kept_fraction: float = 1.0


class CachedFiles(seqio.FileDataSource):
    """Source of the files of a cache, read in the order of the original source.

    Args:
      cached: SeqIO's source of the cache.
      files: cache files by split, in the order of the original files.
      origin: properties of the original source.
      lengths: number of examples in each file.
      records: number of records that they were made of, None if unknown.
    """

    def __init__(
        self,
        cached: seqio.FileDataSource,
        files: Mapping[str, Sequence[str]],
        origin: Origin,
        lengths: Sequence[int],
        records: int | None = None,
    ):
        is_one_to_one = records in (None, sum(lengths))
        super().__init__(
            cached._reader,
            files,
            num_input_examples={split: origin.examples or sum(lengths) for split in files},
            file_shuffle_buffer_size=origin.file_shuffle_buffer_size,
            # Examples of one record, such as the choices of a question, stay adjacent.
            cycle_length=origin.cycle_length if is_one_to_one else 1,
            block_length=origin.block_length,
        )
        self.origin, self._lengths, self.min_kept_fraction = origin, lengths, origin.min_kept_fraction

    def list_shards(self, split: str) -> Sequence[str]:
        return self._split_to_filepattern[split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        if self.origin.together == 1:
            return super().get_dataset(split, shuffle, seed, shard_info)
        batched = copy.copy(self)  # files are interleaved in the same batches as those of the source
        batched._reader = self.read_batches
        return unbatch_examples(seqio.FileDataSource.get_dataset(batched, split, shuffle, seed, shard_info))

    def read_batches(self, file: tf.Tensor) -> tf.data.Dataset:
        """Returns the examples of a file in batches of the size that the source read."""
        return self._reader(file).ragged_batch(self.origin.together)

    def even_split(self, split: str, shard_info: seqio.ShardInfo, shuffle: bool, seed: int) -> tf.data.Dataset:
        """Returns the shard's range of examples, as `tfds.even_splits` divides the source."""
        ends = list(itertools.accumulate(self._lengths))
        addends = (
            self.origin.addends if sum(self.origin.addends) == ends[-1] else ends[-1:]
        )  # preprocessors changed the number of examples
        ranges = []  # file, first, number
        for begin, addend in zip(itertools.accumulate(addends, initial=0), addends, strict=False):
            share, rest = divmod(addend, shard_info.num_shards)
            low = begin + share * shard_info.index + min(shard_info.index, rest)
            high = low + share + (shard_info.index < rest)
            for file, end in enumerate(ends):
                first = end - self._lengths[file]
                if max(low, first) < min(high, end):
                    ranges.append((file, max(low - first, 0), min(high, end) - max(low, first)))
        names = tf.constant(self.list_shards(split))
        files = tf.data.Dataset.from_tensor_slices(np.array(ranges, np.int64))
        files = files.shuffle(len(ranges), seed=seed) if shuffle else files
        return files.interleave(
            lambda piece: self._reader(names[piece[0]]).skip(piece[1]).take(piece[2]),
            cycle_length=self._cycle_length,
            block_length=self._block_length,
            num_parallel_calls=tf.data.AUTOTUNE,
        )


def unbatch_examples(examples: tf.data.Dataset) -> tf.data.Dataset:
    """Reverses `ragged_batch`."""
    return examples.unbatch().map(lambda example: example)  # the map converts ragged tensors of rank 1 to tensors


def task_cache_dir(cache: str, task: str) -> epath.Path:
    """Returns the folder of a task in a cache directory."""
    return epath.Path(cache) / seqio.get_task_dir_from_name(task)


def is_complete(cache: str, task: seqio.Task, vocabulary: Vocabulary) -> bool:
    """Returns whether the cache has the task.

    Raises:
      UserError: if the cache was made with another vocabulary or from another text.
    """
    folder = task_cache_dir(cache, task.name)
    if not (folder / COMPLETED).exists():
        return False
    check_cache_identity(folder, read_manifest(folder), task, vocabulary)
    return True


def use_cache(task: seqio.Task, config: DataConfig) -> seqio.Task:
    """Returns the task with its cache as source and without the cached steps, if the run reads it from a cache."""
    if not (task.requires_caching or (config.use_cached and task.supports_caching)):
        return task
    cached = copy.copy(task)  # SeqIO's `replace` would make a plain Task of a subclass
    cached._source = CachedTaskSource(task, config)
    num_cached, steps = task._cache_step_idx, task.preprocessors
    # Identity steps replace the cached ones, since the seeds of later steps depend on their number.
    placeholder = seqio.CacheDatasetPlaceholder()
    cached._preprocessor_constructor_args = (*[_identity] * num_cached, placeholder, *steps[num_cached + 1 :])
    cached._cache_dataset_placerholder = placeholder
    cached.__dict__.pop("preprocessors", None)  # SeqIO's cached property
    return cached


def _identity(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


class CachedTaskSource(seqio.DataSource):
    """Source that reads a task's cache. The original source need not exist. The cache is located on first use.

    Args:
      task: the task.
      config: cache folders, and the vocabulary that the cache must have.
    """

    def __init__(self, task: seqio.Task, config: DataConfig):
        super().__init__(splits=())
        self._task, self._config = task, config
        self._sources: dict[str, seqio.FileDataSource] = {}

    supports_arbitrary_sharding = False

    @functools.cached_property
    def folder(self) -> epath.Path:
        """Folder of the task in the first cache directory that has it, the run's first, then SeqIO's.

        Raises:
          NotHere: if none has it.
        """
        folders = [*self._config.cache_dirs, *seqio.utils.get_global_cache_dirs()]
        for cache in folders:
            if is_complete(cache, self._task, self._config.vocabulary):
                return task_cache_dir(cache, self._task.name)
        raise NotHere(
            f'The task "{self._task.name}" needs a cache, and there is none in the cache directories '
            f"({', '.join(folders) or 'none is set'}). Create one with t5x_lab cache or seqio_cache_tasks, and set its folder "
            "with --gin.CACHE_DIRS='[\"FOLDER\"]'."
        )

    @functools.cached_property
    def description(self) -> epath.Path:
        """Folder with the files that describe the cache, which SeqIO reads: its own, or one with copies."""
        if is_known_to_tensorflow(str(self.folder)):
            return self.folder
        copies = epath.Path(make_temporary_folder())
        for file in self.folder.iterdir():
            if file.name == COMPLETED or file.name.endswith(".json"):
                copy_file(file, copies / file.name)
        return copies

    @property
    def splits(self) -> Sequence[str]:
        """The task's splits. If they need the source and it is missing, the cache's splits."""
        try:
            return self._task.splits
        except Exception:  # a user's source may raise anything
            manifest = read_manifest(self.folder)
            infos = [path.name for path in self.folder.glob("info.*.json")]
            return sorted(manifest["splits"]) if manifest else [name[len("info.") : -len(".json")] for name in infos]

    @functools.cached_property
    def stats(self) -> dict:
        """Cache statistics by split, filled by SeqIO."""
        return {}

    def split_source(self, split: str) -> seqio.FileDataSource:
        """Returns the source of a split: `CachedFiles`, or SeqIO's source if SeqIO wrote the cache.

        Raises:
          UserError: for a missing split, or a cache with another vocabulary.
        """
        if split not in self._sources:
            with tf.init_scope():  # outside the graph of many tasks
                self._sources[split] = self._open(split)
        return self._sources[split]

    def _open(self, split: str) -> seqio.FileDataSource:
        if not epath.Path(seqio.get_cached_info_path(str(self.folder), split)).exists():
            raise UserError(
                f'The cache of task "{self._task.name}", {self.folder}, has no split "{split}". Remove the folder, and cache '
                "the task again with that split."
            )
        task = copy.copy(self._task)
        task._cache_dir = str(self.description)
        source, manifest = task._get_cached_source(split), read_manifest(self.folder)
        if self.description != self.folder:
            matches = list_matches(str(self.folder / os.path.basename(source._split_to_filepattern[split])))
            source._reader, source.list_shards = read_copies(source._reader, matches), lambda split: matches
        if manifest is None:
            _check_tokens(source, split, self._task, self.folder)
            return source
        properties = manifest["splits"][split]
        lengths = properties["lengths"]
        files = [str(self.folder / shard_file_name(split, index, len(lengths))) for index in range(len(lengths))]
        return CachedFiles(source, {split: files}, _parse_origin(properties["origin"]), lengths, properties["records"])

    def list_shards(self, split: str) -> Sequence[str]:
        return self.split_source(split).list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
        return self.split_source(split).num_input_examples(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        return self.split_source(split).get_dataset(split, shuffle, seed, shard_info)


def _parse_origin(fields: Mapping[str, Any]) -> Origin:
    """Returns the origin in a manifest. Earlier versions called `min_kept_fraction` "least_kept"."""
    return Origin(**{"min_kept_fraction" if name == "least_kept" else name: value for name, value in fields.items()})


Caches = Sequence[tuple[seqio.Task, CachedTaskSource]]  # tasks of SeqIO's registry and their caches


def split_source(source: seqio.DataSource, split: str) -> seqio.DataSource:
    """Returns the underlying source of a split, unwrapped from lazy sources."""
    return source.split_source(split) if isinstance(source, CachedTaskSource) else getattr(source, "source", source)


@contextlib.contextmanager
def register_cache_stats(caches: Caches) -> Iterator[None]:
    """Lets SeqIO's functions, such as mixing rates, read the cache statistics of these tasks inside the block."""
    saved = [(task, task._cache_dir, task._stats) for task, _ in caches]
    try:
        for task, cache in caches:
            task._cache_dir, task._stats = str(cache.description), cache.stats
        yield
    finally:
        for task, folder, stats in saved:
            task._cache_dir, task._stats = folder, stats


def shard_file_name(split: str, index: int, number: int) -> str:
    return f"{os.path.basename(seqio.get_cached_tfrecord_prefix('', split))}-{index:05d}-of-{number:05d}"


def read_manifest(folder: epath.Path) -> dict | None:
    """Returns the manifest of a cache, None if SeqIO wrote it."""
    path = folder / MANIFEST
    if not path.exists():  # a storage error must not look like a missing manifest
        return None
    try:
        return dict(parse_json(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Remove the folder, and cache the task again.") from error


def cache_identity(task: seqio.Task, vocabulary: Vocabulary) -> dict[str, str | None]:
    """Returns the vocabulary and text that a cache of the task depends on."""
    has_text = any(not isinstance(f.vocabulary, seqio.PassThroughVocabulary) for f in task.output_features.values())
    return {
        "vocabulary": str(vocabulary) if has_text else None,
        "ids": fingerprint(vocabulary) if has_text else None,
        "text": getattr(task, "cache_content", "") or getattr(task.source, "cache_content", ""),
    }


def check_cache_identity(
    folder: epath.Path, manifest: Mapping[str, Any] | None, task: seqio.Task, vocabulary: Vocabulary
) -> None:
    """Raises a `UserError` if a cache was made with another vocabulary or from another text than the run's."""
    identity = cache_identity(task, vocabulary)
    if manifest and manifest["ids"] != identity["ids"] and identity["ids"]:
        raise UserError(
            f'The cache of task "{task.name}", {folder}, has ids of {manifest["vocabulary"]}, but VOCABULARY is {vocabulary}. '
            "Their ids stand for different tokens. Cache the task again in another folder."
        )
    if manifest and manifest["text"] != identity["text"]:
        raise UserError(
            f'The cache of task "{task.name}", {folder}, was made from {manifest["text"] or "no text of a run"}, but the run '
            f"reads {identity['text']}. Cache the task again in another folder."
        )


def _check_tokens(source: seqio.FileDataSource, split: str, task: seqio.Task, folder: epath.Path) -> None:
    """Raises a `UserError` if the first example's tokens are not those of its text, which SeqIO stores beside them."""
    for example in source.get_dataset(split=split, shuffle=False).take(1).as_numpy_iterator():
        for name, feature in task.output_features.items():
            text, tokens = example.get(f"{name}_pretokenized"), example.get(name)
            if not isinstance(text, bytes) or not isinstance(tokens, np.ndarray):
                continue
            expected = feature.vocabulary.encode(text.decode("utf-8", "replace"))
            if tokens.tolist()[: len(expected)] == list(expected)[: tokens.size]:
                continue
            sentence = (
                f'The cache of task "{task.name}", {folder}, was made with another vocabulary: the tokens of its first '
                f'"{name}" are '
                f"not those of {feature.vocabulary}."
            )
            if _ends_in_tokens(task) or max(tokens, default=0) >= feature.vocabulary.vocab_size:
                raise UserError(f"{sentence} Cache the task again in another folder.")
            log(f"{sentence} Or a preprocessor after tokenization changed them.")


def _ends_in_tokens(task: seqio.Task) -> bool:
    """Returns whether cached features are the vocabulary's tokens, perhaps with EOS."""
    steps = [getattr(step, "func", step) for step in task.preprocessors[: task._cache_step_idx]]
    ends = (seqio.preprocessors.append_eos, seqio.preprocessors.append_eos_after_trim)
    return next((step for step in reversed(steps) if step not in ends), None) is seqio.preprocessors.tokenize
