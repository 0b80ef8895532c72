"""Import of the layers that need TensorFlow."""

import os

from t5x_lab.data.environment import check_environment


def load_data_layer() -> None:
    """Checks the installed packages and registers the library's tasks. Call it before importing any module that reads data.

    Raises:
      UserError: if the installed SeqIO or TensorFlow Datasets cannot be used.
    """
    check_environment()
    from t5x_lab.data.sources.storage import read_tfds_copies

    read_tfds_copies(os.environ.get("TFDS_DATA_DIR", ""))
    import t5x_lab.tasks  # noqa: F401  (needs TensorFlow; registers tasks)
