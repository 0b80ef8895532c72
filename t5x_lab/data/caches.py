"""Tasks' examples that were prepared ahead, in SeqIO's caches, and read in the order of the tasks themselves."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import NotHere, UserError
from t5x_lab.data.config import DataConfig, Vocabulary
from t5x_lab.data.vocabularies import fingerprint
from t5x_lab.observe.console import say

COMPLETED = "COMPLETED"
MANIFEST = "t5x_lab.json"  # beside SeqIO's own files: the vocabulary, and what each split's source was like


@dataclasses.dataclass(frozen=True)
class Origin:
    """What decides how a split of a task's source is divided among shards, and in which order it is read.

    Attributes:
      sizes: bytes of its files; None of what is no file.
      splits_itself: its `supports_arbitrary_sharding`.
      longest: `longest_records` of files that shards may share by bytes; None of others.
      examples: its `num_input_examples`, where that need not be counted.
      addends: examples of each summand of a TFDS split ("train[:90%]+test" has two); none of other sources.
      together: records that it reads at a time, as one element of the interleaved files; 1 = one by one.
      cycle_length, block_length, file_shuffle_buffer_size: as of `seqio.FileDataSource`.
      least_kept: share of the records that a task keeps, at least.
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
    least_kept: float = 1.0


class CachedFiles(seqio.FileDataSource):
    """The files of a cache in place of those that they were made of.

    Args:
      cached: SeqIO's own source of them.
      files: by the split that it has, in the order of those that they were made of.
      origin: of what they were made.
      lengths: examples in each file.
      records: what these were made of; None where nobody counted.
    """

    def __init__(
        self,
        cached: seqio.FileDataSource,
        files: Mapping[str, Sequence[str]],
        origin: Origin,
        lengths: Sequence[int],
        records: int | None = None,
    ):
        one_by_one = records in (None, sum(lengths))
        super().__init__(
            cached._reader,
            files,
            num_input_examples={split: origin.examples or sum(lengths) for split in files},
            file_shuffle_buffer_size=origin.file_shuffle_buffer_size,
            # What was made of one record, such as the choices of a question, stays together.
            cycle_length=origin.cycle_length if one_by_one else 1,
            block_length=origin.block_length,
        )
        self.origin, self._lengths, self.least_kept = origin, lengths, origin.least_kept

    def list_shards(self, split: str) -> Sequence[str]:
        return self._split_to_filepattern[split]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        if self.origin.together == 1:
            return super().get_dataset(split, shuffle, seed, shard_info)
        together = copy.copy(self)  # the elements that are interleaved are as many records as they were of the source
        together._reader = self.read_together
        return single(seqio.FileDataSource.get_dataset(together, split, shuffle, seed, shard_info))

    def read_together(self, file: tf.Tensor) -> tf.data.Dataset:
        """A file's examples, as many at a time as its source read."""
        return self._reader(file).ragged_batch(self.origin.together)

    def even_split(self, split: str, part: seqio.ShardInfo, shuffle: bool, seed: int) -> tf.data.Dataset:
        """One of as many ranges of examples as there are shards, as `tfds.even_splits` makes them of the source itself."""
        ends = list(itertools.accumulate(self._lengths))
        addends = self.origin.addends if sum(self.origin.addends) == ends[-1] else ends[-1:]  # other steps than one to one
        ranges = []  # file, first, number
        for begin, addend in zip(itertools.accumulate(addends, initial=0), addends, strict=False):
            share, rest = divmod(addend, part.num_shards)
            low = begin + share * part.index + min(part.index, rest)
            high = low + share + (part.index < rest)
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


def single(examples: tf.data.Dataset) -> tf.data.Dataset:
    """One example at a time of those that `ragged_batch` put together."""
    return examples.unbatch().map(lambda example: example)  # which makes tensors of what is ragged in name alone


def folder_of(cache: str, task: str) -> epath.Path:
    return epath.Path(cache) / seqio.get_task_dir_from_name(task)


def is_complete(cache: str, task: seqio.Task, vocabulary: Vocabulary) -> bool:
    """Whether the task is in the cache.

    Raises:
      UserError: when it is there with another vocabulary, or of another text.
    """
    folder = folder_of(cache, task.name)
    if not (folder / COMPLETED).exists():
        return False
    check_made_of(folder, read_manifest(folder), task, vocabulary)
    return True


def with_cache(task: seqio.Task, config: DataConfig) -> seqio.Task:
    """The task as a run reads it: where that is from a cache, the steps that the cache holds are left out."""
    if not (task.requires_caching or (config.use_cached and task.supports_caching)):
        return task
    own = copy.copy(task)  # SeqIO's `replace` would make a plain Task of a subclass
    own._source = CacheOfTask(task, config)
    done, steps = task._cache_step_idx, task.preprocessors
    # Steps that do nothing take their places: those behind draw from seeds that depend on it.
    own._preprocessor_constructor_args = (*[_nothing] * done, seqio.CacheDatasetPlaceholder(), *steps[done + 1 :])
    own._cache_dataset_placerholder = own._preprocessor_constructor_args[done]
    own.__dict__.pop("preprocessors", None)  # kept by SeqIO when they have been asked for
    return own


def _nothing(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


class CacheOfTask(seqio.DataSource):
    """A task's cache in place of its source, which need not be there. It is looked for when it is read.

    Args:
      task: whose it is.
      config: folders, and the vocabulary that it must be of.
    """

    def __init__(self, task: seqio.Task, config: DataConfig):
        super().__init__(splits=())
        self._task, self._config = task, config
        self._of: dict[str, seqio.FileDataSource] = {}

    supports_arbitrary_sharding = False

    @functools.cached_property
    def folder(self) -> epath.Path:
        """In the first of the run's folders, or of SeqIO's own, that has it.

        Raises:
          NotHere: when none has.
        """
        folders = [*self._config.cache_dirs, *seqio.utils.get_global_cache_dirs()]
        for cache in folders:
            if is_complete(cache, self._task, self._config.vocabulary):
                return folder_of(cache, self._task.name)
        raise NotHere(
            f'The task "{self._task.name}" is read from a cache alone, and there is none in SeqIO\'s cache directories '
            f"({', '.join(folders) or 'none is set'}). Write one with t5x_lab cache or seqio_cache_tasks, and name the folder "
            "of all caches with --gin.CACHE_DIRS='[\"FOLDER\"]'."
        )

    @property
    def splits(self) -> Sequence[str]:
        """Those that the task says it has; those of the cache where the source, which must be asked, is not there."""
        try:
            return self._task.splits
        except Exception:  # a user's source may raise anything
            manifest = read_manifest(self.folder)
            infos = [path.name for path in self.folder.glob("info.*.json")]
            return sorted(manifest["splits"]) if manifest else [name[len("info.") : -len(".json")] for name in infos]

    @functools.cached_property
    def stats(self) -> dict:
        """What SeqIO keeps of its statistics, by split."""
        return {}

    def of(self, split: str) -> seqio.FileDataSource:
        """The files of a split; SeqIO's own source of them where SeqIO made the cache.

        Raises:
          UserError: for a split that it does not have, and a cache of another vocabulary.
        """
        if split not in self._of:
            with tf.init_scope():  # outside the graph of many tasks
                self._of[split] = self._opened(split)
        return self._of[split]

    def _opened(self, split: str) -> seqio.FileDataSource:
        if not epath.Path(seqio.get_cached_info_path(str(self.folder), split)).exists():
            raise UserError(
                f'The cache of task "{self._task.name}", {self.folder}, has no split "{split}". Remove the folder, and cache '
                "the task anew with that split."
            )
        theirs = copy.copy(self._task)
        theirs._cache_dir = str(self.folder)
        source, manifest = theirs._get_cached_source(split), read_manifest(self.folder)
        if manifest is None:
            _check_tokens(source, split, self._task, self.folder)
            return source
        of_split = manifest["splits"][split]
        lengths = of_split["lengths"]
        files = [str(self.folder / name_of_file(split, index, len(lengths))) for index in range(len(lengths))]
        return CachedFiles(source, {split: files}, Origin(**of_split["origin"]), lengths, of_split["records"])

    def list_shards(self, split: str) -> Sequence[str]:
        return self.of(split).list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
        return self.of(split).num_input_examples(split)

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        return self.of(split).get_dataset(split, shuffle, seed, shard_info)


Caches = Sequence[tuple[seqio.Task, CacheOfTask]]  # tasks of SeqIO's registry, and theirs


def opened(source: seqio.DataSource, split: str) -> seqio.DataSource:
    """A split's own source, behind those that are opened when they are read."""
    return source.of(split) if isinstance(source, CacheOfTask) else getattr(source, "source", source)


@contextlib.contextmanager
def known_to_seqio(caches: Caches) -> Iterator[None]:
    """SeqIO's functions of these tasks, such as rates, find the examples counted in their caches."""
    before = [(task, task._cache_dir, task._stats) for task, _ in caches]
    try:
        for task, cache in caches:
            task._cache_dir, task._stats = str(cache.folder), cache.stats
        yield
    finally:
        for task, folder, stats in before:
            task._cache_dir, task._stats = folder, stats


def name_of_file(split: str, index: int, number: int) -> str:
    return f"{os.path.basename(seqio.get_cached_tfrecord_prefix('', split))}-{index:05d}-of-{number:05d}"


def read_manifest(folder: epath.Path) -> dict | None:
    """What we noted beside a cache; None of SeqIO's own."""
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.exists() else None  # storage that fails is no cache of SeqIO's


def manifest_of(task: seqio.Task, vocabulary: Vocabulary) -> dict[str, str | None]:
    """What a cache of the task must be made of."""
    has_text = any(not isinstance(f.vocabulary, seqio.PassThroughVocabulary) for f in task.output_features.values())
    return {
        "vocabulary": str(vocabulary) if has_text else None,
        "ids": fingerprint(vocabulary) if has_text else None,
        "text": getattr(task, "what", "") or getattr(task.source, "what", ""),
    }


def check_made_of(folder: epath.Path, found: Mapping[str, Any] | None, task: seqio.Task, vocabulary: Vocabulary) -> None:
    """Raises a `UserError` where what we noted beside a cache is of another vocabulary, or another text of the run."""
    now = manifest_of(task, vocabulary)
    if found and found["ids"] != now["ids"] and now["ids"]:
        raise UserError(
            f'The cache of task "{task.name}", {folder}, holds the ids of {found["vocabulary"]}; the run\'s VOCABULARY is '
            f"{vocabulary}. The same numbers would mean other words: cache the task anew, in another folder."
        )
    if found and found["text"] != now["text"]:
        raise UserError(
            f'The cache of task "{task.name}", {folder}, was made of {found["text"] or "no text of a run"}; the run reads '
            f"{now['text']}. Cache the task anew, in another folder."
        )


def _check_tokens(source: seqio.FileDataSource, split: str, task: seqio.Task, folder: epath.Path) -> None:
    """Raises a `UserError` where the first example's tokens are not those of its text, which SeqIO keeps beside them."""
    for example in source.get_dataset(split=split, shuffle=False).take(1).as_numpy_iterator():
        for name, feature in task.output_features.items():
            text, tokens = example.get(f"{name}_pretokenized"), example.get(name)
            if not isinstance(text, bytes) or not isinstance(tokens, np.ndarray):
                continue
            expected = feature.vocabulary.encode(text.decode("utf-8", "replace"))
            if tokens.tolist()[: len(expected)] == list(expected)[: tokens.size]:
                continue
            sentence = (
                f'The cache of task "{task.name}", {folder}, was made with another vocabulary: its first "{name}" is not what '
                f"{feature.vocabulary} makes of its text."
            )
            if _ends_in_tokens(task) or max(tokens, default=0) >= feature.vocabulary.vocab_size:
                raise UserError(f"{sentence} Cache the task anew, in another folder.")
            say(f"Either a step behind its tokenisation changes them, or: {sentence}")


def _ends_in_tokens(task: seqio.Task) -> bool:
    """Whether what a cache holds is what the vocabulary makes of texts, perhaps with an end token."""
    steps = [getattr(step, "func", step) for step in task.preprocessors[: task._cache_step_idx]]
    ends = (seqio.preprocessors.append_eos, seqio.preprocessors.append_eos_after_trim)
    return next((step for step in reversed(steps) if step not in ends), None) is seqio.preprocessors.tokenize
