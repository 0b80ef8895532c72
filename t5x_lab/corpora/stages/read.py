"""The first stage: pages of input files, by bucket of their URL."""

import collections
import dataclasses
from typing import Any

from t5x_lab.corpora.duplicates.digests import bucket_of
from t5x_lab.corpora.files import open_input, open_output
from t5x_lab.corpora.page import Page, num_bytes
from t5x_lab.corpora.reading.inputs import read_pages
from t5x_lab.corpora.reading.timestamps import to_utc
from t5x_lab.corpora.rules.rule import PageRules
from t5x_lab.corpora.stages.context import Context, Examples
from t5x_lab.corpora.stages.exchange import PAGES, BucketWriter, page_row

NAME = "read"
_DAMAGE = ("damaged_", "dropped_too_long")


def list_jobs(context: Context) -> range:
    return range(len(context.plan.inputs))


def run(context: Context, index: int) -> dict[str, Any]:
    """Reads the pages of some files, applies `Corpus.read_rules`, and writes them by bucket. Returns the summary."""
    corpus, counts, examples = context.corpus, collections.Counter[str](), Examples()
    damaged: dict[str, dict[str, int]] = {}
    keys = {"text": corpus.text_key, "url": corpus.url_key, "timestamp": corpus.timestamp_key}
    rules = PageRules(corpus.read_rules, counts, examples.add)
    first = sum(len(files) for files in context.plan.inputs[:index])
    with open_output(context.path(NAME, f"{index:05d}.arrow")) as output:
        writer = BucketWriter(output, PAGES, context.plan.num_buckets)
        for number, (path, size) in enumerate(context.plan.inputs[index]):
            counts["files"] += 1
            counts["file bytes"] += size
            problems = collections.Counter[str]()
            with open_input(path) as file:
                pages = read_pages(file, path, corpus.html_text, keys, problems, corpus.max_record_bytes)
                for record, page in enumerate(pages):
                    counts["pages in"] += 1
                    counts["bytes in"] += num_bytes(page.text)
                    time = to_utc(page.timestamp)
                    counts["timestamps in the future"] += time > context.plan.latest
                    counts["timestamps that cannot be read"] += bool(page.timestamp and not time)
                    page = dataclasses.replace(_repair(page), timestamp=time, position=(first + number, record))
                    remaining = rules.apply(page)
                    if remaining is not None:
                        _add(writer, remaining, context.plan.num_buckets)
            counts.update(problems)
            if damage := {kind: number for kind, number in problems.items() if number and kind.startswith(_DAMAGE)}:
                damaged[path] = damage
        writer.close()
    return {"counts": +counts, "examples": examples.to_json(), "damaged files": damaged}


def _repair(page: Page) -> Page:
    """Replaces halves of surrogate pairs, which are no characters and cannot be written."""
    try:
        f"{page.url}{page.text}{page.content_type}".encode()
    except UnicodeEncodeError:
        repair = lambda text: text.encode("utf-8", "replace").decode()
        return dataclasses.replace(
            page,
            url=repair(page.url),
            text=repair(page.text),
            content_type=repair(page.content_type),
        )
    return page


def _add(writer: BucketWriter, page: Page, num_buckets: int) -> None:
    writer.add(bucket_of(page.key, num_buckets), page_row(page), len(page.text))
