"""Python in a pipeline that may remember something: the position of such a pipeline cannot be saved."""

import contextlib
import traceback
from collections.abc import Iterator

from tensorflow.python.ops import script_ops  # it has no public name

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import is_users
from t5x_lab.data.many import PATCHED


def _is_written(file: str) -> bool:
    """Whether somebody wrote a file: TensorFlow makes others of functions that branch."""
    return "__autograph_generated_file" not in file


@contextlib.contextmanager
def refused_if_stateful() -> Iterator[None]:
    """Pipelines that are made while the block runs have no Python that TensorFlow takes for stateful.

    `tf.py_function` and `Dataset.from_generator` always are; `tf.numpy_function` is unless it says `stateful=False`.

    Raises:
      UserError: that says where it is called.
    """
    found: list[str] = []
    plain = script_ops._internal_py_func

    def noted(func, inp, Tout, stateful=None, use_eager_py_func=False, **options):
        if stateful or use_eager_py_func:
            frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename) and _is_written(frame.filename)]
            found.append(f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else f"the function {func!r}")
        return plain(func, inp, Tout, stateful, use_eager_py_func, **options)

    with PATCHED:
        script_ops._internal_py_func = noted
        try:
            yield
        finally:
            script_ops._internal_py_func = plain
    if found:
        raise UserError(
            f"The training data are read by Python that may remember something ({found[0]}), so that their position cannot be "
            "saved, nor the run continued. Use TensorFlow's operations instead of tf.py_function or a generator, or "
            "tf.numpy_function(…, stateful=False); or let it run once, before a seqio.CacheDatasetPlaceholder: t5x_lab cache."
        )
