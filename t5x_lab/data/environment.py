"""Checks that the SeqIO and TensorFlow Datasets in place are the stable ones.

The `t5` package requires `seqio-nightly` and `tfds-nightly`, which own the same files as `seqio` and
`tensorflow-datasets`: whichever pip installs last wins, and pip's own records do not show it. The modules do.
"""

import contextlib
import importlib
import os
import re
import sys
import tempfile

from t5x_lab.config.errors import UserError

OLDEST = {"seqio.version": "0.0.20", "tensorflow_datasets.version": "4.9.10"}
REPAIR = 'pip install --force-reinstall --no-deps "seqio>=0.0.20" "tensorflow-datasets>=4.9.10"'


def check_environment() -> None:
    """Raises a `UserError` with the repair command when a nightly build, or an older one, is in place.

    Call it before importing any module of this layer: it also keeps TensorFlow's greetings off the console.
    """
    for module, oldest in OLDEST.items():
        package = module.split(".")[0]
        try:
            with _without_greetings():
                found = importlib.import_module(module).__version__
        except ImportError as error:
            raise UserError(f"Data need {package}, which cannot be imported ({error}). Repair it with: {REPAIR}") from error
        if "dev" in found or "nightly" in found or _parts(found) < _parts(oldest):
            raise UserError(
                f"The files of {package} in place are those of version {found}; t5x_lab needs {oldest} or newer, stable. "
                f"The t5 package brings nightly builds that overwrite them. Repair it with: {REPAIR}"
            )
    with contextlib.suppress(RuntimeError):  # somebody has used TensorFlow before us
        importlib.import_module("tensorflow").config.set_visible_devices([], "GPU")  # the accelerator is JAX's


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@contextlib.contextmanager
def _without_greetings():
    """TensorFlow's libraries write to the error stream while they load, whatever their log level is."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as scrap:
        os.dup2(scrap.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
