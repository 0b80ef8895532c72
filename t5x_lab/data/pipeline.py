"""The input pipeline: logical shards of a SeqIO task or mixture, batched, with a position that can be saved."""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.data.config import DataConfig
from t5x_lab.data.feature_converters import convert
from t5x_lab.data.huggingface_tokenizer import HuggingFaceTokenizer
from t5x_lab.data.mixture import Part, WeightedTasks, resolve
from t5x_lab.data.objective import PrefixLm
from t5x_lab.data.reading import MANY, seed_of, shard_of_task
from t5x_lab.data.vocabularies import sentinels_of
from t5x_lab.observe.console import say
from t5x_lab.training.batches import HostBatch, Rows


def resolve_tasks(config: DataConfig, architecture: str, vocab_size: int) -> WeightedTasks:
    """The run's tasks, checked against the model before any text is read.

    Raises:
      UserError: for an unknown name, lengths or an architecture that do not fit, a vocabulary larger than the model's.
    """
    tasks = resolve(config, architecture)
    if tasks.vocabulary.eos_id is None:
        raise UserError(
            f"{config.vocabulary} has no end token, which training puts behind documents. Add one to the tokenizer's files "
            '("eos_token" in tokenizer_config.json).'
        )
    if not config.pack and _has_text_at_0(tasks.vocabulary):
        raise UserError(
            "DataConfig.pack is False: padding of rows that are not packed has the id 0, which is a token of "
            f"{config.vocabulary}. Leave it out."
        )
    _tell_what_is_not_read(tasks, config)
    for part in tasks.parts:
        for name, feature in part.task.output_features.items():
            if feature.vocabulary.vocab_size > vocab_size:
                raise UserError(
                    f'The vocabulary of feature "{name}" of task "{part.task.name}" has {feature.vocabulary.vocab_size} ids, '
                    f"the model only {vocab_size}. Set the network's (--gin.TransformerConfig.vocab_size) to at least that, or "
                    "use the "
                    "vocabulary the model was made for."
                )
    return tasks


def check_readable(tasks: WeightedTasks) -> None:
    """Opens the tasks' sources; raises what they raise where their data are not here."""
    for part in tasks.trained:
        part.task.source.list_shards("train")


def _tell_what_is_not_read(tasks: WeightedTasks, config: DataConfig) -> None:
    """Says which settings and features a run does without, in a line each."""
    end, ends = tasks.vocabulary.eos_id, config.special_tokens.ends
    if ends and end not in ends:
        say(
            f"Training ends texts with {end}, the vocabulary's end token; SpecialTokens.end is {config.special_tokens.end}, at "
            "which the trained model stops writing. Make one of them the other."
        )
    read = {name for part in tasks.parts for name in part.lengths}
    for name in sorted(set(config.task_feature_lengths) - read):
        say(
            f'TASK_FEATURE_LENGTHS gives a length for "{name}", which nothing reads.{nearest(name, read)} The lengths read are '
            f"{', '.join(sorted(read))}."
        )
    made_of = ("inputs", "targets", *(["loss_weights"] if tasks.architecture == "encoder" else []))
    for part in tasks.parts:
        unread = [f'"{name}"' for name in part.task.output_features if name not in made_of]
        if unread:
            say(f'Nothing reads {", ".join(unread)} of the task "{part.task.name}"; a model reads inputs and targets.')


class SeqioBatches:
    """Endless training batches of this process's rows; see `t5x_lab.training.batches.Batches`.

    Rows of a batch are grouped by shard, in the order of the shards. A process reads the shards that its rows come from, and
    saves the position of those whose first row it owns.

    Args:
      tasks: what to read.
      config: batch size, shards, packing.
      seed: of shuffling and of every random choice of the objectives; each shard derives its own.
      rows: those of this process; all by default.
    """

    def __init__(self, tasks: WeightedTasks, config: DataConfig, seed: int, rows: Rows | None = None):
        rows = rows or Rows.all(config.batch_size)
        per_shard = config.batch_size // config.shards
        shards = np.unique(rows.held // per_shard)
        self._rows = np.searchsorted(shards, rows.held // per_shard) * per_shard + rows.held % per_shard
        if len(shards) * per_shard > len(rows.held):
            print(
                f"This process reads {len(shards) * per_shard} rows of each batch and uses {len(rows.held)} of them, because "
                f"its rows come from parts of shards. DATA_SHARDS ({config.shards}) had better be a multiple of the number of "
                "processes; it is fixed for the life of a run.",
                file=sys.stderr,
            )
        self._saved = [shard for shard in shards if shard * per_shard in rows.owned]
        self._iterators = {shard: iter(training_shard(tasks, config, seed, shard).prefetch(2)) for shard in shards.tolist()}

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
        return {name: np.concatenate([part[name].numpy() for part in parts])[self._rows] for name in parts[0]}

    def save(self, directory: epath.Path) -> list[epath.Path]:
        for shard in self._saved:
            tf.train.Checkpoint(iterator=self._iterators[shard]).write(str(directory / f"shard_{shard}"))
        return [file for shard in self._saved for file in directory.glob(f"shard_{shard}.*")]

    def restore(self, directory: epath.Path) -> None:
        saved = sum(1 for file in directory.iterdir() if file.name.endswith(".index"))
        for shard, iterator in self._iterators.items():
            if not (directory / f"shard_{shard}.index").exists():
                raise UserError(
                    f"The checkpoint holds the position of {saved} data shards, not of shard {shard}. DATA_SHARDS is fixed "
                    f"for a run's life; set --gin.DATA_SHARDS={saved}."
                )
            tf.train.Checkpoint(iterator=iterator).read(str(directory / f"shard_{shard}")).assert_consumed()


def training_shard(tasks: WeightedTasks, config: DataConfig, seed: int, shard: int) -> tf.data.Dataset:
    """Batches of model features of one logical shard, shuffled and repeated without end."""
    parts = tasks.trained
    datasets = [
        _examples(shard_of_task(part, config, seed, shard, len(parts)), part, number, parts, tasks)
        for number, part in enumerate(parts)
    ]
    mixed, shard_seed = datasets[0], seed_of(seed, shard)
    if len(datasets) > 1:
        mixed = tasks.sample_fn(datasets, [part.rate for part in parts], shard_seed)
    if len(parts) > MANY:
        mixed = mixed.shuffle(config.shuffle_buffer_size or seqio.SHUFFLE_BUFFER_SIZE, seed=shard_seed)
    rows = config.batch_size // config.shards
    batches = convert(
        mixed, tasks.architecture, tasks.lengths, rows, pack=config.pack, num_tasks=len(datasets), **_around(tasks, config)
    )
    options = tf.data.Options()
    options.deterministic = True
    if len(parts) > MANY:
        # They are made for one pipeline: of hundreds each start would cost more than those before it.
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
    return batches.with_options(options)


def _around(tasks: WeightedTasks, config: DataConfig) -> dict[str, Any]:
    """Ids before and after a text."""
    end = tasks.vocabulary.eos_id
    return {"start": config.special_tokens.before_texts(end), "end": end}


def _examples(
    dataset: tf.data.Dataset, part: Part, number: int, mixed: Sequence[Part], tasks: WeightedTasks
) -> tf.data.Dataset:
    """Examples of a task with what all tasks of a run have in common.

    `raw_tokens` is the objective's; of other examples, tokens which are not padding, sentinels or end tokens.
    """
    vocabulary = part.task.output_features["targets"].vocabulary
    with_inputs = any("inputs" in other.task.output_features for other in mixed)
    if len(mixed) == 1 and "raw_tokens" in dataset.element_spec:
        return dataset  # has all of it
    with_pairs = tasks.architecture == "encoder_decoder" and any(_is_of_pairs(other) for other in mixed)

    @tf.autograph.experimental.do_not_convert
    def common(example):
        names = [name for name in ("inputs", "targets", "loss_weights") if name in part.task.output_features]
        features = {name: tf.cast(example[name], tf.int32) for name in names}
        read = [name for name in ("inputs", "targets") if name in features and tasks.architecture != "encoder"] or ["targets"]
        raw = (
            example["raw_tokens"] if "raw_tokens" in example else sum(_raw_tokens(features[name], vocabulary) for name in read)
        )
        if with_inputs and "inputs" not in features:
            features["inputs"] = tf.zeros([0], tf.int32)
        if with_pairs:
            features["first"] = example.get("first", tf.stack([tf.size(features["inputs"]), tf.size(features["targets"])]))
        return {**features, "raw_tokens": raw, "task": number}

    return dataset.map(common, tf.data.AUTOTUNE)


def _is_of_pairs(part: Part) -> bool:
    return part.is_text and isinstance(part.task.objective, PrefixLm)


def _raw_tokens(tokens: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
    among_bytes = isinstance(vocabulary, seqio.ByteVocabulary) and not vocabulary.extra_ids  # nothing tells them from text
    sentinels = sorted(() if among_bytes else sentinels_of(vocabulary)) or [vocabulary.vocab_size]
    raw = (tokens != vocabulary.eos_id) & ((tokens < sentinels[0]) | (tokens > sentinels[-1]))
    if not _has_text_at_0(vocabulary):
        raw &= tokens != vocabulary.pad_id
    return tf.reduce_sum(tf.cast(raw, tf.int32))


def _has_text_at_0(vocabulary: seqio.Vocabulary) -> bool:
    return isinstance(vocabulary, HuggingFaceTokenizer) and vocabulary.has_text_at_0


def eval_batches(tasks: WeightedTasks, part: Part, config: DataConfig, rows: Rows | None = None) -> Iterator[HostBatch]:
    """This process's rows of at most `config.eval_steps` batches of one task's validation split, the same ones every time.

    Every process reads all of it, so that rows and batches do not depend on their number. The last batch is filled up with
    rows of padding, which count for nothing.
    """
    dataset = part.task.get_dataset(
        part.lengths, split="validation", shuffle=False, seed=0, num_epochs=1, trim_output_features=not part.is_text
    )
    examples = _examples(dataset, part, 0, [part], tasks)
    size, around = config.batch_size, _around(tasks, config)
    dataset = convert(examples, tasks.architecture, tasks.lengths, size, pack=config.pack, drop_remainder=False, **around)
    held = (rows or Rows.all(size)).held
    for batch in dataset.take(config.eval_steps).as_numpy_iterator():
        yield {name: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))[held] for name, x in batch.items()}


def _sentence(error: tf.errors.OpError) -> Exception:
    """Errors that our own parsers raised inside tf.data are the user's; any other is passed on as it is."""
    marked = re.search(r"A line of your \.jsonl files .*", str(error))
    return UserError(marked[0]) if marked else error
