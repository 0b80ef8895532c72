"""C4 through TensorFlow Datasets, under T5's own task names.

T5 names version 2.2.0, which TensorFlow Datasets can no longer prepare but still reads where it was prepared before; the
present version is 3.1.0. The task reads what is there and says which.
"""

import seqio
import tensorflow_datasets as tfds

from t5x_lab.config.errors import UserError
from t5x_lab.data import tasks
from t5x_lab.data.objectives import objective_task
from t5x_lab.observe.console import say

VERSIONS = ("2.2.0", "3.1.0")
TASKS = {
    "c4_v220_span_corruption": "span_corruption",
    "c4_v220_full_lm": "full_lm",
    "c4_prefix_lm_objective_encoder_decoder_architecture": "prefix_lm_objective_encoder_decoder_architecture",
    "c4_prefix_lm_objective_decoder_architecture": "prefix_lm_objective_decoder_architecture",
}


def prepared_version() -> str:
    """The version of c4/en to read: the first of `VERSIONS` that is prepared.

    Raises:
      UserError: when neither is.
    """
    for version in VERSIONS:
        try:
            builder = tfds.builder(f"c4/en:{version}", try_gcs=False)
            if builder.data_path.exists() and builder.info.splits:
                say(f"Reading C4 {version} from {builder.data_path}.")
                return version
        except (tfds.core.DatasetNotFoundError, AssertionError, ValueError):
            continue  # an old version that is not prepared cannot even be named
    raise UserError(
        f"C4 is not prepared under {tfds.core.constants.DATA_DIR}: neither c4/en:{VERSIONS[0]} nor c4/en:{VERSIONS[1]} is "
        "there. Set the environment variable TFDS_DATA_DIR to where it is, prepare it with: tfds build c4/en:3.1.0, or train "
        "on the embedded corpus (tasks sotu_…) or on your own files (tasks files_…)."
    )


def _make(name: str, vocabulary: seqio.Vocabulary, config) -> seqio.Task:
    del config
    return objective_task(name, seqio.TfdsDataSource(f"c4/en:{prepared_version()}"), TASKS[name], vocabulary)


for _name in TASKS:
    tasks.register(_name, _make)
