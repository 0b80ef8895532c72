"""The stages that remove nearly equal pages: bands of signatures, pages that share one, clusters, and what remains."""

import collections
from typing import Any

import numpy as np
import pyarrow as pa

from t5x_lab.corpora.duplicates.digests import bucket_of, digest_array, from_column, join_digests, to_column
from t5x_lab.corpora.duplicates.winners import find_losers, split_rows
from t5x_lab.corpora.files import open_input, open_output
from t5x_lab.corpora.page import md5, num_bytes
from t5x_lab.corpora.stages import finish
from t5x_lab.corpora.stages.context import Context, Examples
from t5x_lab.corpora.stages.exchange import BucketWriter, read_bucket
from t5x_lab.corpora.stages.parts import PartWriter, read_all
from t5x_lab.corpora.stages.statistics import Statistics

BANDS, PAIRS, CLUSTERS, NAME = "bands", "pairs", "clusters", "unique"
_BANDS = pa.schema([pa.field("band", pa.binary(16)), pa.field("url", pa.binary(16)), pa.field("page", pa.int64())])
_PAIRS = pa.schema([*[pa.field(f"url{n}", pa.binary(16)) for n in (1, 2)], *[pa.field(f"page{n}", pa.int64()) for n in (1, 2)]])
_LOSERS = pa.schema([pa.field("page", pa.int64())])


def list_buckets(context: Context) -> range:
    return range(context.plan.num_buckets if context.corpus.near_duplicates else 0)


def list_single(context: Context) -> range:
    return range(1 if context.corpus.near_duplicates else 0)


def write_bands(context: Context, bucket: int) -> dict[str, Any]:
    """Writes the bands of a bucket's pages by bucket of the band. Pages are numbered as they are read."""
    min_hash = context.corpus.near_duplicates
    assert min_hash is not None
    with open_output(context.path(BANDS, f"{bucket:05d}.arrow")) as output:
        writer = BucketWriter(output, _BANDS, context.plan.num_buckets)
        for number, page in enumerate(read_all(context, finish.NAME, bucket)):
            url = md5(page.url)
            for band in min_hash.band_hashes(page.text):
                writer.add(bucket_of(band, context.plan.num_buckets), (band, url, bucket << 32 | number))
        writer.close()
    return {"counts": {}}


def write_pairs(context: Context, part: int) -> dict[str, Any]:
    """Writes each page that shares a band with others, together with the one of them whose URL has the smallest MD5."""
    columns: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for bucket in list_buckets(context):
        with open_input(context.path(BANDS, f"{bucket:05d}.arrow")) as file:
            for batch in read_bucket(file, part):
                columns["band"].append(from_column(batch.column("band")))
                columns["url"].append(from_column(batch.column("url")))
                columns["page"].append(batch.column("page").to_numpy())
    with open_output(context.path(PAIRS, f"{part:05d}.arrow")) as output:
        writer = BucketWriter(output, _PAIRS)
        if columns:
            bands, urls = join_digests(columns["band"]), join_digests(columns["url"])
            pages = np.concatenate(columns["page"])
            winners, losers = find_losers(bands, urls, pages)
            keepers = winners[np.searchsorted(_sortable(bands[winners]), _sortable(bands[losers]))]
            writer.add_columns(0, [to_column(urls[keepers]), to_column(urls[losers]), pages[keepers], pages[losers]])
        writer.close()
    return {"counts": {}}


def _sortable(digests: np.ndarray) -> np.ndarray:
    """Returns MD5s as byte strings, whose order is that of `find_losers`."""
    return np.array([row.tobytes() for row in digests], object)


def write_clusters(context: Context, _: int) -> dict[str, Any]:
    """Writes the pages that are not kept, by bucket. Memory grows with the number of pages that share a band, not of all."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first, second, urls = [], [], []
    for part in list_buckets(context):
        with open_input(context.path(PAIRS, f"{part:05d}.arrow")) as file:
            for batch in read_bucket(file):
                first.append(batch.column("page1").to_numpy())
                second.append(batch.column("page2").to_numpy())
                urls += [from_column(batch.column("url1")), from_column(batch.column("url2"))]
    losers = np.zeros(0, np.int64)
    if first:
        ends = np.stack([np.concatenate(first), np.concatenate(second)])
        interleaved = np.concatenate([x for pair in zip(first, second, strict=True) for x in pair])
        pages, index = np.unique(interleaved, return_index=True)
        page_urls = join_digests(urls)[index]
        rows, columns = np.searchsorted(pages, ends)
        graph = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(len(pages), len(pages)))
        clusters = connected_components(graph, directed=False)[1]
        digests = digest_array(b"".join(int(cluster).to_bytes(16, "big") for cluster in clusters))
        losers = pages[find_losers(digests, page_urls, pages)[1]]
    with open_output(context.path(CLUSTERS, "00000.arrow")) as output:
        writer = BucketWriter(output, _LOSERS, context.plan.num_buckets)
        for bucket, rows in enumerate(split_rows(losers, losers >> 32, context.plan.num_buckets)):
            writer.add_columns(bucket, [rows])
        writer.close()
    return {"counts": {}}


def write_unique(context: Context, bucket: int) -> dict[str, Any]:
    """Writes the pages of a bucket that are kept. Returns the summary."""
    counts, examples, statistics = collections.Counter[str](), Examples(), Statistics()
    with open_input(context.path(CLUSTERS, "00000.arrow")) as file:
        lost = {page & 0xFFFFFFFF for batch in read_bucket(file, bucket) for page in batch.column("page").to_pylist()}
    with open_output(context.path(NAME, f"{bucket:05d}.arrow")) as output:
        writer = PartWriter(output, context.corpus)
        for number, page in enumerate(read_all(context, finish.NAME, bucket)):
            if number in lost:
                counts["pages dropped: near_duplicates"] += 1
                counts["bytes dropped: near_duplicates"] += num_bytes(page.text)
                examples.add("near_duplicates", page)
            else:
                writer.add(page)
                statistics.add(page)
        splits = writer.close()
    return {"counts": +counts, "examples": examples.to_json(), "splits": splits, **statistics.to_json()}
