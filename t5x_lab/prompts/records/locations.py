"""Location of the records of a data set: from gin, or registered by a user's module."""

import functools
import os

import seqio

from t5x_lab.config.errors import NotHere
from t5x_lab.prompts.config import PromptConfig, Records
from t5x_lab.prompts.data_sets import USER_SOURCES, DataSet
from t5x_lab.prompts.records.sources import open_records

MIN_KEPT_FRACTION = 0.05  # templates may drop records; a shard with fewer might keep none


class RecordLocation:
    """Location of the records of a data set in a run.

    Args:
      data_set: the data set.
      prompts: settings of the run.
    """

    def __init__(self, data_set: DataSet, prompts: PromptConfig):
        self._data_set, self._prompts = data_set, prompts

    @functools.cached_property
    def configured(self) -> object | None:
        """The configured `Records` or source, None if there is none."""
        for name in (self._data_set.name, self._data_set.source_name):
            if name in self._prompts.data_sets:
                return self._prompts.data_sets[name]
            if name in USER_SOURCES:
                return USER_SOURCES[name]
        return self._prompts.records

    @property
    def location(self) -> object:
        """The configured `Records` or source.

        Raises:
          NotHere: if none is configured.
        """
        if self.configured is None:
            names = self._data_set.external_names
            raise NotHere(
                f'The location of the records of the data set "{self._data_set.name}" is not set. Set it for all data sets: '
                'RECORDS = @Records() with Records.files = "FOLDER/{dataset}/{split}.jsonl", or Records.hub = "{hub}" (here '
                f'"{names["hub"]}"), or Records.tfds = "{{tfds}}" (here "{names["tfds"]}"). Or set it for this one: '
                f'DATA_SETS = {{"{self._data_set.name}": @x/Records()}}.'
            )
        return self.configured

    @property
    def num_examples(self) -> int | None:
        """Number of training records, from gin or built in. None = unknown."""
        return (isinstance(self.location, Records) and self.location.num_examples) or self._data_set.train

    @property
    def fields(self) -> Records:
        """Settings with the names of fields, labels and splits."""
        is_source = not isinstance(self.location, Records)
        return self._data_set.complete(Records(files="of a source") if is_source else self.location)  # type: ignore[arg-type]

    def source(self) -> seqio.DataSource:
        """Returns the source, the same object for all tasks of the data set."""
        location = self.location
        if not isinstance(location, Records):
            location.min_kept_fraction = MIN_KEPT_FRACTION  # type: ignore[attr-defined]
            return location  # type: ignore[return-value]
        key = (self._data_set.name, str(location), os.getcwd())
        if key not in _sources:
            # Files configured by split may have other splits.
            has_splits = isinstance(location.files, dict)
            splits = location.files if has_splits else dict.fromkeys([*self._data_set.splits, *location.splits])
            names = self._data_set.external_names
            _sources[key] = open_records(self._data_set.source_name, self.fields, tuple(splits), names)  # type: ignore[arg-type]
            _sources[key].min_kept_fraction = MIN_KEPT_FRACTION
        return _sources[key]


_sources: dict[tuple, seqio.DataSource] = {}
