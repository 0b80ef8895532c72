"""Registry of labelled data sets: their names elsewhere, sizes and label names. Where records are is set in gin."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

from t5x_lab.prompts.config import Records, task_slug

ALL_SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """Description of a labelled data set.

    Attributes:
      name: usual name, such as "super_glue/rte".
      train: number of training records. None = unknown.
      hub, tfds: name on Hugging Face's hub and in TensorFlow Datasets, if it differs.
      labels: label names by field, for sources that have names instead of numbers.
      splits: names of its splits, or a mapping from them to the names in the parent data set.
      parent: the data set that it is a part of, whose records and templates it uses.
      suffix: suffix of its task names, which distinguishes it from other parts of the parent.
      has_templates: whether prompted tasks exist for it.
    """

    name: str
    train: int | None = None
    hub: str = ""
    tfds: str = ""
    labels: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    splits: tuple[str, ...] | dict[str, str] = ALL_SPLITS
    parent: str = ""
    suffix: str = ""
    has_templates: bool = True

    @property
    def source_name(self) -> str:
        """Name of the data set whose records and templates it uses."""
        return self.parent or self.name

    @functools.cached_property
    def slug(self) -> str:
        """Name in task names, as in T0: "super_glue_rte"."""
        return task_slug(self.name)

    @property
    def external_names(self) -> dict[str, str]:
        """Names on the hub and in TensorFlow Datasets."""
        return {"hub": self.hub or self.source_name, "tfds": self.tfds or self.source_name}

    def complete(self, records: Records) -> Records:
        """Returns `records` with the splits and labels of the data set added."""
        splits = {**(self.splits if isinstance(self.splits, dict) else {}), **records.splits}
        return dataclasses.replace(records, splits=splits, labels={**self.labels, **records.labels})


DATA_SETS: dict[str, DataSet] = {}  # built-in data sets by name
USER_SOURCES: dict[str, object] = {}  # `Records` or `seqio.DataSource` by data set name, see `t5x_lab.data_sets.register`


def register_data_sets(data_sets: Iterable[DataSet]) -> None:
    """Adds data sets to the registry."""
    DATA_SETS.update({data_set.name: data_set for data_set in data_sets})


def find_data_set(name: str, data_sets: Mapping[str, DataSet] = DATA_SETS) -> DataSet | None:
    """Returns the data set with this name or slug, None if there is none."""
    slug = task_slug(name)
    return data_sets.get(name) or next((data_set for data_set in data_sets.values() if data_set.slug == slug), None)
