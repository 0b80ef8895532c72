"""Temporary replacements of functions of TensorFlow while a pipeline is built. Nothing else in t5x_lab replaces such functions.

Each has no public setting that does the same. `PATCH_LOCK` is held meanwhile, so that threads do not restore each other's
replacement.

A mixture of 313 templates on two CPU cores (benchmarks/prompts.py) has a budget of 60 s and 50 MB. The first batch takes
49 s, and a saved position 25 MB. Without `sequential_maps` it is 67 s and 167 MB. Without `single_device_functions` there is
no batch after 140 s.
"""

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper  # it has no public name
from tensorflow.python.ops import script_ops  # it has no public name

PATCH_LOCK = threading.RLock()


@contextlib.contextmanager
def sequential_maps() -> Iterator[None]:
    """Makes `map` and `interleave` sequential, whatever SeqIO and preprocessors ask for.

    Parallel calls of hundreds of tasks would each have threads, buffers and a saved position.
    """
    dataset = tf.data.Dataset

    def sequential_map(self, map_func, num_parallel_calls=None, deterministic=None, **options):
        return original_map(self, map_func, **options)

    def sequential_interleave(
        self, map_func, cycle_length=None, block_length=None, num_parallel_calls=None, deterministic=None, **options
    ):
        cycle_length = 16 if cycle_length in (None, tf.data.AUTOTUNE) else cycle_length
        return original_interleave(self, map_func, cycle_length, block_length, **options)

    with PATCH_LOCK:
        original_map, original_interleave = dataset.map, dataset.interleave
        dataset.map, dataset.interleave = sequential_map, sequential_interleave
        try:
            yield
        finally:
            dataset.map, dataset.interleave = original_map, original_interleave


@contextlib.contextmanager
def single_device_functions() -> Iterator[None]:
    """Marks functions of datasets that are built inside the block as single-device, so that they run as they were traced.

    Other functions are placed, partitioned and optimized again by each shard's iterator, thousands of times in all. That takes
    half of the time to the first batch and most of the time of a restore. Without TensorFlow's attribute, which is not public,
    nothing is marked and reading starts more slowly.
    """
    with PATCH_LOCK, _mark_functions() if _can_mark_functions() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _mark_functions() -> Iterator[None]:
    original = StructuredFunctionWrapper.__init__
    in_graph = None  # None before the first function; then whether the current function belongs to the graph

    def mark_single_device(self, func, transformation_name, *args, defun_kwargs=None, **options):
        nonlocal in_graph
        outer = in_graph
        # Datasets that are read eagerly while a function is traced (`tf.init_scope`) do not belong to the graph.
        in_graph = outer is None or (outer and not tf.executing_eagerly())
        # TensorFlow rejects a marked scan function because of its two results.
        mark = {"experimental_ints_on_device": True} if in_graph and "scan" not in transformation_name else {}
        try:
            original(self, func, transformation_name, *args, defun_kwargs={**(defun_kwargs or {}), **mark}, **options)
        finally:
            in_graph = outer

    StructuredFunctionWrapper.__init__ = mark_single_device
    try:
        yield
    finally:
        StructuredFunctionWrapper.__init__ = original


@functools.cache
def _can_mark_functions() -> bool:
    """Returns whether this TensorFlow has the attribute, which is not public."""
    try:
        with _mark_functions():
            tf.data.Dataset.range(1).map(lambda x: x + 1)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def record_stateful_functions(calls: list[tuple[Callable, traceback.StackSummary]]) -> Iterator[None]:
    """Appends the stack of each call of `tf.py_function`, and of `tf.numpy_function` without `stateful=False`."""
    original = script_ops._internal_py_func

    def record_call(func, inp, Tout, stateful=None, use_eager_py_func=False, **options):
        if stateful or use_eager_py_func:
            calls.append((func, traceback.extract_stack()))
        return original(func, inp, Tout, stateful, use_eager_py_func, **options)

    with PATCH_LOCK:
        script_ops._internal_py_func = record_call
        try:
            yield
        finally:
            script_ops._internal_py_func = original
