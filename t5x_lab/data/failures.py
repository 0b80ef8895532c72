"""Which task, file and record a pipeline failed on: looked for when it has failed, so that reading costs nothing more."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.caches import opened
from t5x_lab.data.many import one_after_the_other
from t5x_lab.data.mixture import Part
from t5x_lab.data.sources import of_file
from t5x_lab.observe.console import say

SECONDS = 120  # that a record is looked for


@contextlib.contextmanager
def naming_what_fails(parts: Sequence[Part], split: str) -> Iterator[None]:
    """Raises a `UserError` in place of an error of TensorFlow's, where these tasks are read."""
    try:
        yield
    except tf.errors.OpError as error:
        raise _named(error, parts, split) from error


def _named(error: tf.errors.OpError, parts: Sequence[Part], split: str) -> UserError:
    cause, suspect = _cause(error), _suspect(error, parts)
    say(f"A record of {suspect.task.name if suspect else 'a task'} cannot be read; it is looked for now.")
    until = time.monotonic() + SECONDS
    for part in [suspect, *(part for part in parts if part is not suspect)] if suspect else parts:
        for file, source in _by_file(opened(part.task.source, split), split):
            if time.monotonic() > until:
                break
            where = _first_failure(part, source, f" of {file}" if file else "", split, until)
            if where:
                return UserError(f'The task "{part.task.name}" fails {where}: {cause}')
    task = f'The task "{suspect.task.name}"' if suspect else "A task"
    return UserError(f"{task} cannot be read: {cause} (Which record it was has not been found.)")


def _cause(error: tf.errors.OpError) -> str:
    """What was raised first, as a sentence, without TensorFlow's names of operations and threads."""
    said = re.sub(r"Error in user-defined function passed to .*? iterator: \S+: ", "", str(error.message))
    said = re.sub(r"\{\{.*?\}\} ?|\[\[.*?\]\]|\[Op:.*", "", said.split("\nTraceback")[0]).strip()
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0].removeprefix("UserError: ").rstrip(".") + "." if lines else f"{type(error).__name__}."


def _suspect(error: tf.errors.OpError, parts: Sequence[Part]) -> Part | None:
    """The only task, or the one whose input of the mixture it was, where TensorFlow's path of iterators says so."""
    if len(parts) == 1:
        return parts[0]
    inputs = re.findall(r"DirectedInterleave\[(\d+)\]", str(error.message))
    drawn = [part for part in parts if inputs and part.rate > 0]  # TensorFlow leaves out the others
    return drawn[int(inputs[0])] if inputs and int(inputs[0]) < len(drawn) else None


def _by_file(source: seqio.DataSource, split: str) -> Iterator[tuple[str | None, seqio.DataSource]]:
    if not isinstance(source, seqio.FileDataSource):
        yield None, source
        return
    for file in source.list_shards(split):
        yield file, of_file(source, split, file)


def _first_failure(part: Part, source: seqio.DataSource, of_file: str, split: str, until: float) -> str | None:
    """ "at record 17 of FILE (how it begins)", or "behind" it where the source fails; None where nothing does."""
    with one_after_the_other():
        records = source.get_dataset(split, shuffle=False)
    number, record = 0, None

    def noted():
        nonlocal number, record
        for record in records:
            number += 1
            if time.monotonic() > until:
                return
            yield record

    if not _fails(part, noted, records.element_spec):
        return None
    if record is None:
        return f"among the first records{of_file}"
    alone = _fails(part, lambda: iter([record]), records.element_spec)
    return f"{'at' if alone else 'behind'} record {number}{of_file} ({_shown(record)})"


def _fails(part: Part, records: Callable[[], Iterator], spec: Any) -> bool:
    nothing_ahead = tf.data.Options()
    nothing_ahead.experimental_optimization.apply_default_optimizations = False
    nothing_ahead.autotune.enabled = False
    with one_after_the_other():
        dataset = tf.data.Dataset.from_generator(records, output_signature=spec)
        try:
            cached = part.task.preprocess_precache(dataset, seed=0)
            examples = part.task.preprocess_postcache(cached, sequence_length=part.sequence_length, seed=0)
            for _ in examples.with_options(nothing_ahead):
                pass
        except tf.errors.OpError:
            return True
    return False


def _shown(record: Any) -> str:
    features = record if isinstance(record, dict) else {"": record}
    values = {name: str(x.numpy() if hasattr(x, "numpy") else x) for name, x in features.items()}
    return ", ".join(f"{name} {value[:60]}{'…' * (len(value) > 60)}".strip() for name, value in values.items())
