"""The last stage: output files of about equal size, in which pages have the order of their keys, which is a random one."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from t5x_lab.corpora.files import open_output
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.stages import finish, near_duplicates
from t5x_lab.corpora.stages.context import Context, load_context
from t5x_lab.corpora.stages.parts import read_split
from t5x_lab.corpora.writing import RECORD_WRITERS, shard_name

NAME = "write"


@dataclasses.dataclass(frozen=True)
class Shard:
    """An output file.

    Attributes:
      split: name of its split.
      index, number: position among the files of the split, and their number.
      start, stop: its pages, numbered in the split.
    """

    split: str
    index: int
    number: int
    start: int
    stop: int


def source_stage(context: Context) -> str:
    """Returns the stage whose pages are written."""
    return near_duplicates.NAME if context.corpus.near_duplicates else finish.NAME


@dataclasses.dataclass(frozen=True)
class Layout:
    """Output files, and where their pages are.

    Attributes:
      sizes: number of pages in each bucket, by split.
      shards: all output files.
    """

    sizes: dict[str, list[int]]
    shards: list[Shard]


def make_layout(context: Context) -> Layout:
    """Returns the output files of a corpus whose pages are finished."""
    return _make_layout(context.work_dir, context.plan.folders[NAME])


@functools.lru_cache(maxsize=1)  # it reads a file for each bucket, which should not be done for each output file
def _make_layout(work_dir: str, _: str) -> Layout:
    context = load_context(work_dir)
    of_buckets = [context.summary(source_stage(context), bucket)["splits"] for bucket in range(context.plan.num_buckets)]
    expected = set() if context.corpus.by_language else {"train", "validation"}
    sizes, shards = {}, []
    for split in sorted(expected.union(*of_buckets)):
        listed = [splits.get(split, (0, 0)) for splits in of_buckets]
        sizes[split] = [pages for pages, _ in listed]
        pages, size = sum(sizes[split]), sum(size for _, size in listed)
        number = max(1, min(pages, round(size / context.corpus.shard_bytes)))
        ends = [pages * index // number for index in range(number + 1)]
        shards += [Shard(split, index, number, *ends[index : index + 2]) for index in range(number)]
    return Layout(sizes, shards)


def list_jobs(context: Context) -> range:
    return range(len(make_layout(context).shards))


def run(context: Context, index: int) -> dict[str, Any]:
    """Writes an output file. Returns the summary."""
    shard = make_layout(context).shards[index]
    name = shard_name(context.corpus, shard.split, shard.index, shard.number)
    pages, size = 0, 0
    with open_output(context.path(NAME, name)) as file:
        writer = RECORD_WRITERS[context.corpus.format](file)
        for page in _pages(context, shard):
            writer.add(page)
            pages += 1
        writer.close()
        size = file.tell()
    return {"counts": {}, "split": shard.split, "shard": shard.index, "pages": pages, "bytes": size, "path": name}


def _pages(context: Context, shard: Shard) -> Iterator[Page]:
    start = 0
    for bucket, size in enumerate(make_layout(context).sizes[shard.split]):
        if start < shard.stop and start + size > shard.start:
            pages = read_split(context, source_stage(context), bucket, shard.split)
            for number, page in enumerate(pages, start):
                if shard.start <= number < shard.stop:
                    yield page
        start += size
