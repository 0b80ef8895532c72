"""All shards of many tasks in one tf.data graph, so that hundreds of tasks are traced once.

A separate pipeline for each (task, shard) would cost 0.2 CPU-seconds, 3 MiB of memory and 150 KB of checkpoint. Here the shard
number and its seed are tensors of the graph. Maps run sequentially within a shard, and shards run in parallel.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.pipeline.patches import sequential_maps, single_device_functions

Shard = int | tf.Tensor


class ShardSeed:
    """Graph seed that is a tensor, the seed of a shard. TensorFlow adds it to the seeds of all random datasets in the graph.

    An operation that needs a Python number as its seed gets `number`, the same in all shards.
    """

    def __init__(self, tensor: tf.Tensor, number: int):
        self._tensor, self._number = tensor, number

    def __mod__(self, limit: int) -> "ShardSeed":  # TensorFlow reduces seeds below 2**31, which this one is
        return self

    def __eq__(self, other: object) -> bool:  # TensorFlow tests whether both seeds are 0, which this one is not
        return self is other

    __hash__ = object.__hash__

    def __int__(self) -> int:
        return self._number

    __index__ = __int__

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        return tf.cast(self._tensor, dtype or tf.int64)


def build_with_autograph(make: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """Returns `make()`, with AutoGraph if its steps branch on tensors.

    TensorFlow does not convert steps inside another function, as in the graph of many shards. Converting the steps of hundreds
    of tasks would take a quarter of the time to the first batch, so they are only converted if they fail without it.
    """
    try:
        return make()
    except (UserError, tf.errors.OpError):
        raise
    except Exception as first_error:
        if tf.executing_eagerly():
            raise
        from tensorflow.python.autograph.core import ag_ctx  # it has no public name

        try:
            with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):
                return make()
        except Exception as second_error:
            is_branch = isinstance(first_error, tf.errors.OperatorNotAllowedInGraphError)
            raise (second_error if is_branch else first_error) from None


def interleave_shards(
    make: Callable[[tf.Tensor], tf.data.Dataset], shards: Sequence[int], seeds: Sequence[int], seed: int
) -> tf.data.Dataset:
    """Returns a dataset with one element of each shard in turn.

    Args:
      make: f(shard number) -> dataset of the shard, called once.
      shards: shard numbers.
      seeds: seed of each shard, 1 … 2**31-1.
      seed: seed of operations that need a Python number.
    """

    def shard_dataset(shard: tf.Tensor, shard_seed: tf.Tensor) -> tf.data.Dataset:
        tf.compat.v1.get_default_graph().seed = ShardSeed(shard_seed, seed)
        with sequential_maps():
            return make(shard)

    shard_dataset.autograph_info__ = {}  # type: ignore[attr-defined]  # AutoGraph converts the tasks' functions, not this one
    numbers = tf.data.Dataset.from_tensor_slices((np.array(shards, np.int64), np.array(seeds, np.int64)))
    parallel_calls = min(len(shards), os.cpu_count() or 1)
    with single_device_functions():
        interleaved = numbers.interleave(
            shard_dataset, cycle_length=len(shards), block_length=1, num_parallel_calls=parallel_calls
        )
    options = tf.data.Options()
    options.deterministic = True
    # Graph optimizations run at each start of an iterator, and take longer for hundreds of tasks than they save.
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    # Seed generators count as external state. Here they are tensors, which are saved with the iterator.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return interleaved.with_options(options)


@contextlib.contextmanager
def shared_shard_seed() -> Iterator[None]:
    """Uses one seed for all shards inside the block, so that they order files alike and stay disjoint."""
    graph = tf.compat.v1.get_default_graph()
    shard_seed, graph.seed = graph.seed, int(graph.seed)
    try:
        yield
    finally:
        graph.seed = shard_seed
