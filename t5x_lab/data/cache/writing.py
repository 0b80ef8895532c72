"""Writing of a task's examples before its `CacheDatasetPlaceholder`, in the format of SeqIO caches.

One file is written per source file, with the examples in their order. A file gets its name when it is complete. `COMPLETED`,
which makes a folder a cache, is written last. An interrupted cache is resumed.
"""

import contextlib
import dataclasses
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json, read_json, write_json
from t5x_lab.config.temporary import written_locally
from t5x_lab.data.cache.reading import (
    COMPLETED,
    MANIFEST,
    Origin,
    cache_identity,
    is_complete,
    read_manifest,
    shard_file_name,
    split_source,
    task_cache_dir,
)
from t5x_lab.data.sources.sharding import file_sizes, longest_record_bytes, single_file_source
from t5x_lab.data.sources.storage import is_known_to_tensorflow
from t5x_lab.data.sources.text_files import READ_BATCH, DocumentFiles
from t5x_lab.data.vocabularies.config import Vocabulary

_PARTS = "parts"


@dataclasses.dataclass(frozen=True)
class CacheShard:
    """One cache file, written by one worker.

    Attributes:
      task, split: the task and split.
      index, number: number of the source's shard, and number of shards.
    """

    task: str
    split: str
    index: int
    number: int

    @property
    def file(self) -> str:
        return shard_file_name(self.split, self.index, self.number)


def list_cache_shards(task: seqio.Task) -> dict[str, list[CacheShard]]:
    """Returns the cache shards of a task by split.

    Raises:
      UserError: if there are none.
    """
    numbers = {split: len(task.source.list_shards(split)) for split in sorted(task.splits)}
    shards = {
        split: [CacheShard(task.name, split, index, number) for index in range(number)] for split, number in numbers.items()
    }
    if not any(numbers.values()):
        raise UserError(f'There is nothing to cache for task "{task.name}": {", ".join(numbers)} have no files.')
    return {split: entries for split, entries in shards.items() if entries}


def begin(task: seqio.Task, cache: str, vocabulary: Vocabulary) -> dict[str, list[CacheShard]]:
    """Stores what the cache is made from and returns the shards to write. Only a cache of the same origin is resumed.

    Raises:
      UserError: if an interrupted cache was made from something else, or the examples cannot be cached.
    """
    shards = list_cache_shards(task)
    _check_examples(task, next(iter(shards.values()))[0])
    folder = task_cache_dir(cache, task.name)
    files = {split: [str(name) for name in task.source.list_shards(split)] for split in shards}
    origin = {
        **cache_identity(task, vocabulary),
        "files": {split: [*zip(names, file_sizes(names), strict=True)] for split, names in files.items()},
    }
    origin = json.loads(json.dumps(origin))
    path = folder / _PARTS / "made_of.json"
    try:
        stored = dict(parse_json(path.read_text())) if path.exists() else origin
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Remove {folder}, and cache the task again.") from error
    changed = next((name for name in origin if stored.get(name) != origin[name]), None)
    if changed:
        description = {"files": "other files", "text": stored["text"]}.get(changed, stored["vocabulary"])
        raise UserError(
            f'The cache of task "{task.name}", {folder}, was begun with {description}. Remove that folder, or set another '
            "one (--output_dir)."
        )
    (folder / _PARTS).mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_json(path, origin)
    return shards


def _check_examples(task: seqio.Task, shard: CacheShard) -> None:
    """Raises a `UserError` for examples that SeqIO caches cannot hold."""
    prefix = f'The task "{task.name}" cannot be cached: the steps before its placeholder make'
    spec = task.preprocess_precache(
        _read_source_shard(task.source, shard.split, shard.index, shard.number, 0), seed=0
    ).element_spec
    if not isinstance(spec, Mapping):
        raise UserError(f"{prefix} examples that are not dictionaries.")
    for name, x in spec.items():
        if not isinstance(x, tf.TensorSpec | tf.RaggedTensorSpec):
            raise UserError(f'{prefix} "{name}", which is not a tensor.')
        if x.dtype not in _CACHE_TYPES:
            supported = ", ".join(sorted(dtype.name for dtype in _CACHE_TYPES))
            raise UserError(f'{prefix} "{name}" of type {x.dtype.name}. Caches support {supported}. Cast it.')
        if isinstance(x, tf.TensorSpec) and x.shape.rank is not None and None in x.shape.as_list()[1:]:
            raise UserError(
                f'{prefix} "{name}" of shape {x.shape}. Only the first size may be unknown. Set the others (tf.ensure_shape).'
            )


_CACHE_TYPES = (tf.int32, tf.int64, tf.bool, tf.float32, tf.string)


def write(shard: CacheShard, task: seqio.Task, cache: str, seed: int = 0) -> None:
    """Writes the examples of a cache shard, unless it is written already.

    Args:
      shard: the cache shard.
      task: its task, with the vocabulary of the cache.
      cache: folder of all tasks.
      seed: seed of random preprocessors before the placeholder.
    """
    folder = task_cache_dir(cache, shard.task)
    stats_file = folder / _PARTS / f"{shard.file}.json"
    if stats_file.exists() or (folder / COMPLETED).exists():
        return
    records, number = _count_elements(_read_source_shard(task.source, shard.split, shard.index, shard.number, seed))
    examples = task.preprocess_precache(records, seed=seed).with_options(_single_core_options())
    counts, first = _Counts(task.output_features), None
    try:
        with _unfinished(folder, shard) as unfinished, tf.io.TFRecordWriter(str(unfinished)) as writer:
            for example in examples.map(_flatten).as_numpy_iterator():
                first = example if first is None else first
                counts.add(example)
                writer.write(_serialize(example))
        features = _feature_info(examples.element_spec, first or {})
        write_json(stats_file, {"stats": counts.stats, "features": features, "records": int(number)})
    except (OSError, tf.errors.NotFoundError):
        if not (folder / COMPLETED).exists():  # else another worker has completed the cache
            raise


@contextlib.contextmanager
def _unfinished(folder: epath.Path, shard: CacheShard) -> Iterator[epath.Path]:
    """Yields the name of a file that TensorFlow can write, which is the cache file at the end of the block."""
    if is_known_to_tensorflow(str(folder)):
        unfinished = folder / _PARTS / f"{shard.file}.{uuid.uuid4().hex}"  # two workers may get the same shard
        yield unfinished
        unfinished.replace(folder / shard.file)
        return
    with written_locally(folder) as local:
        yield local / shard.file


def _count_elements(records: tf.data.Dataset) -> tuple[tf.data.Dataset, tf.Variable]:
    """Returns the records, and a variable with the number that was read."""
    number = tf.Variable(0, dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert
    def count(record: Any) -> Any:
        with tf.control_dependencies([number.assign_add(1)]):
            return tf.nest.map_structure(tf.identity, record, expand_composites=True)

    return records.map(count), number


def _read_source_shard(source: seqio.DataSource, split: str, index: int, number: int, seed: int) -> tf.data.Dataset:
    source = split_source(source, split)
    if _reads_by_files(source):
        return single_file_source(source, split, source.list_shards(split)[index]).get_dataset(
            split=split, shuffle=False, seed=seed
        )
    shard_info = seqio.ShardInfo(index=index, num_shards=number) if number > 1 else None
    return source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=shard_info)


def _reads_by_files(source: seqio.DataSource) -> bool:
    """Returns whether the source reads its listed files one by one. A user's subclass may not."""
    methods = (seqio.FileDataSource.get_dataset, DocumentFiles.get_dataset)
    return isinstance(source, seqio.FileDataSource) and type(source).get_dataset in methods


def _single_core_options() -> tf.data.Options:
    """Returns options for a worker with one core, where passing examples between threads would cost more than making them."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return options


def _flatten(example: Mapping[str, tf.Tensor | tf.RaggedTensor]) -> dict[str, tf.Tensor]:
    """Replaces ragged features by their values and row lengths, as SeqIO stores them."""
    flat: dict[str, tf.Tensor] = {}
    for name, value in example.items():
        if isinstance(value, tf.RaggedTensor):
            flat[name] = value.flat_values
            for axis, lengths in enumerate(value.nested_row_lengths()):
                flat[seqio.utils.tfexample_ragged_length_key(name, axis)] = lengths
        else:
            flat[name] = value
    return flat


def _serialize(example: Mapping[str, Any]) -> bytes:
    """Returns the bytes of `seqio.dict_to_tfexample`, which takes eight times as long."""
    features = {name: _feature(np.asarray(x, object if isinstance(x, bytes) else None)) for name, x in example.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def _feature(array: np.ndarray) -> tf.train.Feature:
    array = array.astype(np.int64) if array.dtype == bool else array
    values = array.ravel().tolist()  # Python numbers: protobuf converts array elements one by one, at ten times the cost
    if array.dtype.kind in "iu":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    if array.dtype.kind == "O":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


class _Counts:
    """SeqIO's cache statistics: number of examples, and total and maximum tokens by feature, without padding and EOS."""

    def __init__(self, features: Mapping[str, seqio.Feature]):
        self._special_ids = {name: (f.vocabulary.eos_id, f.vocabulary.pad_id) for name, f in features.items()}
        self.stats: dict[str, int] = {"examples": 0}

    def add(self, example: Mapping[str, np.ndarray]) -> None:
        self.stats["examples"] += 1
        for name, special_ids in self._special_ids.items():
            tokens = example.get(name)
            if isinstance(tokens, np.ndarray) and tokens.dtype in (np.int32, np.int64):
                num_tokens = tokens.size - sum(int((tokens == i).sum()) for i in set(special_ids) - {None})
                self.stats[f"{name}_tokens"] = self.stats.get(f"{name}_tokens", 0) + num_tokens
                self.stats[f"{name}_max_tokens"] = max(self.stats.get(f"{name}_max_tokens", 0), num_tokens)


def _feature_info(spec: Mapping[str, tf.TypeSpec], first: Mapping[str, Any]) -> dict[str, dict | None]:
    """Returns shapes and types in the format of SeqIO's info file, where the first size of a sequence is unknown.

    Args:
      spec: element spec of the dataset.
      first: first example, which defines unknown shapes. Without one they are None.
    """

    def shape_of(name: str, x: tf.TypeSpec) -> list | None:
        shape = x.shape.as_list() if x.shape.rank is not None else list(np.shape(first[name])) if first else None
        return shape if not shape else [None, *shape[1:]]

    shapes = {name: shape_of(name, x) for name, x in spec.items()}
    return {name: None if shapes[name] is None else {"shape": shapes[name], "dtype": x.dtype.name} for name, x in spec.items()}


def complete(task: seqio.Task, cache: str, vocabulary: Vocabulary) -> dict[str, int]:
    """Completes a cache after all shards are written. Returns the number of examples by split.

    Raises:
      UserError: if a shard is missing.
    """
    folder, splits = task_cache_dir(cache, task.name), {}
    for split, shards in list_cache_shards(task).items():
        if is_complete(cache, task, vocabulary):  # by another process
            break
        stats = [read_json(folder / _PARTS / f"{shard.file}.json") for shard in shards]
        if None in stats:
            missing = next(shard.file for shard, entry in zip(shards, stats, strict=True) if entry is None)
            raise UserError(f'{folder / missing} of task "{task.name}" is not written. Run the same command again.')
        complete_info = (entry["features"] for entry in stats if None not in entry["features"].values())
        info = next(complete_info, stats[0]["features"])
        features = {name: feature or {"shape": [], "dtype": "int32"} for name, feature in info.items()}
        info = {"num_shards": len(shards), "features": features, "seqio_version": seqio.__version__}
        write_json(epath.Path(seqio.get_cached_info_path(str(folder), split)), info)
        write_json(epath.Path(seqio.get_cached_stats_path(str(folder), split)), _sum_stats([entry["stats"] for entry in stats]))
        splits[split] = {
            "origin": dataclasses.asdict(describe_source(task.source, split)),
            "lengths": [entry["stats"]["examples"] for entry in stats],
            "records": sum(entry["records"] for entry in stats),
        }
    else:
        write_json(folder / MANIFEST, {**cache_identity(task, vocabulary), "splits": splits})
        (folder / COMPLETED).write_text("")
        with contextlib.suppress(FileNotFoundError):
            (folder / _PARTS).rmtree()
    manifest = read_manifest(folder)
    assert manifest is not None
    return {split: sum(properties["lengths"]) for split, properties in manifest["splits"].items()}


def _sum_stats(stats: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for entry in stats for name in entry})
    return {
        name: (max if name.endswith("_max_tokens") else sum)(entry.get(name, 0) for entry in stats) for name in names
    }  # fmt: skip


def describe_source(source: seqio.DataSource, split: str) -> Origin:
    """Returns the properties of a source that its cache needs, to be read in the same order."""
    source = split_source(source, split)
    files = source.list_shards(split)
    sizes, are_documents = file_sizes(files), isinstance(source, DocumentFiles)
    examples = None if are_documents else source.num_input_examples(split)
    examples = None if examples is None or math.isinf(examples) else int(examples)  # TFDS does not know it for every data set
    properties: dict[str, Any] = dict(
        sizes=sizes,
        splits_itself=source.supports_arbitrary_sharding,
        examples=examples,
        min_kept_fraction=getattr(source, "min_kept_fraction", 1.0),
    )
    if isinstance(source, seqio.TfdsDataSource):
        return Origin(**properties, addends=_addends(source.tfds_dataset, split), **_tfds_order(source.tfds_dataset))
    if not isinstance(source, seqio.FileDataSource):
        return Origin(**properties)
    return Origin(
        **properties,
        longest=longest_record_bytes(source._reader, files, sizes) if _reads_by_files(source) else None,
        together=READ_BATCH if are_documents else 1,
        cycle_length=source._cycle_length,
        block_length=source._block_length,
        file_shuffle_buffer_size=source._file_shuffle_buffer_size,
    )


def _addends(loader: seqio.LazyTfdsLoader, split: str) -> list[int]:
    splits = loader._get_builder(split).info.splits
    absolute = tfds.core.ReadInstruction.from_spec(loader._map_split(split)).to_absolute(splits)
    return [(splits[x.splitname].num_examples if x.to is None else x.to) - (x.from_ or 0) for x in absolute]


def _tfds_order(loader: seqio.LazyTfdsLoader) -> dict[str, Any]:
    """Returns how TFDS interleaves its files. It reads a data set with a fixed order one file at a time."""
    config, is_ordered = loader.read_config, loader.info.disable_shuffling
    is_set = isinstance(config.interleave_cycle_length, int)
    cycle_length = config.interleave_cycle_length if is_set else 1 if is_ordered else 16
    return {"cycle_length": cycle_length, "block_length": config.interleave_block_length}
