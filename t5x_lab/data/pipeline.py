"""The input pipeline: logical shards of a SeqIO task or mixture, batched, with a position that can be saved."""

import re
from collections.abc import Iterator

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.data.config import DataConfig
from t5x_lab.data.feature_converters import convert, task_lengths
from t5x_lab.data.tasks import WeightedTasks, get_mixture_or_task
from t5x_lab.training.batches import HostBatch


def resolve_tasks(config: DataConfig, architecture: str, vocab_size: int) -> WeightedTasks:
    """The run's tasks, checked against the model before any text is read.

    Raises:
      UserError: for an unknown name, lengths or an architecture that do not fit, a vocabulary larger than the model's.
    """
    tasks = get_mixture_or_task(config)
    for task in tasks.tasks:
        task_lengths(task.name, architecture, task.output_features, config.task_feature_lengths)
        for name, feature in task.output_features.items():
            if feature.vocabulary.vocab_size > vocab_size:
                raise UserError(
                    f'The vocabulary of feature "{name}" of task "{task.name}" has {feature.vocabulary.vocab_size} ids, the '
                    f"model only {vocab_size}. Set --gin.TransformerConfig.vocab_size to at least that, or use the "
                    "vocabulary the model was made for."
                )
    return tasks


class SeqioBatches:
    """Endless training batches of the shards that this process reads; see `t5x_lab.training.batches.Batches`.

    Rows of a batch are grouped by shard, in the order of the shards.

    Args:
      tasks: what to read.
      config: lengths, batch size, shards.
      architecture: of the model.
      seed: of shuffling and of every random choice of the objectives; each shard derives its own.
      process, num_processes: which shards this process reads.
    """

    def __init__(
        self, tasks: WeightedTasks, config: DataConfig, architecture: str, seed: int, process: int = 0, num_processes: int = 1
    ):
        if config.shards % num_processes:
            raise UserError(
                f"DATA_SHARDS is {config.shards}, which {num_processes} processes do not divide. Start the run with a number "
                "of processes that does; a new run may also choose another DATA_SHARDS."
            )
        per_process = config.shards // num_processes
        self._shards = range(process * per_process, (process + 1) * per_process)
        rows = config.batch_size // config.shards
        self._iterators = {
            shard: iter(training_shard(tasks, config, architecture, seed, shard).batch(rows, drop_remainder=True).prefetch(2))
            for shard in self._shards
        }

    def __iter__(self):
        return self

    def __next__(self) -> HostBatch:
        try:
            parts = [next(iterator) for iterator in self._iterators.values()]
        except tf.errors.OpError as error:
            raise _sentence(error) from error
        except StopIteration:
            raise UserError(
                "The data have no complete batch: a shard of the training split is empty after preprocessing. Lower "
                "DATA_SHARDS or BATCH_SIZE, shorten TASK_FEATURE_LENGTHS, or give more text."
            ) from None
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}

    def save(self, directory: epath.Path) -> None:
        for shard, iterator in self._iterators.items():
            tf.train.Checkpoint(iterator=iterator).write(str(directory / f"shard_{shard}"))

    def restore(self, directory: epath.Path) -> None:
        saved = sum(1 for file in directory.iterdir() if file.name.endswith(".index"))
        for shard, iterator in self._iterators.items():
            if not (directory / f"shard_{shard}.index").exists():
                raise UserError(
                    f"The checkpoint holds the position of {saved} data shards, not of shard {shard}. DATA_SHARDS is fixed "
                    f"for a run's life; set --gin.DATA_SHARDS={saved}."
                )
            tf.train.Checkpoint(iterator=iterator).read(str(directory / f"shard_{shard}")).assert_consumed()


def training_shard(tasks: WeightedTasks, config: DataConfig, architecture: str, seed: int, shard: int) -> tf.data.Dataset:
    """Model features of one logical shard, shuffled and repeated without end."""
    shard_info = seqio.ShardInfo(index=shard, num_shards=config.shards)
    shard_seed = int(np.random.default_rng([seed, shard]).integers(2**31))
    parts = [(_shard_of_task(task, shard_info, seed, config.shuffle_buffer_size), rate) for task, rate in tasks.rates.items()]
    provider = parts[0][0] if len(parts) == 1 else seqio.Mixture(tasks.name, parts)
    lengths = task_lengths(tasks.name, architecture, tasks.output_features, config.task_feature_lengths)
    try:
        dataset = provider.get_dataset(
            lengths, split="train", shuffle=True, seed=shard_seed, num_epochs=None, try_in_mem_cache=False
        )
    except ValueError as error:
        raise UserError(f'The task "{tasks.name}" cannot be prepared at the lengths {lengths}: {error}') from error
    dataset = convert(dataset, architecture, tasks.output_features, lengths, tasks.vocabulary, config.pack)
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


class _ShardOfSource(seqio.DataSource):
    """One shard of a source, cut with the run's seed, so that shards stay disjoint while the rest of each shard's
    pipeline is free to use a seed of its own. (With one seed for all, the n-th examples of all shards would be masked
    alike.)"""

    def __init__(self, source: seqio.DataSource, shard_info: seqio.ShardInfo, seed: int):
        super().__init__(splits=source.splits)
        self._source, self._shard_info, self._seed = source, shard_info, seed

    supports_arbitrary_sharding = False

    def list_shards(self, split: str) -> list[str]:
        return ["0"]

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused) -> tf.data.Dataset:
        source, info = self._source, self._shard_info
        if source.supports_arbitrary_sharding or len(source.list_shards(split=split)) >= info.num_shards:
            return source.get_dataset(split=split, shuffle=shuffle, seed=self._seed, shard_info=info)
        return source.get_dataset(split=split, shuffle=shuffle, seed=self._seed).shard(info.num_shards, info.index)


def _shard_of_task(task: seqio.Task, shard_info: seqio.ShardInfo, seed: int, shuffle_buffer_size: int) -> seqio.Task:
    return seqio.Task(
        task.name,
        _ShardOfSource(task.source, shard_info, seed),
        output_features=task.output_features,
        preprocessors=task.preprocessors,
        shuffle_buffer_size=shuffle_buffer_size,
    )


def eval_batches(
    task: seqio.Task, vocabulary: seqio.Vocabulary, config: DataConfig, architecture: str, process: int, num_processes: int
) -> Iterator[HostBatch]:
    """At most `config.eval_steps` batches of the validation split, the same ones every time.

    The last batch is filled up with rows of padding, which count for nothing; where several processes read, so are
    batches that this process has no rows for, since all processes must take part in every step.
    """
    lengths = task_lengths(task.name, architecture, task.output_features, config.task_feature_lengths)
    shard_info = seqio.ShardInfo(index=process, num_shards=num_processes)
    dataset = task.get_dataset(lengths, split="validation", shuffle=False, seed=0, shard_info=shard_info, num_epochs=1)
    dataset = convert(dataset, architecture, task.output_features, lengths, vocabulary, config.pack)
    rows = config.batch_size // num_processes
    produced = 0
    for batch in dataset.batch(rows).take(config.eval_steps).as_numpy_iterator():
        produced += 1
        yield {name: np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}
    while num_processes > 1 and produced < config.eval_steps:
        produced += 1
        yield {name: np.zeros((rows, *spec.shape), spec.dtype.as_numpy_dtype) for name, spec in dataset.element_spec.items()}


def _sentence(error: tf.errors.OpError) -> Exception:
    """Errors that our own parsers raised inside tf.data are the user's; any other is passed on as it is."""
    marked = re.search(r"A line of your \.jsonl files .*", str(error))
    return UserError(marked[0]) if marked else error
