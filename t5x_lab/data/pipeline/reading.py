"""Training examples of one shard of a task, and all examples of a split in order.

Seeds are derived from (run, task, shard), so that tasks over the same data set are read in different orders, and the n-th
examples of two shards are not corrupted alike.
"""

import copy

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log_once
from t5x_lab.config.user_code import describe_error
from t5x_lab.data.cache.reading import CachedFiles, split_source
from t5x_lab.data.config import DataConfig
from t5x_lab.data.objectives.preprocessors import truncate_corpus
from t5x_lab.data.pipeline.graph import Shard, build_with_autograph
from t5x_lab.data.pipeline.seeds import derive_seed
from t5x_lab.data.pipeline.source_shards import SourceShard
from t5x_lab.data.tasks.mixture import Component, describe_missing_inputs

# More tasks share one buffer of examples, and the records of this many tasks' buffers. A buffer of examples per task would make
# gigabytes of checkpoints.
MAX_SEPARATE_TASKS = 16
MAX_ROTATION = 256  # first records of a file that a task without its own shuffle buffer may read last


def are_separate(num_tasks: int) -> bool:
    """Returns whether each of this many tasks has a buffer of examples of its own."""
    return num_tasks <= MAX_SEPARATE_TASKS


def task_shard(
    component: Component, config: DataConfig, run_seed: int, shard: Shard, num_tasks: int, text_share: float = 1.0
) -> tf.data.Dataset:
    """Returns the endless examples of one shard, shuffled if the run has few tasks.

    Args:
      component: the task and its lengths.
      config: data configuration.
      run_seed: SEED.
      shard: number of the shard, a tensor in a graph of all shards.
      num_tasks: number of tasks of the run.
      text_share: share of `unique_tokens` that this task has.

    Raises:
      UserError: if the task needs a cache that does not exist, or a preprocessor fails.
    """
    task = component.task
    seed = derive_seed(run_seed, task.name, shard)
    fixed_order = bool(config.unique_tokens) or not config.shuffle
    whole = split_source(task.source, config.split)
    source = SourceShard(whole, shard, config.shards, derive_seed(run_seed, task.name), fixed_order)
    is_separate = are_separate(num_tasks)
    buffer_size = config.shuffle_buffer_size or task.shuffle_buffer_size
    try:
        if type(task).get_dataset is not seqio.Task.get_dataset:  # a user's class that reads in its own way
            own = copy.copy(task)
            own._source = source
            return own.get_dataset(
                component.sequence_length,
                config.split,
                shuffle=config.shuffle,
                shuffle_buffer_size=buffer_size,
                seed=seed,
                num_epochs=None,
                try_in_mem_cache=False,
                trim_output_features=not component.is_text,
            )

        is_cached, start = isinstance(whole, CachedFiles), seed % MAX_ROTATION
        rotates = not (is_separate or fixed_order) and source.is_one_file(config.split)

        def repeat(dataset: tf.data.Dataset) -> tf.data.Dataset:
            if config.unique_tokens:
                share, remainder = divmod(round(config.unique_tokens * text_share), config.shards)
                dataset = truncate_corpus(share + (shard < remainder))(dataset)
            dataset = dataset.repeat()
            return dataset.skip(start) if rotates and is_cached else dataset

        def preprocess() -> tf.data.Dataset:
            records = source.get_dataset(config.split, seed=seed)
            if rotates and not is_cached:  # preprocessing the records to skip would take half of the time to the first batch
                records = records.skip(start).concatenate(records.take(start))
            if not (is_separate or fixed_order):
                size = MAX_SEPARATE_TASKS * (buffer_size or 0) // num_tasks
                records = records.shuffle(size, seed=seed) if size > 1 else records
            cached = task.preprocess_precache(records, seed=seed)
            return task.preprocess_postcache(repeat(cached), sequence_length=component.sequence_length, seed=seed)

        dataset = build_with_autograph(preprocess)
        _check_features(dataset, component)
        return dataset.shuffle(buffer_size, seed=seed) if is_separate and buffer_size and config.shuffle else dataset
    except (UserError, tf.errors.OpError):  # the latter come from reading, see `failures`
        raise
    except Exception as error:
        raise UserError(
            f'The task "{task.name}" cannot be read at the lengths {dict(component.lengths)}: {describe_error(error)}.'
        ) from error


def read_split(component: Component, split: str, trim: bool = False) -> tf.data.Dataset:
    """Returns all examples of a split once, in file order. `trim` truncates features to their lengths."""
    return component.task.get_dataset(
        component.sequence_length, split, shuffle=False, seed=0, num_epochs=1, trim_output_features=trim
    )


def _check_features(dataset: tf.data.Dataset, component: Component) -> None:
    """Raises a `UserError` if the preprocessors do not make a required feature. Logs inputs that nothing reads."""
    task = component.task
    features = {name: spec for name, spec in dataset.element_spec.items() if spec.dtype != tf.string}
    required = [name for name, feature in task.output_features.items() if feature.required]
    for name in sorted({*required, *component.lengths}):
        if name not in features and name == "inputs" and name not in task.output_features:
            raise UserError(describe_missing_inputs(task))
        if name not in features and (name not in task.output_features or name in required):
            raise UserError(
                f'The preprocessors of task "{task.name}" do not make "{name}", which its output_features or '
                f"TASK_FEATURE_LENGTHS name. They make {', '.join(features)}."
            )
    is_unread = "inputs" in features and "inputs" not in {*task.output_features, *component.lengths}
    if is_unread and "targets" in component.lengths:
        log_once(
            f'The preprocessors of task "{task.name}" make inputs, but its output_features lack them, so they are not read. '
            "Add them."
        )
