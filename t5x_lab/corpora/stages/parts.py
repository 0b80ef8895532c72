"""Parts of finished pages by split, so that a split is read without the others."""

import dataclasses
import zlib
from collections.abc import Iterator

from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.files import open_input
from t5x_lab.corpora.page import Page, num_bytes, split_name
from t5x_lab.corpora.rules.language import UNKNOWN
from t5x_lab.corpora.stages.context import Context
from t5x_lab.corpora.stages.exchange import PAGES, BucketWriter, page_row, read_bucket, read_buckets, row_pages

_LANGUAGE_GROUPS = 4096  # so many that a rare language hardly shares one with a frequent one


@dataclasses.dataclass
class Size:
    """Size of a split or of a part of it.

    Attributes:
      pages: number of pages.
      bytes: number of bytes of their texts.
    """

    pages: int = 0
    bytes: int = 0


def split_of(corpus: Corpus, key: bytes, language: str) -> str:
    """Returns the split of a page: "train" or "validation"; for a corpus by language "de" or "de-validation", as in mC4."""
    split = split_name(key)
    if not corpus.by_language:
        return split
    return (language or UNKNOWN) + ("" if split == "train" else f"-{split}")


def part_of(corpus: Corpus, split: str) -> int:
    """Returns the part in which a split is."""
    is_validation = split == "validation" or split.endswith("-validation")
    if not corpus.by_language:
        return int(is_validation)
    return 2 * (zlib.crc32(split.removesuffix("-validation").encode()) % _LANGUAGE_GROUPS) + int(is_validation)


def _num_parts(corpus: Corpus) -> int:
    return 2 * _LANGUAGE_GROUPS if corpus.by_language else 2


class PartWriter:
    """Writes finished pages by part.

    Attributes:
      sizes: size by split of what has been written.
    """

    def __init__(self, file, corpus: Corpus):
        self._corpus, self.sizes = corpus, dict[str, Size]()
        self._writer = BucketWriter(file, PAGES, _num_parts(corpus))

    def add(self, page: Page) -> None:
        split = split_of(self._corpus, page.key, page.language)
        size = self.sizes.setdefault(split, Size())
        size.pages += 1
        size.bytes += num_bytes(page.text)
        self._writer.add(part_of(self._corpus, split), page_row(page), len(page.text))

    def close(self) -> dict[str, list[int]]:
        """Returns [pages, bytes of text] by split."""
        self._writer.close()
        return {split: [size.pages, size.bytes] for split, size in sorted(self.sizes.items())}


def read_split(context: Context, stage: str, bucket: int, split: str) -> Iterator[Page]:
    """Yields the pages of a split in a bucket of a stage, sorted by key."""
    with open_input(context.path(stage, f"{bucket:05d}.arrow")) as file:
        for batch in read_bucket(file, part_of(context.corpus, split)):
            for key, page in row_pages(batch):
                if split_of(context.corpus, key, page.language) == split:
                    yield page


def read_all(context: Context, stage: str, bucket: int) -> Iterator[Page]:
    """Yields all pages of a bucket of a stage."""
    with open_input(context.path(stage, f"{bucket:05d}.arrow")) as file:
        for batch in read_buckets(file):
            for _, page in row_pages(batch):
                yield page
