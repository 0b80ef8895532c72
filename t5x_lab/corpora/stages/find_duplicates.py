"""The third stage: which pages lose a unit to a page of another bucket."""

from typing import Any

import numpy as np

from t5x_lab.corpora.duplicates.digests import from_column, join_digests, to_column
from t5x_lab.corpora.duplicates.winners import find_losers, split_rows
from t5x_lab.corpora.files import open_input, open_output
from t5x_lab.corpora.stages import clean
from t5x_lab.corpora.stages.clean import LOSSES
from t5x_lab.corpora.stages.context import Context
from t5x_lab.corpora.stages.exchange import BucketWriter, read_bucket

NAME = "duplicates"


def list_jobs(context: Context) -> range:
    return range(context.plan.num_buckets if context.corpus.duplicates else 0)


def run(context: Context, part: int) -> dict[str, Any]:
    """Finds the losers of the units in a bucket of units, and writes them by bucket of their page. Returns the summary."""
    num_buckets = context.plan.num_buckets
    units, urls, pages, buckets = [], [], [], []
    for bucket in range(num_buckets):
        with open_input(context.path(clean.NAME, f"{bucket:05d}.units.arrow")) as file:
            for batch in read_bucket(file, part):
                units.append(from_column(batch.column("unit")))
                urls.append(from_column(batch.column("url")))
                pages.append(batch.column("page").to_numpy())
                buckets.append(np.full(batch.num_rows, bucket, np.int64))
    with open_output(context.path(NAME, f"{part:05d}.arrow")) as output:
        writer = BucketWriter(output, LOSSES, num_buckets)
        if units:
            all_units, all_pages, all_buckets = join_digests(units), np.concatenate(pages), np.concatenate(buckets)
            _, losers = find_losers(all_units, join_digests(urls), all_buckets << 32 | all_pages)
            for bucket, rows in enumerate(split_rows(losers, all_buckets[losers], num_buckets)):
                writer.add_columns(bucket, [to_column(all_units[rows]), all_pages[rows]])
        writer.close()
    return {"counts": {}}
