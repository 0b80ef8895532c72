"""Shards of many tasks in one graph: hundreds of tasks are traced once for all shards of a process, and share what is compiled.

Each (task, shard) as a pipeline of its own would cost 0.2 CPU-seconds, 3 MiB of memory and 150 KB of position. Here a shard's
number is a tensor of the graph, and so is its seed; maps run one after the other within a shard, and shards beside each other.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from t5x_lab.config.errors import UserError

Shard = int | tf.Tensor
PATCHED = threading.RLock()  # held while TensorFlow's functions are replaced by others


class ShardSeed:
    """The seed of a shard, a tensor, as the seed of a graph: TensorFlow adds it to the seeds of all random datasets in there.

    An operation that wants a number as its seed takes `number`, and is the same in all shards.
    """

    def __init__(self, tensor: tf.Tensor, number: int):
        self._tensor, self._number = tensor, number

    def __mod__(self, most: int) -> "ShardSeed":  # TensorFlow brings seeds below 2**31, which this one is
        return self

    def __eq__(self, other: object) -> bool:  # TensorFlow looks whether both seeds are 0, which this one is not
        return self is other

    __hash__ = object.__hash__

    def __int__(self) -> int:
        return self._number

    __index__ = __int__

    def __tf_tensor__(self, dtype=None, name=None) -> tf.Tensor:
        return tf.cast(self._tensor, dtype or tf.int64)


def as_outside(make: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
    """What `make` makes, also where its steps branch on tensors.

    TensorFlow converts such steps, but none within a function, as that of many shards is. All are converted here where one must
    be: of hundreds of tasks it would cost a quarter of the time to the first batch.
    """
    try:
        return make()
    except (UserError, tf.errors.OpError):
        raise
    except Exception as plain:
        if tf.executing_eagerly():
            raise
        from tensorflow.python.autograph.core import ag_ctx  # it has no public name

        try:
            with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):
                return make()
        except Exception as converted:
            branches = isinstance(plain, tf.errors.OperatorNotAllowedInGraphError)
            raise (converted if branches else plain) from None


def of_shards(
    make: Callable[[tf.Tensor], tf.data.Dataset], shards: Sequence[int], seeds: Sequence[int], seed: int
) -> tf.data.Dataset:
    """An element of each shard in turn.

    Args:
      make: f(number of a shard) -> its dataset, called once.
      shards: numbers.
      seeds: of each, 1 … 2**31-1.
      seed: for operations that have it in their definition.
    """

    def one(shard: tf.Tensor, of_shard: tf.Tensor) -> tf.data.Dataset:
        tf.compat.v1.get_default_graph().seed = ShardSeed(of_shard, seed)
        with one_after_the_other():
            return make(shard)

    one.autograph_info__ = {}  # type: ignore[attr-defined]  # not to be converted itself, while the tasks' functions are
    numbers = tf.data.Dataset.from_tensor_slices((np.array(shards, np.int64), np.array(seeds, np.int64)))
    beside = min(len(shards), os.cpu_count() or 1)
    with PATCHED, _functions_of_one_device() if _knows_one_device() else contextlib.nullcontext():
        together = numbers.interleave(one, cycle_length=len(shards), block_length=1, num_parallel_calls=beside)
    options = tf.data.Options()
    options.deterministic = True
    # The graph is made for one pipeline: of hundreds of tasks each start would cost more than those before it.
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    # Generators of seeds count as state in a graph; theirs are tensors that are saved with it.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return together.with_options(options)


@contextlib.contextmanager
def _functions_of_one_device() -> Iterator[None]:
    """Functions of datasets are marked as one device's, and run as they were traced.

    Others are placed, split by device and optimised anew by each shard's iterator, thousands of times in all: half of the time
    to the first batch, and nearly all of the time that a restore takes. TensorFlow knows the attribute by this name alone.
    """
    from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper as of_dataset

    plain = of_dataset.__init__

    def of_one_device(self, func, transformation_name, *args, defun_kwargs=None, **options):
        # A scan's function, marked, is refused for its two results.
        mark = {} if "scan" in transformation_name else {"experimental_ints_on_device": True}
        plain(self, func, transformation_name, *args, defun_kwargs={**(defun_kwargs or {}), **mark}, **options)

    of_dataset.__init__ = of_one_device
    try:
        yield
    finally:
        of_dataset.__init__ = plain


@functools.cache
def _knows_one_device() -> bool:
    """Whether this TensorFlow does: neither class nor attribute are public, and without them all is right, and slower."""
    try:
        with _functions_of_one_device():
            tf.data.Dataset.range(1).map(lambda x: x + 1)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def same_in_all_shards() -> Iterator[None]:
    """What is made here, in a graph of shards, has the same random order in all of them: parts of it stay disjoint."""
    graph = tf.compat.v1.get_default_graph()
    of_shard, graph.seed = graph.seed, int(graph.seed)
    try:
        yield
    finally:
        graph.seed = of_shard


@contextlib.contextmanager
def one_after_the_other() -> Iterator[None]:
    """Maps and interleaves without parallel calls, whatever SeqIO and preprocessors ask for: each would have threads, buffers
    and their position."""
    dataset = tf.data.Dataset
    plain_map, plain_interleave = dataset.map, dataset.interleave

    def of_map(self, map_func, num_parallel_calls=None, deterministic=None, **options):
        return plain_map(self, map_func, **options)

    def interleave(
        self, map_func, cycle_length=None, block_length=None, num_parallel_calls=None, deterministic=None, **options
    ):
        cycle_length = 16 if cycle_length in (None, tf.data.AUTOTUNE) else cycle_length
        return plain_interleave(self, map_func, cycle_length, block_length, **options)

    dataset.map, dataset.interleave = of_map, interleave
    try:
        yield
    finally:
        dataset.map, dataset.interleave = plain_map, plain_interleave
