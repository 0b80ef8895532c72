"""A task's examples as they are before its `CacheDatasetPlaceholder`, in the format of SeqIO's caches.

One file is written for each of the source's, with its examples in their order. Files appear under their names when they are
whole, and `COMPLETED`, which makes a folder a cache, comes last: what a crash left is gone on from.
"""

import copy
import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_json, write_json
from t5x_lab.data.config import Vocabulary
from t5x_lab.data.sources import TOGETHER, DocumentFiles, longest_records, of_file, sizes_of

COMPLETED = "COMPLETED"
MANIFEST = "t5x_lab.json"  # beside SeqIO's own files: what the source was like
_PARTS = "parts"


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one worker writes at a time.

    Attributes:
      task, split: of what.
      index, number: which of the source's shards, and how many there are.
    """

    task: str
    split: str
    index: int
    number: int

    @property
    def file(self) -> str:
        return f"{os.path.basename(seqio.get_cached_tfrecord_prefix('', self.split))}-{self.index:05d}-of-{self.number:05d}"


def folder_of(cache: str, task: str) -> epath.Path:
    return epath.Path(cache) / seqio.get_task_dir_from_name(task)


def is_complete(cache: str, task: str, vocabulary: Vocabulary) -> bool:
    """Whether the task is in the cache.

    Raises:
      UserError: when it is there with another vocabulary.
    """
    folder = folder_of(cache, task)
    if not (folder / COMPLETED).exists():
        return False
    check_vocabulary(folder, task, vocabulary)
    return True


def pieces_of(task: seqio.Task) -> list[Piece]:
    """All that there is to write of a task."""
    return [
        Piece(task.name, split, index, number)
        for split in sorted(task.splits)
        if (number := len(task.source.list_shards(split)))
        for index in range(number)
    ]


def write(piece: Piece, task: seqio.Task, cache: str, seed: int = 0) -> None:
    """Writes the examples of a piece, where that is not done yet.

    Args:
      piece: which.
      task: its task, in the vocabulary that is asked for.
      cache: the folder of all tasks.
      seed: of what preprocessors draw before the placeholder.
    """
    folder = folder_of(cache, piece.task)
    note = folder / _PARTS / f"{piece.file}.json"
    if note.exists():
        return
    (folder / _PARTS).mkdir(parents=True, exist_ok=True)
    records = _shard_of(task.source, piece.split, piece.index, piece.number, seed)
    examples = task.preprocess_precache(records, seed=seed)
    unfinished = folder / _PARTS / f"{piece.file}.{uuid.uuid4().hex}"  # two workers may be given the same piece
    counts = _Counts(task.output_features)
    with tf.io.TFRecordWriter(str(unfinished)) as writer:
        for example in examples.as_numpy_iterator():
            counts.add(example)
            writer.write(seqio.dict_to_tfexample(example).SerializeToString(deterministic=True))
    unfinished.replace(folder / piece.file)
    write_json(note, {"stats": counts.stats, "features": _features(examples.element_spec)})


def _shard_of(source: seqio.DataSource, split: str, index: int, number: int, seed: int) -> tf.data.Dataset:
    source = getattr(source, "source", source)  # one that is opened when it is read
    if isinstance(source, seqio.FileDataSource):
        return of_file(source, split, source.list_shards(split)[index]).get_dataset(split=split, shuffle=False, seed=seed)
    part = seqio.ShardInfo(index=index, num_shards=number) if number > 1 else None
    return source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=part)


class _Counts:
    """SeqIO's statistics: examples, and each feature's tokens, without padding and end tokens, in all and at most."""

    def __init__(self, features: Mapping[str, seqio.Feature]):
        self._ends = {name: (f.vocabulary.eos_id, f.vocabulary.pad_id) for name, f in features.items()}
        self.stats: dict[str, int] = {"examples": 0}

    def add(self, example: Mapping[str, np.ndarray]) -> None:
        self.stats["examples"] += 1
        for name, ends in self._ends.items():
            tokens = example.get(name)
            if isinstance(tokens, np.ndarray) and tokens.dtype in (np.int32, np.int64):
                counted = tokens.size - sum(int((tokens == end).sum()) for end in set(ends) - {None})
                self.stats[f"{name}_tokens"] = self.stats.get(f"{name}_tokens", 0) + counted
                self.stats[f"{name}_max_tokens"] = max(self.stats.get(f"{name}_max_tokens", 0), counted)


def _features(spec: Mapping[str, tf.TypeSpec]) -> dict[str, dict]:
    """Shapes and types as SeqIO's info has them: of sequences the first size is open."""
    return {
        name: {"shape": [None, *x.shape.as_list()[1:]] if x.shape.rank else [], "dtype": x.dtype.name}
        for name, x in spec.items()
    }


def complete(task: seqio.Task, cache: str, vocabulary: Vocabulary) -> dict[str, int]:
    """Makes a cache of what was written; returns the number of examples by split.

    Raises:
      UserError: when something is missing.
    """
    folder, splits, examples = folder_of(cache, task.name), {}, {}
    for split, pieces in _by_split(pieces_of(task)):
        notes = [read_json(folder / _PARTS / f"{piece.file}.json") for piece in pieces]
        if None in notes:
            missing = next(piece.file for piece, note in zip(pieces, notes, strict=True) if note is None)
            raise UserError(f'{folder / missing} of task "{task.name}" is not written. Run the same command again.')
        info = {"num_shards": len(pieces), "features": notes[0]["features"], "seqio_version": seqio.__version__}
        write_json(epath.Path(seqio.get_cached_info_path(str(folder), split)), info)
        stats = _added([note["stats"] for note in notes])
        write_json(epath.Path(seqio.get_cached_stats_path(str(folder), split)), stats)
        splits[split], examples[split] = _how_it_is_read(task.source, split), stats["examples"]
    write_json(folder / MANIFEST, {"vocabulary": str(vocabulary), "splits": splits})
    (folder / COMPLETED).write_text("")
    (folder / _PARTS).rmtree()
    return examples


def _by_split(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    for split in sorted({piece.split for piece in pieces}):
        yield split, [piece for piece in pieces if piece.split == split]


def _added(stats: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for each in stats for name in each})
    return {
        name: (max if name.endswith("_max_tokens") else sum)(each.get(name, 0) for each in stats) for name in names
    }  # fmt: skip


def _how_it_is_read(source: seqio.DataSource, split: str) -> dict[str, Any]:
    """What decides how a run splits the source, and in which order it reads it."""
    source = getattr(source, "source", source)
    if not isinstance(source, seqio.FileDataSource):
        return {}
    files = source.list_shards(split)
    sizes = sizes_of(files)
    together = TOGETHER if isinstance(source, DocumentFiles) else 1
    return {
        "sizes": sizes,
        "longest": longest_records(source._reader, files, sizes),
        "cycle_length": source._cycle_length,
        "block_length": source._block_length * together,
        "file_shuffle_buffer_size": source._file_shuffle_buffer_size,
    }


def find_cache(task: seqio.Task, folders: Sequence[str]) -> seqio.Task | None:
    """The task with its cache in the first of these folders, or of SeqIO's own, that has one; None where none has."""
    for folder in (*folders, *seqio.utils.get_global_cache_dirs()):
        if (folder_of(folder, task.name) / COMPLETED).exists():
            cached = copy.copy(task)
            cached._cache_dir = str(folder_of(folder, task.name))
            return cached
    return None


def cached_source(task: seqio.Task, split: str, vocabulary: Vocabulary) -> seqio.FileDataSource:
    """The source that a task's cache is, see `find_cache`. One of ours is read in the order in which the task itself would be.

    Raises:
      UserError: for a split that it does not have, and a cache of another vocabulary.
    """
    folder = epath.Path(task.cache_dir)
    if not epath.Path(seqio.get_cached_info_path(str(folder), split)).exists():
        raise UserError(f'The cache of task "{task.name}", {folder}, has no split "{split}". Cache it anew with that split.')
    check_vocabulary(folder, task.name, vocabulary)
    source = task._get_cached_source(split)
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        _check_tokens(source, split, task, folder)
        return source
    was = manifest["splits"][split]
    source.was = was
    for name in ("cycle_length", "block_length", "file_shuffle_buffer_size"):
        if name in was:
            setattr(source, f"_{name}", was[name])
    return source


def check_vocabulary(folder: epath.Path, task: str, vocabulary: Vocabulary) -> None:
    """Raises a `UserError` where a cache of ours is of another vocabulary than the run's."""
    found = (read_json(folder / MANIFEST) or {}).get("vocabulary", str(vocabulary))
    if found != str(vocabulary):
        raise UserError(
            f'The cache of task "{task}", {folder}, holds the ids of {found}; the run\'s VOCABULARY is {vocabulary}. The same '
            "numbers would mean other words: cache the task anew, in another folder."
        )


def _check_tokens(source: seqio.FileDataSource, split: str, task: seqio.Task, folder: epath.Path) -> None:
    """Raises a `UserError` where the first example's tokens are not those of its text, which SeqIO keeps beside them."""
    for example in source.get_dataset(split=split, shuffle=False).take(1).as_numpy_iterator():
        for name, feature in task.output_features.items():
            text, tokens = example.get(f"{name}_pretokenized"), example.get(name)
            if not isinstance(text, bytes) or not isinstance(tokens, np.ndarray):
                continue
            expected = feature.vocabulary.encode(text.decode("utf-8", "replace"))
            if tokens.tolist()[: len(expected)] != list(expected)[: tokens.size]:
                raise UserError(
                    f'The cache of task "{task.name}", {folder}, was made with another vocabulary: its first "{name}" is not '
                    f"what {feature.vocabulary} makes of its text. Cache the task anew, in another folder."
                )
