"""Checks that the installed SeqIO and TensorFlow Datasets are the stable versions.

The `t5` package requires `seqio-nightly` and `tfds-nightly`, which install the same files as `seqio` and `tensorflow-datasets`.
The package that pip installs last wins. pip's records do not show which one that is, but the modules do.
"""

import contextlib
import importlib
import os
import re
import sys
import tempfile

from t5x_lab.config.errors import UserError

MIN_VERSIONS = {"seqio.version": "0.0.20", "tensorflow_datasets.version": "4.9.10"}
REPAIR = 'pip install --force-reinstall --no-deps "seqio>=0.0.20" "tensorflow-datasets>=4.9.10"'


def check_environment() -> None:
    """Raises a `UserError` with the repair command if a nightly or an old version is installed.

    Call it before importing any module of this layer. It also keeps TensorFlow's startup messages off the console.
    """
    for module, min_version in MIN_VERSIONS.items():
        package = module.split(".")[0]
        try:
            with silence_stderr():
                version = importlib.import_module(module).__version__
        except ImportError as error:
            raise UserError(f"{package}, which reads data, cannot be imported ({error}). Repair it with: {REPAIR}") from error
        if "dev" in version or "nightly" in version or _parse(version) < _parse(min_version):
            raise UserError(
                f"The installed {package} is version {version}. t5x_lab needs the stable version {min_version} or newer. The "
                f"t5 package installs nightly builds over it. Repair it with: {REPAIR}"
            )
    with contextlib.suppress(RuntimeError), silence_stderr():  # TensorFlow was used before
        importlib.import_module("tensorflow").config.set_visible_devices([], "GPU")  # the accelerator belongs to JAX


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@contextlib.contextmanager
def silence_stderr():
    """Discards stderr inside the block. TensorFlow's libraries write to it while they load, whatever their log level."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
