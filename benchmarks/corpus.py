"""Speed of `t5x_lab corpus` beside TensorFlow Datasets' own functions for C4, on the same pages in the same run.

    python benchmarks/corpus.py --data=../shared/data

Pages are made of lines of real ones, the crawl files of the test data. It prints MB of text per CPU-second for each stage, the
agreement of extractors of HTML with Mozilla Readability's articles, that of rules of Gopher and FineWeb with datatrove (if
installed: pip install datatrove), recall and precision of near-duplicates against all pairs, and the CPU-seconds of all stages
together beside TFDS's functions on Beam's local runner, at several numbers of pages, with the peak memory of the process.
"""

import argparse
import collections
import dataclasses
import gc
import gzip
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from t5x_lab.corpora import pipeline
from t5x_lab.corpora.duplicates.min_hash import MinHash
from t5x_lab.corpora.duplicates.ngrams import ngram_hashes, word_hashes
from t5x_lab.corpora.duplicates.units import remove_lines
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.reading.html import main_text, trafilatura_text, whole_text
from t5x_lab.corpora.reading.inputs import file_kind, read_pages
from t5x_lab.corpora.rules.fast_langdetect import detect
from t5x_lab.corpora.rules.fineweb import fineweb_quality
from t5x_lab.corpora.rules.gopher import gopher_quality, gopher_repetition
from t5x_lab.corpora.rules.lines import LineCleaning
from t5x_lab.corpora.rules.pages import bad_words
from t5x_lab.corpora.rules.personal_data import personal_data
from t5x_lab.corpora.rules.rule import Dropped
from t5x_lab.corpora.rules.sentences import punkt_sentences
from t5x_lab.corpora.stages.context import parse_corpus

KEYS = {"text": "text", "url": "url", "timestamp": "timestamp"}
PAGES_PER_FILE = 500
BUCKET_BYTES = 1 << 21


def crawl_texts(data: pathlib.Path) -> list[str]:
    """Returns the texts of all pages of the crawl files."""
    texts = []
    for path in sorted((data / "crawl").rglob("*")):
        if path.is_file() and file_kind(str(path)) and not path.name.startswith("expected"):
            with open(path, "rb") as file:
                texts += [page.text for page in read_pages(file, str(path), whole_text, KEYS, collections.Counter(), 1 << 25)]
    return [text for text in texts if 200 < len(text) < 20_000]


def make_pages(texts: list[str], number: int) -> list[Page]:
    """Returns pages of lines of real ones: two thirds of a page, and a few lines that many pages share."""
    generator = random.Random(0)
    shared = [line for text in texts for line in text.split("\n") if line.endswith(".")][:200]
    pages = []
    for index in range(number):
        lines = generator.choice(texts).split("\n")
        own = [line for line in lines if generator.random() < 0.7]
        own += [f"This is page number {index} of the crawl, and no other has it.", *generator.sample(shared, 3)]
        pages.append(Page(f"http://www.site{generator.randrange(number)}.org/{index}", "\n".join(own), "2024-01-01T00:00:00Z"))
    return pages


def write_wet(pages: list[Page], folder: pathlib.Path) -> list[str]:
    """Writes pages as WET files, a gzip member for each record."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for start in range(0, len(pages), PAGES_PER_FILE):
        path = folder / f"{start:06d}.warc.wet.gz"
        with open(path, "wb") as file:
            for page in pages[start : start + PAGES_PER_FILE]:
                content = page.text.encode()
                header = (
                    f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: {page.url}\r\nWARC-Date: {page.timestamp}\r\n"
                    f"Content-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
                )
                file.write(gzip.compress(header.encode() + content + b"\r\n\r\n", 6))
        names.append(str(path))
    return names


def cpu_seconds(run: Callable[[], object], rounds: int) -> float:
    """Returns the median CPU time of a function."""
    times = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def exhaust(items: Iterable[object]) -> None:
    collections.deque(items, maxlen=0)


class Tokenizer:
    """Our sentences, for TFDS's functions, whose own need a download."""

    def tokenize(self, text: str) -> list[str]:
        return list(punkt_sentences(text))


def compare_stages(pages: list[Page], files: list[str], badwords: str, rounds: int) -> None:
    """Prints the speed of each step as a function, without Beam on either side, but for TFDS's removal of duplicates."""
    import langdetect
    from tensorflow_datasets.text import c4_utils

    c4_utils._SENTENCE_TOKENIZER = Tokenizer()
    langdetect.DetectorFactory.seed = 0
    no_counts = lambda *_: None
    features = [c4_utils.PageFeatures(p.url, p.url, p.text, p.timestamp, language="en") for p in pages]
    english = [dataclasses.replace(page, language="en") for page in pages]
    listed = pathlib.Path(badwords).read_text().split("\n")
    cleaning, clean_page = LineCleaning(), c4_utils.get_clean_page_fn()
    filter_words = c4_utils.get_badwords_filter_fn({"en": [phrase for phrase in listed if phrase]})
    lost = {line.strip().lower().encode()[:16].ljust(16) for page in pages[:50] for line in page.text.split("\n")}

    def read_ours() -> None:
        for name in files:
            with open(name, "rb") as file:
                exhaust(read_pages(file, name, whole_text, KEYS, collections.Counter(), 1 << 25))

    steps = {
        "read": (read_ours, lambda: [exhaust(c4_utils.split_wet_file(name, no_counts)) for name in files]),
        "clean lines": (
            lambda: [cleaning.clean(page, collections.Counter(), no_counts) for page in pages],
            lambda: [list(clean_page(page, counter_inc_fn=no_counts)) for page in features],
        ),
        "remove duplicate lines": (
            lambda: [remove_lines(page.text, lost) for page in pages],
            lambda: [
                list(
                    c4_utils._remove_lines_from_text(
                        (page.url, {"pages": [page], "lines": list({h for h, _ in c4_utils._emit_url_to_lines(page)})}),
                        no_counts,
                        3,
                    )
                )
                for page in features
            ],
        ),
        "language": (
            lambda: [detect(page.text) for page in pages],
            lambda: [list(c4_utils.detect_english(page)) for page in features],
        ),
        "bad words": (
            lambda: [bad_words(page, {"en": badwords}) for page in english],
            lambda: [filter_words(page) for page in features],
        ),
    }
    megabytes = sum(len(page.text) for page in pages) / 1e6
    print(f"{len(pages):,} pages with {megabytes:.1f} MB; MB per CPU-second of a core, medians of {rounds} rounds")
    for name, (run_own, run_other) in steps.items():
        run_own(), run_other()
        own, other = cpu_seconds(run_own, rounds), cpu_seconds(run_other, rounds)
        print(f"{name:<24} {megabytes / own:8.1f}   TFDS {megabytes / other:8.1f}   {other / own:5.1f} times")


def compare_extractors(data: pathlib.Path) -> None:
    """Prints the agreement of extractors with the expected articles of Mozilla Readability's pages: mean F1 of words."""
    scores: dict[str, list[float]] = collections.defaultdict(list)
    seconds: dict[str, float] = collections.Counter()
    size = 0
    for path in sorted((data / "crawl" / "mozilla_readability").glob("*/source.html.gz")):
        html = gzip.decompress(path.read_bytes())
        expected = count_words(whole_text(gzip.decompress((path.parent / "expected.html.gz").read_bytes())))
        size += len(html)
        for extract in (main_text, trafilatura_text, whole_text):
            start = time.process_time()
            text = extract(html)
            seconds[extract.__name__] += time.process_time() - start
            counts = count_words(text)
            shared = (counts & expected).total()
            scores[extract.__name__].append(2 * shared / max(1, counts.total() + expected.total()))
    for name, values in scores.items():
        print(
            f"{name:<24} F1 {statistics.mean(values):.3f} on {len(values)} pages, {size / 1e6 / seconds[name]:.1f} MB of HTML/s"
        )


def compare_rules(texts: list[str], rounds: int) -> None:
    """Prints the speed of the rules beyond C4 on real pages, and their agreement with datatrove's on the same words."""
    pages = [Page("http://www.example.com/", text) for text in texts]
    megabytes, min_hash = sum(map(len, texts)) / 1e6, MinHash()
    rules = {rule.__name__: rule for rule in (gopher_quality, gopher_repetition, fineweb_quality, personal_data)}
    others = datatrove_filters()
    print(f"{len(texts):,} pages of the crawl files with {megabytes:.1f} MB; MB per CPU-second of a core")
    for name, rule in rules.items():
        seconds, line = cpu_seconds(lambda rule=rule: [rule(page) for page in pages], rounds), ""
        if name in others:
            other = cpu_seconds(lambda keeps=others[name]: [keeps(text) for text in texts], rounds)
            agree = sum((not isinstance(rule(page), Dropped)) == others[name](page.text) for page in pages)
            line = f"   datatrove {megabytes / other:8.1f}   the same verdict on {agree} pages"
        print(f"{name:<24} {megabytes / seconds:8.1f}{line}")
    seconds = cpu_seconds(lambda: [min_hash.band_hashes(text) for text in texts], rounds)
    print(f"{'MinHash':<24} {megabytes / seconds:8.1f}")


def datatrove_filters() -> dict[str, Callable[[str], bool]]:
    """Returns datatrove's filters by the name of our rule, with the thresholds of the papers and words between white space."""
    try:
        from datatrove.data import Document
        from datatrove.pipeline.filters import fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter
    except ImportError:
        return {}
    for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
        module.split_into_words = lambda text, language: text.split()
    filters = {
        "gopher_quality": gopher_quality_filter.GopherQualityFilter(),
        "gopher_repetition": gopher_repetition_filter.GopherRepetitionFilter(),
        "fineweb_quality": fineweb_quality_filter.FineWebQualityFilter(char_duplicates_ratio=0.1, new_line_ratio=1e9),
    }

    def keeps(own) -> Callable[[str], bool]:
        return lambda text: bool(text.split()) and own.filter(Document(text=text, id="")) is True

    return {name: keeps(own) for name, own in filters.items()}


def compare_near_duplicates(texts: list[str], seeds: int = 8) -> None:
    """Prints how many pairs share a band by their true similarity, on real pages and copies with some words replaced.

    Pairs of a few originals are alike, so that hash functions of several seeds are averaged.
    """
    generator = random.Random(2)
    texts = list(dict.fromkeys(texts))
    for text in list(texts):
        for _ in range(generator.randrange(4)):
            tokens, share = text.split(" "), generator.uniform(0.0, 0.12)
            texts.append(" ".join(generator.choice(tokens) if generator.random() < share else token for token in tokens))
    grams = [set(ngram_hashes(word_hashes(text), MinHash().ngram).tolist()) for text in texts]
    bands = [[set(MinHash(seed=seed).band_hashes(text)) for text in texts] for seed in range(1, seeds + 1)]
    pairs = []  # (Jaccard similarity, share of seeds with a common band)
    for first, second in itertools.combinations(range(len(texts)), 2):
        common = len(grams[first] & grams[second])
        similarity = common / max(len(grams[first]) + len(grams[second]) - common, 1)
        pairs.append((similarity, statistics.mean(bool(own[first] & own[second]) for own in bands)))
    print(
        f"near-duplicates: {len(texts):,} pages, {len(pairs):,} pairs by the Jaccard similarity of their 5-grams, {seeds} seeds"
    )
    for low, high in itertools.pairwise((0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.01)):
        own = [(s, share) for s, share in pairs if low <= s < high]
        formula = statistics.mean(1 - (1 - s ** MinHash().rows) ** MinHash().bands for s, _ in own)
        shares = statistics.mean(share for _, share in own)
        print(
            f"  {low:.2f} to {min(high, 1.0):.2f}: {len(own):7,} pairs, {shares:.1%} share a band, {formula:.1%} by the formula"
        )
    for threshold in (0.6, 0.7, 0.8):
        recall = statistics.mean(share for s, share in pairs if s >= threshold)
        precision = sum(share for s, share in pairs if s >= threshold) / sum(share for _, share in pairs)
        print(f"  duplicates from {threshold}: recall {recall:.3f}, precision {precision:.3f}")


def count_words(text: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"\w+", text))


def run_ours(folder: pathlib.Path, out: pathlib.Path) -> dict[str, float]:
    """Makes a corpus in this process. Returns CPU-seconds by stage."""
    bindings = ["Corpus.format = 'jsonl'", f"Corpus.bucket_bytes = {BUCKET_BYTES}"]
    corpus, text = parse_corpus(["corpora/c4.gin"], bindings)
    seconds: dict[str, float] = collections.Counter()

    def timed(stage: pipeline.Stage) -> pipeline.Stage:
        def run(context, index):
            start = time.process_time()
            summary = stage.run(context, index)
            seconds[stage.name] += time.process_time() - start
            return summary

        return dataclasses.replace(stage, run=run)

    pipeline.STAGES = tuple(map(timed, pipeline.STAGES))
    pipeline.make_corpus(corpus, text, [str(folder)], str(out), str(out / "work"), [], workers=1)
    return dict(seconds)


def run_tfds(files: list[str]) -> None:
    """Runs TFDS's functions on Beam's local runner, as its builder does."""
    import apache_beam as beam
    from tensorflow_datasets.text import c4_utils

    c4_utils._SENTENCE_TOKENIZER = Tokenizer()
    with beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(["--runner=DirectRunner"])) as pipe:
        pages = (
            pipe
            | beam.Create(files)
            | beam.FlatMap(c4_utils.split_wet_file)
            | beam.Filter(c4_utils.is_valid_length)
            | beam.Map(lambda page: (page.normalized_url, page))
            | beam.CombinePerKey(c4_utils.select_newest_page)
            | beam.Values()
            | "clean" >> beam.FlatMap(c4_utils.get_clean_page_fn())
        )
        pages = c4_utils.remove_duplicate_text(pages)
        pages | "english" >> beam.FlatMap(c4_utils.detect_english) | beam.combiners.Count.Globally()


def in_process(args: argparse.Namespace, *flags: str) -> dict:
    """Runs this program with other flags in a process of its own. Returns what it prints last."""
    command = [sys.executable, __file__, f"--data={args.data}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(kind: str, folder: str, out: str) -> None:
    """Prints CPU-seconds and the peak memory of making a corpus in this process."""
    files = sorted(str(path) for path in pathlib.Path(folder).iterdir())
    stages: dict[str, float] = {}
    if kind == "tfds":
        from tensorflow_datasets.text import c4_utils  # noqa: F401  (not counted)
    start = time.process_time()
    if kind == "ours":
        stages = run_ours(pathlib.Path(folder), pathlib.Path(out))
    else:
        run_tfds(files)
    peak = int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
    print(json.dumps({"seconds": time.process_time() - start, "stages": stages, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data", help="the test data, with crawl/")
    parser.add_argument("--pages", type=int, default=1000, help="pages for the speed of stages")
    parser.add_argument("--sizes", default="1000,2000,4000,8000", help="numbers of pages for the cost of a page")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, metavar=("KIND", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    texts = crawl_texts(pathlib.Path(args.data))
    with tempfile.TemporaryDirectory() as folder:
        badwords = pathlib.Path(folder) / "words.txt"
        generator = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        listed = ["".join(generator.choices(letters, k=generator.randrange(3, 10))) for _ in range(380)]
        badwords.write_text("\n".join([*listed, *(f"{a} {b}" for a, b in zip(listed[:20], listed[20:40], strict=True))]))
        pages = make_pages(texts, args.pages)
        compare_stages(pages, write_wet(pages, pathlib.Path(folder) / "wet"), str(badwords), args.rounds)
        compare_extractors(pathlib.Path(args.data))
        compare_rules(texts, args.rounds)
        compare_near_duplicates(texts)
        print("all stages of C4, CPU-seconds:")
        for number in map(int, args.sizes.split(",")):
            inputs = pathlib.Path(folder) / f"wet{number}"
            pages = make_pages(texts, number)
            write_wet(pages, inputs)
            megabytes = sum(len(page.text) for page in pages) / 1e6
            own = in_process(args, "--measure", "ours", str(inputs), f"{folder}/out{number}")
            other = in_process(args, "--measure", "tfds", str(inputs), "-")
            seconds = own["seconds"]
            print(
                f"{number:6,} pages, {megabytes:6.1f} MB: {seconds:7.2f}, {1e3 * seconds / number:6.2f} ms a page, peak "
                f"{own['peak']:6.0f} MiB; TFDS {other['seconds']:7.2f}, {other['seconds'] / seconds:.1f} times, peak "
                f"{other['peak']:.0f} MiB",
                flush=True,
            )
            stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in own["stages"].items())
            print(f"       by stage: {stages}", flush=True)


if __name__ == "__main__":
    main()
