"""Removal of pages that hold questions of evaluation sets, by their n-grams of words (Brown et al., 2020, appendix C)."""

import dataclasses
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from t5x_lab.config.checks import check_types
from t5x_lab.config.errors import NotHere, UserError, did_you_mean
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.log import log
from t5x_lab.corpora.duplicates.ngrams import ngram_hashes, word_hashes
from t5x_lab.corpora.files import open_input, read_text_lines
from t5x_lab.corpora.page import md5

ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decontamination:
    """Drops pages that share an n-gram with an evaluation set.

    Attributes:
      data_sets: names of data sets of the library, such as ("super_glue/rte", "blimp"); ("all",) for those whose records are
        found.
      splits: their splits.
      files, tfds, hub: where their records are, one of them, as `Records` has it: "records/{dataset}/{split}.jsonl",
        "{tfds}" or "{hub}".
      texts: patterns of further files: .txt with a text per line, or .jsonl, all texts of whose objects count.
      ngram: number of words. GPT-3 has 13.
      min_words: texts of fewer words than `ngram` are looked for as a whole if they have so many.
      ignore: n-grams in more than so many different texts, such as instructions, are no evidence. None = all are.
    """

    data_sets: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("validation", "test")
    files: str = ""
    tfds: str = ""
    hub: str = ""
    texts: tuple[str, ...] = ()
    ngram: int = 13
    min_words: int = 8
    ignore: int | None = 10

    def __post_init__(self):
        check_types(self)
        if not 1 <= self.min_words <= self.ngram:
            raise UserError(f"Decontamination.min_words is {self.min_words}. It must be from 1 to ngram, {self.ngram}.")
        if not self.data_sets and not self.texts:
            raise UserError("Decontamination has no evaluation set. Set Decontamination.data_sets or Decontamination.texts.")
        if self.data_sets and sum(map(bool, (self.files, self.tfds, self.hub))) != 1:
            raise UserError("Decontamination.data_sets needs the location of their records. Set one of files, tfds and hub.")

    def collect(self) -> bytes:
        """Reads all evaluation sets. Returns their n-grams as an .npz file: sorted hashes by number of words.

        Raises:
          UserError: for an unknown data set, or one whose records are not found.
        """
        hashes: dict[int, list[np.ndarray]] = {}
        digests: set[bytes] = set()
        for record in self._records():
            for text in _texts(record):
                digest = md5(text)
                if digest in digests:  # as a passage with several questions
                    continue
                digests.add(digest)
                tokens = word_hashes(text)
                size = min(self.ngram, len(tokens))
                if size >= self.min_words:
                    hashes.setdefault(size, []).append(np.unique(ngram_hashes(tokens, size)))
        arrays = {}
        for size, parts in hashes.items():
            values, counts = np.unique(np.concatenate(parts), return_counts=True)
            arrays[str(size)] = values if self.ignore is None else values[counts <= self.ignore]
        if not sum(map(len, arrays.values())):
            raise UserError(
                f"The evaluation sets of Decontamination have no text of {self.min_words} words or more, but instructions. "
                "Correct the files, or set Decontamination.min_words."
            )
        log(f"Decontamination: {sum(map(len, arrays.values())):,} n-grams of evaluation sets.")
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()

    def _records(self) -> Iterator[Any]:
        for pattern in self.texts:
            for line in read_text_lines(pattern):
                try:
                    yield parse_json(line) if line.startswith(("{", "[")) else line
                except ValueError:
                    yield line
        if self.data_sets:
            yield from self._data_set_records()

    def _data_set_records(self) -> Iterator[Any]:
        from t5x_lab.data.environment import check_environment

        check_environment()
        import tensorflow as tf

        from t5x_lab.papers import data_sets as _registered  # noqa: F401
        from t5x_lab.prompts.config import Records
        from t5x_lab.prompts.data_sets import DATA_SETS, find_data_set
        from t5x_lab.prompts.records.json_records import json_records
        from t5x_lab.prompts.records.sources import open_records

        location = Records(files=self.files or None, tfds=self.tfds or None, hub=self.hub or None)
        are_named = self.data_sets != (ALL,)
        read = []
        for name in self.data_sets if are_named else sorted(DATA_SETS):
            data_set = find_data_set(name)
            if data_set is None:
                raise UserError(f'Decontamination.data_sets has "{name}", which is unknown.{did_you_mean(name, DATA_SETS)}')
            records = data_set.complete(location)
            splits = [split for split in self.splits if split in data_set.splits]
            source = open_records(data_set.source_name, records, splits, data_set.external_names)
            for split in splits:
                try:
                    dataset = json_records(source.get_dataset(split, shuffle=False), records)
                    for example in dataset.as_numpy_iterator():
                        yield parse_json(example["record"])
                    read.append(f"{name} ({split})")
                except (NotHere, UserError, tf.errors.NotFoundError) as error:
                    if are_named and split == splits[-1] and not any(entry.startswith(f"{name} (") for entry in read):
                        raise UserError(f'The records of "{name}" cannot be read for decontamination: {error}') from error
                    if are_named:
                        log(f'Decontamination without the split "{split}" of {name}: {error}')
        if not read:
            raise UserError("Decontamination has found no records of any data set. Correct the location of the records.")
        log(f"Decontamination with {', '.join(read)}.")


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


@functools.lru_cache(maxsize=1)
def load_ngrams(path: str) -> dict[int, np.ndarray]:
    """Returns the n-grams that `Decontamination.collect` has written."""
    with open_input(path) as file:
        return {int(size): hashes for size, hashes in np.load(io.BytesIO(file.read())).items()}


def is_contaminated(text: str, ngrams: dict[int, np.ndarray]) -> bool:
    """Returns whether a text has one of the n-grams."""
    tokens = word_hashes(text)
    for size, hashes in ngrams.items():
        own = ngram_hashes(tokens, size)
        positions = np.searchsorted(hashes, own)
        if len(hashes) and (hashes[np.minimum(positions, len(hashes) - 1)] == own).any():
            return True
    return False
