"""The fourth stage: texts without duplicates, that the rules for texts have passed."""

import collections
import dataclasses
from typing import Any

from t5x_lab.corpora.decontamination import is_contaminated, load_ngrams
from t5x_lab.corpora.duplicates.units import remove_lines, remove_spans
from t5x_lab.corpora.files import open_input, open_output
from t5x_lab.corpora.page import Page, num_bytes
from t5x_lab.corpora.rules.rule import PageRule, PageRules
from t5x_lab.corpora.rules.sentences import count_sentences
from t5x_lab.corpora.stages import clean, collect_questions, find_duplicates
from t5x_lab.corpora.stages.context import Context, Examples
from t5x_lab.corpora.stages.exchange import read_bucket, row_pages
from t5x_lab.corpora.stages.parts import PartWriter
from t5x_lab.corpora.stages.statistics import Statistics

NAME = "finish"


def list_jobs(context: Context) -> range:
    return range(context.plan.num_buckets)


def run(context: Context, bucket: int) -> dict[str, Any]:
    """Finishes the pages of a bucket. Returns the summary."""
    corpus, counts, examples, statistics = context.corpus, collections.Counter[str](), Examples(), Statistics()
    rules = PageRules([*corpus.text_rules, *_decontamination(context)], counts, examples.add)
    losses = _read_losses(context, bucket) if corpus.duplicates is not None else {}
    with (
        open_input(context.path(clean.NAME, f"{bucket:05d}.arrow")) as file,
        open_output(context.path(NAME, f"{bucket:05d}.arrow")) as output,
    ):
        writer = PartWriter(output, corpus)
        pages = (page for batch in read_bucket(file) for _, page in row_pages(batch))
        for number, page in enumerate(pages):
            remaining: Page | None = page
            if corpus.duplicates is not None:
                remaining = _remove_duplicates(context, page, losses.get(number, ()), counts, examples)
            if remaining is not None:
                remaining = rules.apply(remaining)
            if remaining is not None:
                writer.add(remaining)
                statistics.add(remaining)
        splits = writer.close()
    return {"counts": +counts, "examples": examples.to_json(), "splits": splits, **statistics.to_json()}


def _decontamination(context: Context) -> list[PageRule]:
    """Returns the rule that drops pages with questions of evaluation sets, if the recipe has it."""
    if context.corpus.decontamination is None:
        return []
    ngrams = load_ngrams(context.path(collect_questions.NAME, collect_questions.FILE))

    def decontamination(page: Page) -> Page | None:
        return None if is_contaminated(page.text, ngrams) else page

    return [decontamination]


def _read_losses(context: Context, bucket: int) -> dict[int, set[bytes]]:
    """Returns the units that pages of a bucket lose, by the number of the page."""
    losses: dict[int, set[bytes]] = collections.defaultdict(set)

    def add(path: str, part: int) -> None:
        with open_input(path) as file:
            for batch in read_bucket(file, part):
                for unit, page in zip(batch.column("unit").to_pylist(), batch.column("page").to_pylist(), strict=True):
                    losses[page].add(unit)

    add(context.path(clean.NAME, f"{bucket:05d}.losses.arrow"), 0)
    for part in find_duplicates.list_jobs(context):
        add(context.path(find_duplicates.NAME, f"{part:05d}.arrow"), bucket)
    return losses


def _remove_duplicates(
    context: Context, page: Page, lost: Any, counts: collections.Counter[str], examples: Examples
) -> Page | None:
    corpus, kind = context.corpus, context.corpus.duplicates
    text, number = remove_lines(page.text, lost) if kind == "lines" else remove_spans(page.text, lost, corpus.sentences)
    if number:
        counts[f"{'lines' if kind == 'lines' else 'sentences'} dropped: duplicates"] += number
        counts["bytes dropped: duplicates"] += num_bytes(page.text) - num_bytes(text)
    if not text:
        counts["pages dropped: duplicates"] += 1
        examples.add("duplicates", page)
        return None
    if corpus.min_sentences and count_sentences(text, corpus.min_sentences, corpus.sentences) < corpus.min_sentences:
        counts["pages dropped: few_sentences after duplicates"] += 1
        counts["bytes dropped: few_sentences after duplicates"] += num_bytes(text)
        examples.add("few_sentences after duplicates", page)
        return None
    return page if text == page.text else dataclasses.replace(page, text=text)
