"""Checks that the SeqIO and TensorFlow Datasets in place are the stable ones.

The `t5` package requires `seqio-nightly` and `tfds-nightly`, which own the same files as `seqio` and
`tensorflow-datasets`: whichever pip installs last wins, and pip's own records do not show it. The modules do.
"""

import importlib
import re

from t5x_lab.config.errors import UserError

OLDEST = {"seqio.version": "0.0.20", "tensorflow_datasets.version": "4.9.10"}
REPAIR = 'pip install --force-reinstall --no-deps "seqio>=0.0.20" "tensorflow-datasets>=4.9.10"'


def check_environment() -> None:
    """Raises a `UserError` with the repair command when a nightly build, or an older one, is in place."""
    for module, oldest in OLDEST.items():
        package = module.split(".")[0]
        try:
            found = importlib.import_module(module).__version__
        except ImportError as error:
            raise UserError(f"Data need {package}, which cannot be imported ({error}). Repair it with: {REPAIR}") from error
        if "dev" in found or "nightly" in found or _parts(found) < _parts(oldest):
            raise UserError(
                f"The files of {package} in place are those of version {found}; t5x_lab needs {oldest} or newer, stable. "
                f"The t5 package brings nightly builds that overwrite them. Repair it with: {REPAIR}"
            )


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
