"""A task's examples as they are before its `CacheDatasetPlaceholder`, in the format of SeqIO's caches.

One file is written for each of the source's, with its examples in their order. Files appear under their names when they are
whole, and `COMPLETED`, which makes a folder a cache, comes last: what a crash left is gone on from.
"""

import contextlib
import dataclasses
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_json, write_json
from t5x_lab.data.caches import (
    COMPLETED,
    MANIFEST,
    Origin,
    folder_of,
    is_complete,
    manifest_of,
    name_of_file,
    opened,
    read_manifest,
)
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
        return name_of_file(self.split, self.index, self.number)


def pieces_of(task: seqio.Task) -> dict[str, list[Piece]]:
    """All that there is to write of a task, by split.

    Raises:
      UserError: when there is nothing.
    """
    numbers = {split: len(task.source.list_shards(split)) for split in sorted(task.splits)}
    found = {split: [Piece(task.name, split, index, number) for index in range(number)] for split, number in numbers.items()}
    if not any(numbers.values()):
        raise UserError(f'There is nothing to cache of task "{task.name}": there are no files of {", ".join(numbers)}.')
    return {split: pieces for split, pieces in found.items() if pieces}


def begin(task: seqio.Task, cache: str, vocabulary: Vocabulary) -> dict[str, list[Piece]]:
    """Notes what a cache is made of: what was begun is gone on from with the same alone. Returns what there is to write.

    Raises:
      UserError: where it was begun with something else, or a cache cannot hold what is before the task's placeholder.
    """
    pieces = pieces_of(task)
    _check_examples(task, next(iter(pieces.values()))[0])
    folder = folder_of(cache, task.name)
    files = {split: [str(name) for name in task.source.list_shards(split)] for split in pieces}
    made_of = {
        **manifest_of(task, vocabulary),
        "files": {split: [*zip(of, sizes_of(of), strict=True)] for split, of in files.items()},
    }
    made_of = json.loads(json.dumps(made_of))
    path = folder / _PARTS / "made_of.json"
    before = json.loads(path.read_text()) if path.exists() else made_of
    differs = next((name for name in made_of if before[name] != made_of[name]), None)
    if differs:
        what = {"files": "other files", "text": before["text"]}.get(differs, before["vocabulary"])
        raise UserError(
            f'The cache of task "{task.name}", {folder}, was begun with {what}. Remove that folder, or name another '
            "one (--output_dir)."
        )
    (folder / _PARTS).mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_json(path, made_of)
    return pieces


def _check_examples(task: seqio.Task, piece: Piece) -> None:
    """Raises a `UserError` for what SeqIO's caches cannot hold."""
    what = f'The task "{task.name}" cannot be cached: the steps before its placeholder make'
    spec = task.preprocess_precache(_shard_of(task.source, piece.split, piece.index, piece.number, 0), seed=0).element_spec
    if not isinstance(spec, Mapping):
        raise UserError(f"{what} examples that are no dictionaries.")
    for name, x in spec.items():
        if not isinstance(x, tf.TensorSpec | tf.RaggedTensorSpec):
            raise UserError(f'{what} "{name}", which is no tensor.')
        if x.dtype not in _HELD:
            held = ", ".join(sorted(dtype.name for dtype in _HELD))
            raise UserError(f'{what} "{name}" of {x.dtype.name}; caches hold {held}. Cast it.')
        if isinstance(x, tf.TensorSpec) and x.shape.rank is not None and None in x.shape.as_list()[1:]:
            raise UserError(
                f'{what} "{name}" of the shape {x.shape}. Only the first size may be open: set the others (tf.ensure_shape).'
            )


_HELD = (tf.int32, tf.int64, tf.bool, tf.float32, tf.string)


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
    if note.exists() or (folder / COMPLETED).exists():
        return
    records, number = _counted(_shard_of(task.source, piece.split, piece.index, piece.number, seed))
    examples = task.preprocess_precache(records, seed=seed).with_options(_of_one_core())
    unfinished = folder / _PARTS / f"{piece.file}.{uuid.uuid4().hex}"  # two workers may be given the same piece
    counts, first = _Counts(task.output_features), None
    try:
        with tf.io.TFRecordWriter(str(unfinished)) as writer:
            for example in examples.map(_flat).as_numpy_iterator():
                first = example if first is None else first
                counts.add(example)
                writer.write(_serialized(example))
        unfinished.replace(folder / piece.file)
        features = _features(examples.element_spec, first or {})
        write_json(note, {"stats": counts.stats, "features": features, "records": int(number)})
    except (OSError, tf.errors.NotFoundError):
        if not (folder / COMPLETED).exists():  # else another one has done it all
            raise


def _counted(records: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.Variable]:
    """The same records, and how many have been read."""
    number = tf.Variable(0, dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def count(record: Any) -> Any:
        with tf.control_dependencies([number.assign_add(1)]):
            return tf.nest.map_structure(tf.identity, record, expand_composites=True)

    return records.map(count), number


def _shard_of(source: seqio.DataSource, split: str, index: int, number: int, seed: int) -> tf.data.Dataset:
    source = opened(source, split)
    if _reads_by_files(source):
        return of_file(source, split, source.list_shards(split)[index]).get_dataset(split=split, shuffle=False, seed=seed)
    part = seqio.ShardInfo(index=index, num_shards=number) if number > 1 else None
    return source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=part)


def _reads_by_files(source: seqio.DataSource) -> bool:
    """Whether it reads the files that it lists as SeqIO's or our own sources do; a user's class may do it otherwise."""
    reads = (seqio.FileDataSource.get_dataset, DocumentFiles.get_dataset)
    return isinstance(source, seqio.FileDataSource) and type(source).get_dataset in reads


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


def _features(spec: Mapping[str, tf.TypeSpec], first: Mapping[str, Any]) -> dict[str, dict | None]:
    """Shapes and types as SeqIO's info has them: of sequences the first size is open. A shape that is not known is that of the
    `first` example; None where there is none."""

    def shape_of(name: str, x: tf.TypeSpec) -> list | None:
        shape = x.shape.as_list() if x.shape.rank is not None else list(np.shape(first[name])) if first else None
        return shape if not shape else [None, *shape[1:]]

    shapes = {name: shape_of(name, x) for name, x in spec.items()}
    return {name: None if shapes[name] is None else {"shape": shapes[name], "dtype": x.dtype.name} for name, x in spec.items()}


def complete(task: seqio.Task, cache: str, vocabulary: Vocabulary) -> dict[str, int]:
    """Makes a cache of what was written; returns the number of examples by split.

    Raises:
      UserError: when something is missing.
    """
    folder, splits = folder_of(cache, task.name), {}
    for split, pieces in pieces_of(task).items():
        if is_complete(cache, task, vocabulary):  # by another one
            break
        notes = [read_json(folder / _PARTS / f"{piece.file}.json") for piece in pieces]
        if None in notes:
            missing = next(piece.file for piece, note in zip(pieces, notes, strict=True) if note is None)
            raise UserError(f'{folder / missing} of task "{task.name}" is not written. Run the same command again.')
        known = next((note["features"] for note in notes if None not in note["features"].values()), notes[0]["features"])
        features = {name: feature or {"shape": [], "dtype": "int32"} for name, feature in known.items()}
        info = {"num_shards": len(pieces), "features": features, "seqio_version": seqio.__version__}
        write_json(epath.Path(seqio.get_cached_info_path(str(folder), split)), info)
        write_json(epath.Path(seqio.get_cached_stats_path(str(folder), split)), _added([note["stats"] for note in notes]))
        splits[split] = {
            "origin": dataclasses.asdict(origin_of(task.source, split)),
            "lengths": [note["stats"]["examples"] for note in notes],
            "records": sum(note["records"] for note in notes),
        }
    else:
        write_json(folder / MANIFEST, {**manifest_of(task, vocabulary), "splits": splits})
        (folder / COMPLETED).write_text("")
        with contextlib.suppress(FileNotFoundError):
            (folder / _PARTS).rmtree()
    manifest = read_manifest(folder)
    assert manifest is not None
    return {split: sum(of["lengths"]) for split, of in manifest["splits"].items()}


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
    of_any: dict[str, Any] = dict(
        sizes=sizes,
        splits_itself=source.supports_arbitrary_sharding,
        examples=examples,
        least_kept=getattr(source, "least_kept", 1.0),
    )
    if isinstance(source, seqio.TfdsDataSource):
        return Origin(**of_any, addends=_addends(source.tfds_dataset, split), **_order_of(source.tfds_dataset))
    if not isinstance(source, seqio.FileDataSource):
        return Origin(**of_any)
    return Origin(
        **of_any,
        longest=longest_records(source._reader, files, sizes) if _reads_by_files(source) else None,
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
