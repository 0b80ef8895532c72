"""Where the records of a data set lie: what gin says of it, or of all, or what a user's module registered."""

import functools
import os

import seqio

from t5x_lab.config.errors import NotHere
from t5x_lab.prompts.catalogue import REGISTERED, DataSet
from t5x_lab.prompts.config import Prompts, Records
from t5x_lab.prompts.records import source_of

LEAST_KEPT = 0.05  # of records, by templates that have nothing to say of some; shards of fewer may keep none


class RecordsOfDataSet:
    """The records of a data set, for a run.

    Args:
      data_set: which.
      prompts: of the run.
    """

    def __init__(self, data_set: DataSet, prompts: Prompts):
        self._data_set, self._prompts = data_set, prompts

    @functools.cached_property
    def said(self) -> object | None:
        """What is said of where they lie: `Records`, or a source; None where nothing is."""
        for name in (self._data_set.name, self._data_set.whole):
            if name in self._prompts.data_sets:
                return self._prompts.data_sets[name]
            if name in REGISTERED:
                return REGISTERED[name]
        return self._prompts.records

    @property
    def place(self) -> object:
        """The same.

        Raises:
          NotHere: when nobody says it.
        """
        if self.said is None:
            elsewhere = self._data_set.elsewhere
            raise NotHere(
                f'Nothing says where the records of the data set "{self._data_set.name}" lie. Say it of all data sets: '
                'RECORDS = @Records() with Records.files = "FOLDER/{dataset}/{split}.jsonl", or Records.hub = "{hub}" (this '
                f'one is "{elsewhere["hub"]}" there), or Records.tfds = "{{tfds}}" ("{elsewhere["tfds"]}"); or of this one: '
                f'DATA_SETS = {{"{self._data_set.name}": @x/Records()}}.'
            )
        return self.said

    @property
    def num_examples(self) -> int | None:
        """Training records, as far as gin or the catalogue say."""
        return (isinstance(self.place, Records) and self.place.num_examples) or self._data_set.train

    @property
    def fields(self) -> Records:
        """What the fields are called."""
        return self._data_set.in_place(self.place if isinstance(self.place, Records) else Records(files="of a source"))

    def source(self) -> seqio.DataSource:
        """One for all that is made of the data set."""
        place = self.place
        if not isinstance(place, Records):
            place.least_kept = LEAST_KEPT  # type: ignore[attr-defined]
            return place  # type: ignore[return-value]
        key = (self._data_set.name, str(place), os.getcwd())
        if key not in _sources:
            # Who says where the files of each split are may have others.
            splits = place.files if isinstance(place.files, dict) else dict.fromkeys([*self._data_set.splits, *place.splits])
            _sources[key] = source_of(self._data_set.whole, self.fields, tuple(splits), self._data_set.elsewhere)
            _sources[key].least_kept = LEAST_KEPT
        return _sources[key]


_sources: dict[tuple, seqio.DataSource] = {}
