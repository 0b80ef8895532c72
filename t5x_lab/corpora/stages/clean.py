"""The second stage: the newest page of each URL, with clean lines, and the units by which duplicates are found."""

import collections
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.duplicates.digests import buckets_of, digest_array, to_column
from t5x_lab.corpora.duplicates.units import line_hashes, span_hashes
from t5x_lab.corpora.duplicates.winners import find_losers, split_rows
from t5x_lab.corpora.files import open_input, open_output
from t5x_lab.corpora.page import Page, md5
from t5x_lab.corpora.rules.rule import Failures, PageRules
from t5x_lab.corpora.stages import read
from t5x_lab.corpora.stages.context import Context, Examples
from t5x_lab.corpora.stages.exchange import PAGES, BucketWriter, page_row, read_bucket, row_pages

NAME = "clean"
# Units that pages of a bucket keep, by the hash of the unit; and units that they lose to another page of the bucket.
UNITS = pa.schema([pa.field("unit", pa.binary(16)), pa.field("url", pa.binary(16)), pa.field("page", pa.int32())])
LOSSES = pa.schema([pa.field("unit", pa.binary(16)), pa.field("page", pa.int32())])


def list_jobs(context: Context) -> range:
    return range(context.plan.num_buckets)


def run(context: Context, bucket: int) -> dict[str, Any]:
    """Cleans the pages of a bucket. Returns the summary."""
    corpus, counts, examples = context.corpus, collections.Counter[str](), Examples()
    rules, failures = PageRules(corpus.page_rules, counts, examples.add), Failures(counts)
    pages: list[Page] = []
    for number, page in enumerate(_newest_pages(context, bucket, counts), 1):
        remaining = rules.apply(page)
        if remaining is not None and corpus.lines is not None:
            try:
                remaining = corpus.lines.clean(remaining, counts, examples.add)
            except UserError:
                raise
            except Exception as error:  # of a user's line rule
                failures.add(getattr(error, "rule", "LineCleaning"), error, page, number)
                counts["pages dropped: line rules that fail"] += 1
                remaining = None
        if remaining is not None:
            pages.append(remaining)
    with open_output(context.path(NAME, f"{bucket:05d}.arrow")) as output:
        writer = BucketWriter(output, PAGES)
        for page in pages:
            writer.add(0, page_row(page), len(page.text))
        writer.close()
    if corpus.duplicates is not None:
        _write_units(context, bucket, pages)
    return {"counts": +counts, "examples": examples.to_json()}


def _newest_pages(context: Context, bucket: int, counts: collections.Counter[str]) -> list[Page]:
    """Returns the pages of a bucket, sorted by key: only the newest with a key, unless the recipe keeps all.

    Of pages with the same timestamp the first one in the input is the newest. One in the future is no timestamp.
    """
    newest: dict[bytes, tuple[str, tuple[int, int], int]] = {}
    if context.corpus.newest_per_url:
        for batch in _read_batches(context, bucket):
            columns = [batch.column(name).to_pylist() for name in ("key", "timestamp", "file", "record")]
            lengths = pc.binary_length(batch.column("text")).to_pylist()
            for key, timestamp, file, record, length in zip(*columns, lengths, strict=True):
                rank = timestamp if timestamp <= context.plan.latest else ""
                best = newest.get(key)
                if best is None or rank > best[0]:
                    newest[key] = rank, (file, record), length
                if best is not None:
                    counts["pages dropped: newest_per_url"] += 1
                    counts["bytes dropped: newest_per_url"] += best[2] if rank > best[0] else length
    pages = [
        (key, page)
        for batch in _read_batches(context, bucket)
        for key, page in row_pages(batch)
        if not newest or newest[key][1] == page.position
    ]
    return [page for _, page in sorted(pages, key=lambda item: (item[0], item[1].position))]


def _read_batches(context: Context, bucket: int):
    """Yields the rows of a bucket in the order of the input."""
    for index in read.list_jobs(context):
        with open_input(context.path(read.NAME, f"{index:05d}.arrow")) as file:
            yield from read_bucket(file, bucket)


def unit_hashes(corpus: Corpus, text: str) -> list[bytes]:
    """Returns the MD5s of a text's units."""
    return line_hashes(text) if corpus.duplicates == "lines" else span_hashes(text, corpus.sentences)


def _write_units(context: Context, bucket: int, pages: list[Page]) -> None:
    """Writes the units of a bucket's pages, each of one page only, so that no unit is too frequent for the next stage."""
    units, owners = bytearray(), []
    for number, page in enumerate(pages):
        hashes = unit_hashes(context.corpus, page.text)
        units += b"".join(hashes)
        owners += [number] * len(hashes)
    page_numbers = np.array(owners, np.int32)
    urls = digest_array(b"".join(md5(page.url) for page in pages))
    digests = digest_array(units)
    winners, losers = find_losers(digests, urls[page_numbers], page_numbers)
    num_buckets = context.plan.num_buckets
    parts = split_rows(winners, buckets_of(digests[winners], num_buckets), num_buckets)
    with open_output(context.path(NAME, f"{bucket:05d}.units.arrow")) as output:
        writer = BucketWriter(output, UNITS, num_buckets)
        for part, rows in enumerate(parts):
            writer.add_columns(part, _columns(digests[rows], urls[page_numbers[rows]], page_numbers[rows]))
        writer.close()
    with open_output(context.path(NAME, f"{bucket:05d}.losses.arrow")) as output:
        writer = BucketWriter(output, LOSSES)
        writer.add_columns(0, _columns(digests[losers], None, page_numbers[losers]))
        writer.close()


def _columns(units: np.ndarray, urls: np.ndarray | None, pages: np.ndarray) -> list[pa.Array]:
    return [to_column(units), *([] if urls is None else [to_column(urls)]), pa.array(pages, pa.int32())]
