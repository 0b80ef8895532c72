"""A task's examples as they are before its `CacheDatasetPlaceholder`, in the format of SeqIO's caches.

One file is written for each of the source's, with its examples in their order. Files appear under their names when they are
whole, and `COMPLETED`, which makes a folder a cache, comes last: what a crash left is gone on from.
"""

import dataclasses
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_json, write_json
from t5x_lab.data.caches import COMPLETED, MANIFEST, Origin, folder_of, opened
from t5x_lab.data.config import Vocabulary
from t5x_lab.data.sources import TOGETHER, DocumentFiles, longest_records, of_file, sizes_of

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
    examples = task.preprocess_precache(records, seed=seed).with_options(_of_one_core())
    unfinished = folder / _PARTS / f"{piece.file}.{uuid.uuid4().hex}"  # two workers may be given the same piece
    counts = _Counts(task.output_features)
    with tf.io.TFRecordWriter(str(unfinished)) as writer:
        for example in examples.map(_flat).as_numpy_iterator():
            counts.add(example)
            writer.write(_serialized(example))
    unfinished.replace(folder / piece.file)
    write_json(note, {"stats": counts.stats, "features": _features(examples.element_spec)})


def _shard_of(source: seqio.DataSource, split: str, index: int, number: int, seed: int) -> tf.data.Dataset:
    source = opened(source, split)
    if isinstance(source, seqio.FileDataSource):
        return of_file(source, split, source.list_shards(split)[index]).get_dataset(split=split, shuffle=False, seed=seed)
    part = seqio.ShardInfo(index=index, num_shards=number) if number > 1 else None
    return source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=part)


def _of_one_core() -> tf.data.Options:
    """A worker has a core of its own: what hands examples from thread to thread there would cost more than making them."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return options


def _flat(example: Mapping[str, tf.Tensor | tf.RaggedTensor]) -> dict[str, tf.Tensor]:
    """Ragged features as their values and the lengths of their rows, as SeqIO keeps them."""
    flat: dict[str, tf.Tensor] = {}
    for name, value in example.items():
        if isinstance(value, tf.RaggedTensor):
            flat[name] = value.flat_values
            for axis, lengths in enumerate(value.nested_row_lengths()):
                flat[seqio.utils.tfexample_ragged_length_key(name, axis)] = lengths
        else:
            flat[name] = value
    return flat


def _serialized(example: Mapping[str, Any]) -> bytes:
    """The bytes of `seqio.dict_to_tfexample`, which takes eight times as long."""
    features = {name: _feature(np.asarray(x, object if isinstance(x, bytes) else None)) for name, x in example.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def _feature(array: np.ndarray) -> tf.train.Feature:
    array = array.astype(np.int64) if array.dtype == bool else array
    values = array.ravel().tolist()  # numbers of Python's: protobuf takes those of an array one by one, at ten times the cost
    if array.dtype.kind in "iu":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    if array.dtype.kind == "O":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


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
        origin, lengths = origin_of(task.source, split), [note["stats"]["examples"] for note in notes]
        splits[split], examples[split] = {"origin": dataclasses.asdict(origin), "lengths": lengths}, sum(lengths)
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


def origin_of(source: seqio.DataSource, split: str) -> Origin:
    """What a cache must know of its source, to be read as it would be."""
    source = opened(source, split)
    files = source.list_shards(split)
    sizes, are_documents = sizes_of(files), isinstance(source, DocumentFiles)
    examples = None if are_documents else source.num_input_examples(split)
    examples = None if examples is None or math.isinf(examples) else int(examples)  # TFDS does not know that of each data set
    of_any: dict[str, Any] = dict(sizes=sizes, splits_itself=source.supports_arbitrary_sharding, examples=examples)
    if isinstance(source, seqio.TfdsDataSource):
        return Origin(**of_any, addends=_addends(source.tfds_dataset, split), **_order_of(source.tfds_dataset))
    if not isinstance(source, seqio.FileDataSource):
        return Origin(**of_any)
    by_files = are_documents or type(source).get_dataset is seqio.FileDataSource.get_dataset
    return Origin(
        **of_any,
        longest=longest_records(source._reader, files, sizes) if by_files else None,
        together=TOGETHER if are_documents else 1,
        cycle_length=source._cycle_length,
        block_length=source._block_length,
        file_shuffle_buffer_size=source._file_shuffle_buffer_size,
    )


def _addends(loader: seqio.LazyTfdsLoader, split: str) -> list[int]:
    splits = loader._get_builder(split).info.splits
    absolute = tfds.core.ReadInstruction.from_spec(loader._map_split(split)).to_absolute(splits)
    return [(splits[x.splitname].num_examples if x.to is None else x.to) - (x.from_ or 0) for x in absolute]


def _order_of(loader: seqio.LazyTfdsLoader) -> dict[str, Any]:
    """How many of its files TFDS reads beside each other: of a data set that has an order, one."""
    read, in_order = loader.read_config, loader.info.disable_shuffling
    given = isinstance(read.interleave_cycle_length, int)
    cycle_length = read.interleave_cycle_length if given else 1 if in_order else 16
    return {"cycle_length": cycle_length, "block_length": read.interleave_block_length}
