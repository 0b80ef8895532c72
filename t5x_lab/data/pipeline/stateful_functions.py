"""Refusal of stateful Python functions in a training pipeline, whose position cannot be saved."""

import contextlib
import traceback
from collections.abc import Callable, Iterator

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import is_user_file
from t5x_lab.data.pipeline.patches import record_stateful_functions


@contextlib.contextmanager
def reject_stateful_functions() -> Iterator[None]:
    """Rejects pipelines, built inside the block, with Python functions that TensorFlow considers stateful.

    `tf.py_function` and `Dataset.from_generator` always are. `tf.numpy_function` is unless it has `stateful=False`.

    Raises:
      UserError: at the end of the block, with the place of the call.
    """
    calls: list[tuple[Callable, traceback.StackSummary]] = []
    with record_stateful_functions(calls):
        yield
    if calls:
        raise UserError(
            f"The training pipeline calls a stateful Python function ({_describe_place(*calls[0])}), so its position cannot be "
            "saved and the run cannot be resumed. Use TensorFlow operations in place of tf.py_function and generators, or "
            "tf.numpy_function(…, stateful=False). Or put it before a seqio.CacheDatasetPlaceholder and run t5x_lab cache."
        )


def _describe_place(function: Callable, stack: traceback.StackSummary) -> str:
    frames = [frame for frame in stack if is_user_file(frame.filename) and not _is_generated(frame.filename)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else f"the function {function!r}"


def _is_generated(file: str) -> bool:
    """Returns whether AutoGraph generated a file."""
    return "__autograph_generated_file" in file
