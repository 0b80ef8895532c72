"""The input pipeline: logical shards of a SeqIO task or mixture, batched, with a position that can be saved."""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.checkpoints.layout import from_another
from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import raised_in, told
from t5x_lab.data.checks import check_vocabulary
from t5x_lab.data.config import DataConfig
from t5x_lab.data.examples import features_of, passed, sequences_of, with_features
from t5x_lab.data.failures import naming_what_fails
from t5x_lab.data.feature_converters import FeatureConverter
from t5x_lab.data.files_read import changes, files_of
from t5x_lab.data.many import Shard, of_shards
from t5x_lab.data.mixture import Part, WeightedTasks, resolve
from t5x_lab.data.reading import MANY, in_order, seed_of, shard_of_task
from t5x_lab.training.batches import HostBatch, Rows


def resolve_tasks(config: DataConfig, architecture: str, vocab_size: int) -> WeightedTasks:
    """The run's tasks, checked against the model before any text is read.

    Raises:
      UserError: for an unknown name, lengths or an architecture that do not fit, a vocabulary larger than the model's.
    """
    tasks = resolve(config, architecture)
    check_vocabulary(tasks, config, vocab_size)
    return tasks


LENGTHS_MEASURED = 1_000  # examples of a task, for rates in tokens
FILES = "files.json"  # beside the positions: what the text's files were like


class SeqioBatches:
    """Endless training batches of this process's rows; see `t5x_lab.training.batches.Batches`.

    Rows of a batch are grouped by shard, in the order of the shards. A process reads the shards that its rows come from, and
    saves the position of those whose first row it owns. Shards of many tasks are read and saved together, see
    `t5x_lab.data.many`; a process that is given other shards later reads on what was saved together, and leaves out the rest.

    Args:
      tasks: what to read.
      config: batch size, shards, packing.
      seed: of shuffling and of every random choice of the objectives; each shard derives its own.
      rows: those of this process; all by default.
    """

    def __init__(self, tasks: WeightedTasks, config: DataConfig, seed: int, rows: Rows | None = None):
        rows = rows or Rows.all(config.batch_size)
        per_shard = config.batch_size // config.shards
        self._shards = np.unique(rows.held // per_shard).tolist()
        self._rows = np.searchsorted(self._shards, rows.held // per_shard) * per_shard + rows.held % per_shard
        read = len(self._shards) * per_shard
        if read > len(rows.held):
            print(
                f"This process reads {read} rows of each batch and uses {len(rows.held)} of them, because its rows come from "
                f"parts of shards. DATA_SHARDS ({config.shards}) had better be a multiple of the number of processes; it is "
                "fixed for the life of a run.",
                file=sys.stderr,
            )
        self._owned = {shard for shard in self._shards if shard * per_shard in rows.owned}
        self._number = config.shards
        owned = tuple(sorted(self._owned))
        together = [owned] if len(tasks.trained) > MANY and owned else [(shard,) for shard in owned]
        groups = [*together, *((shard,) for shard in self._shards if shard not in self._owned)]
        self._tasks, self._config = tasks, config
        with self._naming_what_fails():
            self._make = functools.partial(shards_of_tasks, tasks, config, seed, rates_of_examples(tasks, config))
            self._datasets = {group: self._make(group) for group in groups}
        self._files = files_of(tasks)

    def __iter__(self):
        return self

    def _naming_what_fails(self):
        return naming_what_fails(self._tasks.trained, self._config.split)

    @functools.cached_property
    def _iterators(self) -> dict[tuple[int, ...], Iterator]:
        return {group: iter(dataset.prefetch(2 * len(group))) for group, dataset in self._datasets.items()}

    def __next__(self) -> HostBatch:
        try:
            with self._naming_what_fails():
                read = {shard: next(iterator) for group, iterator in self._iterators.items() for shard in group}
        except StopIteration:
            raise UserError(
                f"The data have no complete batch: {self._what_is_empty()} is empty after preprocessing. Lower DATA_SHARDS or "
                "BATCH_SIZE, shorten TASK_FEATURE_LENGTHS, or give more text."
            ) from None
        parts = [read[shard] for shard in self._shards]
        return {name: np.concatenate([part[name].numpy() for part in parts])[self._rows] for name in parts[0]}

    def _what_is_empty(self) -> str:
        """A task and a shard without an example, as far as one is found in a minute."""
        began = time.monotonic()
        for part in self._tasks.trained:
            for shard in self._shards if time.monotonic() - began < 60 else ():
                alone = shard_of_task(part, self._config, 0, shard, len(self._tasks.trained))
                if next(iter(alone), None) is None:
                    return f'shard {shard} of the task "{part.task.name}"'
        return "a shard of the training split"

    def save(self, directory: epath.Path) -> list[epath.Path]:
        files = []
        if 0 in self._owned:
            (directory / FILES).write_text(json.dumps(self._files))
            files.append(directory / FILES)
        for group, iterator in self._iterators.items():
            if group[0] in self._owned:
                tf.train.Checkpoint(iterator=iterator).write(str(directory / _name(group)))
                files += list(directory.glob(f"{_name(group)}.*"))
        return files

    def restore(self, directory: epath.Path) -> None:
        saved = [_shards_of(file.name) for file in directory.iterdir() if file.name.endswith(".index")]
        groups = {shard: group for group in saved for shard in group}
        if set(groups) != set(range(self._number)):
            raise UserError(
                f"The checkpoint holds the position of {len(groups)} data shards, not of {self._number}. DATA_SHARDS is fixed "
                f"for a run's life; set --gin.DATA_SHARDS={len(groups)}."
            )
        self._check_files(directory)
        needed = sorted({groups[shard] for shard in self._shards})
        self._datasets = {group: self._datasets.get(group) or self._make(group) for group in needed}
        self.__dict__.pop("_iterators", None)
        for group, iterator in self._iterators.items():
            tf.train.Checkpoint(iterator=iterator).read(str(directory / _name(group))).assert_consumed()

    def _check_files(self, directory: epath.Path) -> None:
        """Raises a `UserError` where the text is another than the one that the position is of."""
        if not (directory / FILES).exists():
            return  # an older checkpoint
        changed = changes(json.loads((directory / FILES).read_text()), self._files)
        if changed:
            raise UserError(
                f"The text has changed since the run read it: {changed}. The position means nothing there. Put the files back, "
                f"or go on with the new text in a new MODEL_DIR, with {from_another(directory.parent)}"
            )


def _name(shards: tuple[int, ...]) -> str:
    """Of a file of the position of these shards."""
    return "shard_" + "_".join(map(str, shards))


def _shards_of(file: str) -> tuple[int, ...]:
    return tuple(map(int, file.removesuffix(".index").removeprefix("shard_").split("_")))


def rates_of_examples(tasks: WeightedTasks, config: DataConfig) -> list[float]:
    """How often examples of each task to train on are drawn, relative to the others."""
    if len(tasks.trained) == 1:
        return [1.0]
    if config.rates_of == "examples":
        return tasks.rates()
    lengths = [_mean_length(part, tasks.architecture, config) for part in tasks.trained]
    return [rate / length for rate, length in zip(tasks.rates(), lengths, strict=True)]


def _mean_length(part: Part, architecture: str, config: DataConfig) -> float:
    """Tokens of an example, on the first ones of the whole task."""
    whole = dataclasses.replace(config, shards=1)
    examples = shard_of_task(part, whole, 0, 0, MANY + 1).take(LENGTHS_MEASURED)
    sizes = [
        sum(tf.size(x[name]) for name in sequences_of(part, architecture) if name in x).numpy()
        for x in with_features(examples, part, None, features_of([part], architecture, config), architecture)
    ]
    return max(float(np.mean(sizes or [0])), 1.0)


def shards_of_tasks(
    tasks: WeightedTasks, config: DataConfig, seed: int, rates: list[float], shards: tuple[int, ...]
) -> tf.data.Dataset:
    """Batches of model features of one logical shard, or of several in turn, shuffled and repeated without end."""
    batches = functools.partial(training_shard, tasks, config, seed, rates)
    if len(tasks.trained) > MANY:
        return of_shards(batches, shards, [1 + seed_of(seed, shard) % (2**31 - 2) for shard in shards], seed_of(seed))
    (shard,) = shards
    return batches(shard).with_options(reading_options())


def reading_options() -> tf.data.Options:
    """The same order every time, and nothing tuned: that costs more CPU-seconds than it saves, and an iterator's end waits for
    TensorFlow's tuning thread, which sleeps for up to a minute."""
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return options


def training_shard(tasks: WeightedTasks, config: DataConfig, seed: int, rates: list[float], shard: Shard) -> tf.data.Dataset:
    """Batches of model features of one logical shard."""
    parts = tasks.trained
    features = features_of(parts, tasks.architecture, config)
    numbers = range(len(parts)) if len(parts) > 1 else [None]
    datasets = [
        with_features(shard_of_task(part, config, seed, shard, len(parts)), part, number, features, tasks.architecture)
        for number, part in zip(numbers, parts, strict=True)
    ]
    mixed, shard_seed = datasets[0], seed_of(seed, shard)
    if len(datasets) > 1:
        mixed = tasks.sample_fn(datasets, rates, shard_seed)
    if len(parts) > MANY and config.shuffle:
        mixed = mixed.shuffle(config.shuffle_buffer_size or seqio.SHUFFLE_BUFFER_SIZE, seed=shard_seed)
    return _batches(mixed, tasks, parts, config, config.batch_size // config.shards)


def batch_features(tasks: WeightedTasks, config: DataConfig) -> dict[str, tf.TensorSpec]:
    """Shapes and types of a training batch of all processes, told by the converter of no examples: no data are read."""
    try:
        parts = tasks.trained
    except Exception:  # a user's source may raise anything where its data are not on this machine
        parts = tasks.parts
    declared = {**features_of(parts, tasks.architecture, config), "raw_tokens": tf.TensorSpec([], tf.int32)}
    if len(parts) > 1:
        declared["task"] = tf.TensorSpec([], tf.int32)
    found = _batch_features(declared, tasks, parts, config)
    if all(spec.shape.is_fully_defined() for spec in found.values()):
        return found
    made = shard_of_task(parts[0], config, 0, 0, len(parts)).element_spec  # what the preprocessors know of sizes
    found = _batch_features({name: made.get(name, spec) for name, spec in declared.items()}, tasks, parts, config)
    for name, spec in found.items():
        if not spec.shape.is_fully_defined():
            raise UserError(
                f'The converter gives "{name}" of the shape {list(spec.shape)}; a compiled program needs all of its sizes. '
                "Pad it to a length of TASK_FEATURE_LENGTHS."
            )
    return found


def _batch_features(
    features: dict[str, tf.TensorSpec], tasks: WeightedTasks, parts: Sequence[Part], config: DataConfig
) -> dict[str, tf.TensorSpec]:
    none = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=features)
    unread = 0, 1  # the vocabulary, whose start and end tokens these would be
    return _batches(none, tasks, parts, config, config.batch_size, around=unread).element_spec


def _batches(
    dataset: tf.data.Dataset,
    tasks: WeightedTasks,
    parts: Sequence[Part],
    config: DataConfig,
    rows: int,
    drop_remainder: bool = True,
    around: tuple[int, int] | None = None,
) -> tf.data.Dataset:
    """The converter's batches of examples of `parts`; `around` are the ids before and after a text."""
    converter: Any = config.converter or _converter(tasks, parts, config, around)
    try:
        if hasattr(converter, "batches"):
            return converter.batches(dataset, tasks.lengths, rows, drop_remainder)
        return converter(dataset, tasks.lengths).batch(rows, drop_remainder)
    except Exception as error:
        if config.converter is None or isinstance(error, UserError):
            raise
        raise UserError(
            f"The converter {type(converter).__name__} fails on examples with {', '.join(dataset.element_spec)} at the lengths "
            f"{dict(tasks.lengths)}: {raised_in(error) or told(error)}."
        ) from error


def _converter(
    tasks: WeightedTasks, parts: Sequence[Part], config: DataConfig, around: tuple[int, int] | None
) -> FeatureConverter:
    """The library's own."""
    if around is None:
        end = tasks.vocabulary.eos_id
        around = config.special_tokens.before_texts(end), end
    others = passed(features_of(parts, tasks.architecture, config))
    return FeatureConverter(tasks.architecture, config.pack, *around, num_tasks=len(parts), passed=others)


class EvalBatches:
    """This process's rows of the batches of one task's `eval_split`, the same ones every time they are asked for.

    Every process reads all of it, so that rows and batches do not depend on their number. The last batch is filled up with
    rows of padding, which count for nothing. Where all batches fit into `keep` bytes, they are read once; else the pipeline is
    built anew each time, so that what it draws is drawn alike.

    Args:
      tasks, part: the task, and the mixture that it is of.
      config: how it is read.
      rows: those of this process; all by default.
      most: batches at most; None = `config.eval_steps`.
      num_examples: only the first N; None = all.
      keep: see above.
    """

    def __init__(
        self,
        tasks: WeightedTasks,
        part: Part,
        config: DataConfig,
        rows: Rows | None = None,
        most: int | None = None,
        num_examples: int | None = None,
        keep: int = 0,
    ):
        self._tasks, self._part, self._config, self.split = tasks, part, config, config.eval_split
        self._held = (rows or Rows.all(config.batch_size)).held
        self._most, self._num_examples = most or config.eval_steps, num_examples
        self._keep = keep
        self._kept: list[HostBatch] | None = None

    def __iter__(self) -> Iterator[HostBatch]:
        if self._kept is not None:
            yield from self._kept
            return
        kept, size = [], 0
        for batch in self._read():
            size += sum(x.nbytes for x in batch.values())
            if size <= self._keep:
                kept.append(batch)
            else:
                kept.clear()
            yield batch
        self._kept = kept if size <= self._keep else None

    def _read(self) -> Iterator[HostBatch]:
        size = self._config.batch_size
        with naming_what_fails([self._part], self.split):
            for batch in self._dataset().as_numpy_iterator():
                yield {name: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))[self._held] for name, x in batch.items()}

    def _dataset(self) -> tf.data.Dataset:
        part, tasks, config = self._part, self._tasks, self._config
        dataset = in_order(part, self.split, trim=not part.is_text)
        dataset = dataset if self._num_examples is None else dataset.take(self._num_examples)
        features = features_of([part], tasks.architecture, config)
        examples = with_features(dataset, part, None, features, tasks.architecture)
        batches = _batches(examples, tasks, [part], config, config.batch_size, drop_remainder=False)
        return batches.take(self._most).with_options(reading_options())


def eval_batches(tasks: WeightedTasks, part: Part, config: DataConfig) -> Iterator[HostBatch]:
    """All rows of at most `config.eval_steps` batches of one task's `eval_split`."""
    return iter(EvalBatches(tasks, part, config))
