"""C4's recipe against TensorFlow Datasets' own functions, page by page, on real crawl files."""

import collections
import dataclasses
import gzip
import json
import os
import pathlib
import random
import subprocess
import sys

import apache_beam as beam
import pytest
from conftest import ROOT, shared_data
from tensorflow_datasets.text.c4 import MC4_LANGUAGES

from t5x_lab.corpora.page import Page, split_name
from t5x_lab.corpora.pipeline import make_corpus
from t5x_lab.corpora.reading.html import whole_text
from t5x_lab.corpora.reading.inputs import file_kind, read_pages
from t5x_lab.corpora.rules.sentences import punkt_sentences
from t5x_lab.corpora.stages.context import parse_corpus

KEYS = {"text": "text", "url": "url", "timestamp": "timestamp"}
BAD_WORDS = ("dirty", "c++", "wine", "two words")


def crawl_pages() -> list[Page]:
    """Returns the pages of all files of the crawl folder, HTML as whole pages: more lines for the rules to drop."""
    pages = []
    for path in sorted(shared_data("crawl").rglob("*")):
        if path.is_file() and file_kind(str(path)) and not path.name.startswith("expected"):
            with open(path, "rb") as file:
                keys = KEYS | {"timestamp": "created"}
                pages += read_pages(file, str(path), whole_text, keys, collections.Counter(), 1 << 25)
    return pages


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    return make_pages()


def make_pages() -> list[Page]:
    """Returns real pages, and what happens to pages in a crawl: older versions, shared lines, bad words, code, filler text."""
    generator, real = random.Random(0), crawl_pages()
    lines = [line for page in real for line in page.text.split("\n") if line.endswith(".")]
    altered = []
    for number in range(400):
        page = generator.choice(real)
        own = page.text.split("\n")
        for _ in range(generator.randrange(12)):
            own.insert(generator.randrange(len(own) + 1), generator.choice(lines))
        extra = generator.choice(
            ["", "This page has one dirty word in it.", "A { b } is not a text.", "Lorem ipsum dolor sit amet x."]
        )
        url = generator.choice(
            [page.url, f"https://www.example.org/{number % 150}/?utm_source=x", f"http://example.com/{number}/"]
        )
        altered.append(dataclasses.replace(page, url=url, text="\n".join([*own, extra, "x" * 1001])))
    dated = [
        dataclasses.replace(
            page, timestamp=f"2019-{1 + n % 12:02d}-{1 + n // 12 % 28:02d}T{n // 336 % 24:02d}:{n // 8064:02d}:00Z"
        )
        for n, page in enumerate(generator.sample([*real, *altered], len(real) + len(altered)))
    ]
    return dated


def tfds_c4(pages: list[Page], folder: pathlib.Path, name: str) -> dict[str, str]:
    """Returns the text by URL that a configuration of TFDS's `c4` has of these pages, with our sentences.

    Args:
      pages: the pages.
      folder: folder for the result.
      name: "en", "en.noclean" or "multilingual".
    """
    from tensorflow_datasets.text import c4_utils

    class Tokenizer:
        def tokenize(self, text: str) -> list[str]:
            return list(punkt_sentences(text))

    c4_utils._SENTENCE_TOKENIZER = Tokenizer()
    features = [
        c4_utils.PageFeatures(page.url, c4_utils.normalize_url(page.url), page.text, page.timestamp, "", "") for page in pages
    ]
    result = folder / "tfds.json"
    with beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(["--runner=DirectRunner"])) as pipeline:
        remaining = (
            pipeline
            | beam.Create(features)
            | beam.Filter(c4_utils.is_valid_length)
            | beam.Map(lambda page: (page.normalized_url, page))
            | beam.CombinePerKey(c4_utils.select_newest_page)
            | beam.Values()
        )
        if name == "en":
            remaining |= "clean" >> beam.FlatMap(c4_utils.get_clean_page_fn())
            remaining = c4_utils.remove_duplicate_text(remaining)
        if name == "multilingual":
            remaining |= "paragraphs" >> beam.Filter(c4_utils.paragraph_filter)
            remaining = c4_utils.remove_duplicate_text(remaining, min_num_sentences=0)
            remaining = c4_utils.detect_languages(remaining, MC4_LANGUAGES)
        else:
            remaining |= "english" >> beam.FlatMap(c4_utils.detect_english)
        if name != "en.noclean":
            share = {"en": 1.0, "multilingual": 0.999}[name]
            remaining |= "bad words" >> beam.Filter(c4_utils.get_badwords_filter_fn({"en": BAD_WORDS}, share))
        remaining | beam.Map(lambda page: (page.url, page.text)) | beam.combiners.ToList() | beam.Map(write_json, result)
    texts = json.loads(result.read_text())
    assert len(dict(texts)) == len(texts)
    return dict(texts)


def write_json(value, path: pathlib.Path) -> None:
    path.write_text(json.dumps(value))


def write_pages(pages: list[Page], folder) -> str:
    """Writes pages as files of JSON lines."""
    folder.mkdir()
    for start in range(0, len(pages), 100):
        with gzip.open(folder / f"{start:05d}.jsonl.gz", "wt") as file:
            for page in pages[start : start + 100]:
                file.write(json.dumps({"url": page.url, "text": page.text, "timestamp": page.timestamp}) + "\n")
    return str(folder)


def run_corpus(
    inputs: str, output: pathlib.Path, *bindings: str, workers: int = 1, recipe: str = "corpora/c4.gin"
) -> tuple[dict, dict[str, str]]:
    """Returns (summary, text by URL) of a corpus in JSON lines."""
    corpus, text = parse_corpus([recipe], ["Corpus.format = 'jsonl'", *bindings])
    summary = make_corpus(corpus, text, [inputs], str(output), f"{output}/work", [], workers)
    texts: dict[str, str] = {}
    for name in summary["files"]:
        with gzip.open(output / name, "rt") as file:
            for line in file:
                record = json.loads(line)
                assert record["url"] not in texts
                texts[record["url"]] = record["text"]
                is_validation = split_name(Page(record["url"], "").key) == "validation"
                assert ("validation" in name) == is_validation
    return summary, texts


def compare(name: str, pages: list[Page], folder: pathlib.Path) -> None:
    """Makes a corpus with our recipe and with TFDS's functions, and compares them."""
    (folder / "words.txt").write_text("\n".join(BAD_WORDS))
    bindings = [f"bad_words.files = {{'en': '{folder}/words.txt'}}", "Corpus.bucket_bytes = 300_000"]
    recipe = {"en": "c4", "en.noclean": "c4_unfiltered", "multilingual": "mc4"}[name]
    summary, texts = run_corpus(write_pages(pages, folder / "in"), folder / "out", *bindings, recipe=f"corpora/{recipe}.gin")
    expected = tfds_c4(pages, folder, name)
    assert len(expected) > 50
    assert texts == expected
    if name == "multilingual":
        assert len({split.partition("-")[0] for split in summary["splits"]}) > 5


@pytest.mark.parametrize("name", ["en", "en.noclean"])
def test_pages_and_texts_are_those_of_tfds(pages, name, tmp_path):
    compare(name, pages, tmp_path)


def test_mc4_is_that_of_tfds(tmp_path):
    """Runs in a process of its own, because CLD3 crashes in one that has loaded TensorFlow before."""
    shared_data("crawl")
    program = (
        "import pathlib, test_corpora_c4 as test; from t5x_lab.corpora.rules.language import cld3; cld3('A text before others.');"
        "test.compare('multilingual', test.make_pages(), pathlib.Path.cwd())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
