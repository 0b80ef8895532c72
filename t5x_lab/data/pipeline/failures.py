"""Finds the task, file and record that a failed pipeline stopped at.

Searching after the failure costs nothing while reading.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.cache.reading import split_source
from t5x_lab.data.pipeline.patches import sequential_maps
from t5x_lab.data.sources.sharding import single_file_source
from t5x_lab.data.tasks.mixture import Component

SEARCH_SECONDS = 120


@contextlib.contextmanager
def report_failing_record(components: Sequence[Component], split: str) -> Iterator[None]:
    """Converts errors of TensorFlow inside the block into a `UserError` that names the record of these tasks."""
    try:
        yield
    except tf.errors.OpError as error:
        raise _describe_failure(error, components, split) from error


def _describe_failure(error: tf.errors.OpError, components: Sequence[Component], split: str) -> UserError:
    cause, suspect = describe_cause(error), _suspect(error, components)
    log(f"A record of {suspect.task.name if suspect else 'a task'} cannot be read. Searching for it.")
    deadline = time.monotonic() + SEARCH_SECONDS
    for component in [suspect, *(component for component in components if component is not suspect)] if suspect else components:
        for file, source in _split_by_file(split_source(component.task.source, split), split):
            if time.monotonic() > deadline:
                break
            location = _first_failure(component, source, f" of {file}" if file else "", split, deadline)
            if location:
                return UserError(f'The task "{component.task.name}" fails {location}: {cause}')
    task = f'The task "{suspect.task.name}"' if suspect else "A task"
    return UserError(f"{task} cannot be read: {cause} (The record was not found.)")


def describe_cause(error: tf.errors.OpError) -> str:
    """Returns the original error as a sentence, without TensorFlow's names of operations and threads."""
    text = re.sub(r"Error in user-defined function passed to .*? iterator: \S+: ", "", str(error.message))
    text = re.sub(r"\{\{.*?\}\} ?|\[\[.*?\]\]|\[Op:.*", "", text.split("\nTraceback")[0]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].removeprefix("UserError: ").rstrip(".") + "." if lines else f"{type(error).__name__}."


def _suspect(error: tf.errors.OpError, components: Sequence[Component]) -> Component | None:
    """Returns the failed task if TensorFlow's path of iterators shows it, or there is only one task."""
    if len(components) == 1:
        return components[0]
    inputs = re.findall(r"DirectedInterleave\[(\d+)\]", str(error.message))
    sampled = [component for component in components if inputs and component.rate > 0]  # TensorFlow drops the others
    return sampled[int(inputs[0])] if inputs and int(inputs[0]) < len(sampled) else None


def _split_by_file(source: seqio.DataSource, split: str) -> Iterator[tuple[str | None, seqio.DataSource]]:
    if not isinstance(source, seqio.FileDataSource):
        yield None, source
        return
    for file in source.list_shards(split):
        yield file, single_file_source(source, split, file)


def _first_failure(component: Component, source: seqio.DataSource, suffix: str, split: str, deadline: float) -> str | None:
    """Returns "at record 17 of FILE (excerpt)", or "after" it if the source fails, None if nothing fails."""
    with sequential_maps():
        records = source.get_dataset(split, shuffle=False)
    number, record = 0, None

    def numbered_records():
        nonlocal number, record
        for record in records:
            number += 1
            if time.monotonic() > deadline:
                return
            yield record

    if not _fails(component, numbered_records, records.element_spec):
        return None
    if record is None:
        return f"at the first records{suffix}"
    is_this_record = _fails(component, lambda: iter([record]), records.element_spec)
    return f"{'at' if is_this_record else 'after'} record {number}{suffix} ({_excerpt(record)})"


def _fails(component: Component, records: Callable[[], Iterator], spec: Any) -> bool:
    no_prefetching = tf.data.Options()
    no_prefetching.experimental_optimization.apply_default_optimizations = False
    no_prefetching.autotune.enabled = False
    try:
        with sequential_maps():
            dataset = tf.data.Dataset.from_generator(records, output_signature=spec)
            cached = component.task.preprocess_precache(dataset, seed=0)
            examples = component.task.preprocess_postcache(cached, sequence_length=component.sequence_length, seed=0)
        for _ in examples.with_options(no_prefetching):
            pass
    except tf.errors.OpError:
        return True
    return False


def _excerpt(record: Any) -> str:
    features = record if isinstance(record, dict) else {"": record}
    values = {name: str(x.numpy() if hasattr(x, "numpy") else x) for name, x in features.items()}
    return ", ".join(f"{name} {value[:60]}{'…' * (len(value) > 60)}".strip() for name, value in values.items())
