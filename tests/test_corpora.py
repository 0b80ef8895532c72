"""Making of corpora: stages, duplicates, formats, resuming, and recipes beyond C4."""

import collections
import dataclasses
import datetime
import gzip
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from test_corpora_c4 import run_corpus, write_pages

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.config.locks import hold_lock
from t5x_lab.corpora import files, pipeline, planning, report
from t5x_lab.corpora.duplicates.min_hash import MinHash
from t5x_lab.corpora.duplicates.units import remove_spans
from t5x_lab.corpora.page import Page, md5, split_name
from t5x_lab.corpora.rules import pages
from t5x_lab.corpora.rules.sentences import punkt_sentences
from t5x_lab.corpora.stages import exchange
from t5x_lab.corpora.stages.context import describe, parse_corpus

WORDS = (
    "river mountain village teacher garden window letter winter summer bridge market doctor story music paper table kitchen "
    "island harbor forest engine captain soldier painter library morning evening journey weather silver golden quiet narrow"
)
UNCHECKED = ["Corpus.text_rules = ()", "Corpus.bucket_bytes = 20_000"]


def sentence(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS.split(), k=generator.randrange(6, 14))).capitalize() + "."


def random_pages(number: int, seed: int = 0, shared: float = 0.3) -> list[Page]:
    """Returns pages of random sentences, some of which several pages share."""
    generator = random.Random(seed)
    common = [sentence(generator) for _ in range(40)]
    return [
        Page(
            f"http://site{generator.randrange(30)}.example/{index}",
            "\n".join(
                generator.choice(common) if generator.random() < shared else sentence(generator)
                for _ in range(generator.randrange(4, 20))
            ),
            "2024-01-01T00:00:00Z",
        )
        for index in range(number)
    ]


def file_bytes(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith((".gz", ".parquet", ".json"))}


def test_two_processes_write_the_same_bytes_as_one(tmp_path):
    inputs = write_pages(random_pages(600), tmp_path / "in")
    bindings = [*UNCHECKED, "Corpus.near_duplicates = @MinHash()", "Corpus.shard_bytes = 30_000"]
    run_corpus(inputs, tmp_path / "one", *bindings)
    environment = dict(os.environ)
    summary, texts = run_corpus(inputs, tmp_path / "two", *bindings, workers=2)
    assert dict(os.environ) == environment
    assert len(summary["files"]) > 5 and len(texts) > 400
    assert file_bytes(tmp_path / "one") == file_bytes(tmp_path / "two")


def test_an_interrupted_corpus_is_continued_and_nothing_is_done_twice(tmp_path, monkeypatch):
    inputs = write_pages(random_pages(300), tmp_path / "in")
    run_corpus(inputs, tmp_path / "whole", *UNCHECKED)
    done, original, generator = collections.Counter(), pipeline.STAGES, random.Random(0)

    def interrupting(stage):
        def run(context, index):
            if generator.random() < 0.4:
                raise UserError("the machine has ended.")
            done[stage.name, index] += 1
            return stage.run(context, index)

        return dataclasses.replace(stage, run=run)

    monkeypatch.setattr(pipeline, "STAGES", tuple(map(interrupting, original)))
    interruptions = 0
    while True:
        try:
            run_corpus(inputs, tmp_path / "parts", *UNCHECKED)
            break
        except UserError as error:
            assert "the machine has ended." in str(error)
            interruptions += 1
    assert interruptions >= 3 and set(done.values()) == {1}
    assert file_bytes(tmp_path / "parts") == file_bytes(tmp_path / "whole")


def orphaned_workers() -> list[str]:
    """Returns the workers of Beam without a command that still run after two minutes. Starting ones end after one."""
    for _ in range(60):
        listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
        workers = [line for line in listed.splitlines() if "sdk_worker_main" in line and line.split()[0] == "1"]
        if not workers:
            return []
        time.sleep(2.0)
    return workers


@pytest.mark.exhaustive
def test_a_corpus_that_is_killed_at_random_moments_is_the_same(tmp_path):
    """Eight kills -9 of the command with two worker processes, each after up to ten seconds."""
    inputs = write_pages(random_pages(3000), tmp_path / "in")
    bindings = ["Corpus.bucket_bytes = 100_000", "Corpus.near_duplicates = @MinHash()", "Corpus.format = 'jsonl'"]
    flags = [f"--gin_bindings={binding}" for binding in bindings]
    run_corpus(inputs, tmp_path / "whole", *bindings)
    command = [sys.executable, "-m", "t5x_lab", "corpus", f"--input={inputs}", f"--output_dir={tmp_path}/killed", "--workers=2"]
    generator, environment = random.Random(0), {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(8):
        process = subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.DEVNULL)
        time.sleep(generator.uniform(2.0, 10.0))
        process.kill()
        process.wait()
    argv = [*command[:-2], f"--output_dir={tmp_path}/interrupted", "--workers=2", *flags]
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and not list((tmp_path / "interrupted").glob("work/read-*/*.arrow*")):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C, which the workers receive too
    messages = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in messages and messages.endswith("interrupted\n"), messages
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert not orphaned_workers()
    assert file_bytes(tmp_path / "killed") == file_bytes(tmp_path / "whole")


def test_a_changed_rule_repeats_its_stage_and_those_after_it(tmp_path, monkeypatch):
    inputs = write_pages(random_pages(100), tmp_path / "in")
    run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    stages = []

    def recording(stage):
        return dataclasses.replace(stage, run=lambda context, index: stages.append(stage.name) or stage.run(context, index))

    monkeypatch.setattr(pipeline, "STAGES", tuple(map(recording, pipeline.STAGES)))
    run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    assert not stages
    changed = ["Corpus.text_rules = (@long_text,)", "long_text.maximum = 500", *UNCHECKED[1:]]
    summary, texts = run_corpus(inputs, tmp_path / "out", *changed)
    assert set(stages) == {"read", "clean", "duplicates", "finish", "write"}  # `long_text` is a rule of reading, too
    assert texts and max(map(len, texts.values())) <= 500
    stages.clear()
    run_corpus(inputs, tmp_path / "out", "Corpus.text_rules = (@gopher_quality,)", *UNCHECKED[1:])
    run_corpus(
        inputs, tmp_path / "out", "Corpus.text_rules = (@gopher_quality,)", "gopher_quality.min_words = 60", *UNCHECKED[1:]
    )
    assert set(stages) == {"finish", "write"}
    assert not [name for name in (summary["files"]) if not (tmp_path / "out" / name).exists()]


def test_what_is_lost_or_changed_is_made_again(tmp_path):
    """An output file that somebody has removed, and a list of words that has changed."""
    inputs = write_pages(random_pages(100), tmp_path / "in")
    (tmp_path / "words.txt").write_text("harbor\n")
    bindings = ["Corpus.text_rules = (@bad_words,)", *UNCHECKED[1:], f"bad_words.files = {{'': '{tmp_path}/words.txt'}}"]
    summary, texts = run_corpus(inputs, tmp_path / "out", *bindings)
    (tmp_path / "out" / summary["files"][0]).unlink()
    assert run_corpus(inputs, tmp_path / "out", *bindings)[1] == texts
    (tmp_path / "words.txt").write_text("harbor\nriver\n")
    pages._bad_phrases.cache_clear()  # which a process reads once
    changed = run_corpus(inputs, tmp_path / "out", *bindings)[1]
    assert 0 < len(changed) < len(texts) and not any("river" in text for text in changed.values())


def test_another_recipe_replaces_the_output_of_the_first_and_the_first_comes_back(tmp_path):
    inputs, other = write_pages(random_pages(100), tmp_path / "in"), ["few_words.minimum = 9", "Corpus.shard_bytes = 3000"]
    summary, texts = run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    changed = run_corpus(inputs, tmp_path / "out", *UNCHECKED, *other)
    assert len(changed[0]["files"]) > len(summary["files"]) and changed[1] != texts
    again = run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    assert again == (summary, texts)
    assert {path.name for path in (tmp_path / "out").glob("*.gz")} == set(summary["files"])


def test_an_interrupted_recipe_leaves_no_files_for_the_next_one(tmp_path, monkeypatch):
    inputs = write_pages(random_pages(100), tmp_path / "in")
    stages = pipeline.STAGES

    def fail_late(context, index):
        if index == 3:
            raise UserError("the machine has ended.")
        return stages[-1].run(context, index)

    monkeypatch.setattr(pipeline, "STAGES", (*stages[:-1], dataclasses.replace(stages[-1], run=fail_late)))
    with pytest.raises(UserError, match="the machine has ended"):
        run_corpus(inputs, tmp_path / "out", *UNCHECKED, "Corpus.shard_bytes = 3000")
    monkeypatch.setattr(pipeline, "STAGES", stages)
    summary, _ = run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    assert {path.name for path in (tmp_path / "out").glob("*.gz")} == set(summary["files"])


def test_two_corpora_share_a_folder_of_tfds(tmp_path):
    inputs = write_pages(random_pages(50), tmp_path / "in")
    folders = []
    for name in ("en", "webtextlike"):
        corpus, text = parse_corpus(["corpora/c4.gin"], [*UNCHECKED, f'Corpus.name = "{name}"'])
        pipeline.make_corpus(corpus, text, [inputs], str(tmp_path / "data"), str(tmp_path / "data" / "work"), [])
        folders.append(tmp_path / "data" / "c4" / name / "3.1.0")
    for folder in folders:
        assert {"corpus.json", "dataset_info.json", "c4-train.tfrecord-00000-of-00001"} <= {
            path.name for path in folder.iterdir()
        }


def test_a_later_crawl_has_the_newest_pages(tmp_path, monkeypatch):
    """The first run is in June, the second in October of the same year, with pages of September, and one of 2099."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return today

    monkeypatch.setattr(planning.datetime, "datetime", Clock)
    good = "\n".join(f"This is line {number} of the page, and it is the NAME one." for number in range(4))
    page = lambda date, name: Page("http://a.example/", good.replace("NAME", name), f"{date}T00:00:00Z")
    write_pages([page("2020-01-01", "first")], tmp_path / "in")
    today = datetime.datetime(2020, 6, 1, tzinfo=datetime.UTC)
    assert "first" in run_corpus(str(tmp_path / "in"), tmp_path / "out", *UNCHECKED)[1]["http://a.example/"]
    write_pages([page("2020-09-01", "second"), page("2099-01-01", "third")], tmp_path / "in" / "later")
    today = datetime.datetime(2020, 10, 1, tzinfo=datetime.UTC)
    summary, texts = run_corpus(str(tmp_path / "in"), tmp_path / "out", *UNCHECKED)
    assert "second" in texts["http://a.example/"] and summary["counts"]["read"]["timestamps in the future"] == 1


def test_damaged_files_and_a_field_without_urls_are_named(tmp_path, capsys):
    write_pages(random_pages(50), tmp_path / "in")
    for path in (tmp_path / "in").iterdir():
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'"url"', b'"address"')))
    content = gzip.compress(json.dumps({"text": "A page that is lost."}).encode() * 99)
    for number in range(4):
        (tmp_path / "in" / f"damaged_{number}.jsonl.gz").write_bytes(content[:-20])
    summary, _ = run_corpus(str(tmp_path / "in"), tmp_path / "out", *UNCHECKED)
    assert list(summary["damaged_files"].values()) == [{"damaged_truncated": 1}] * 4
    messages = capsys.readouterr().err
    assert f"{tmp_path}/in/damaged_0.jsonl.gz" in messages and "and 1 more. corpus.json" in messages
    assert 'No page has a URL in the field "url"' in messages
    folder = next((tmp_path / "out").rglob("corpus.json")).parent
    assert "damaged_3.jsonl.gz" in pathlib.Path(report.write_report(str(folder))).read_text()


def test_the_output_is_no_input_and_json_of_another_kind_is_counted(tmp_path):
    write_pages(random_pages(50), tmp_path / "in")
    (tmp_path / "in" / "z.json").write_text('{"version": 1}')
    summary, texts = run_corpus(str(tmp_path / "in"), tmp_path / "in" / "out", *UNCHECKED)
    assert summary["counts"]["read"]["dropped_no_text_key"] == 1 and len(texts) > 30
    assert run_corpus(str(tmp_path / "in"), tmp_path / "in" / "out", *UNCHECKED)[1] == texts
    with pytest.raises(UserError, match=r"The input has no page \(.*no_text_key.*--gin.Corpus.text_key=NAME"):
        run_corpus(str(tmp_path / "in" / "z.json"), tmp_path / "other", *UNCHECKED)


def test_mistakes_are_found_before_anything_is_read(tmp_path):
    inputs = write_pages(random_pages(5), tmp_path / "in")
    for bindings, match in {
        ('bad_words.files = {"en": "missing.txt"}',): 'No file matches "missing.txt"',
        ("Corpus.read_rules = (@domains,)",): "domains needs a list",
        ("Corpus.name = 'my_corpus'", "Corpus.format = 'tfds'"): 'Corpus.name .* is "my_corpus".*webtextlike',
        ("Corpus.near_duplicates = @MinHash()", "MinHash.seed = -1"): "MinHash.seed is -1",
    }.items():
        with pytest.raises(UserError, match=match):
            run_corpus(inputs, tmp_path / "out", *bindings)
        assert not list(tmp_path.glob("out/work/read-*"))


def test_a_module_that_the_users_rules_import_is_part_of_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lists_of_mine.py").write_text("WORDS = ('a',)\n")
    (tmp_path / "rules_of_mine.py").write_text("import lists_of_mine\n\n\ndef rule(page):\n    return page\n")
    rule = __import__("rules_of_mine").rule
    before = describe(rule)
    assert describe(rule) == before
    (tmp_path / "lists_of_mine.py").write_text("WORDS = ('b',)\n")
    assert describe(rule) != before


def test_a_second_command_is_refused_while_the_first_one_works(tmp_path):
    inputs = write_pages(random_pages(10), tmp_path / "in")
    with (
        hold_lock(tmp_path / "out" / "work", ""),
        pytest.raises(UserError, match="Another process makes a corpus in .*/out/work"),
    ):
        run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    run_corpus(inputs, tmp_path / "out", *UNCHECKED)


def jaccard(first: set, second: set) -> float:
    return len(first & second) / len(first | second)


def edited_pages(generator: random.Random) -> list[Page]:
    """Returns groups of pages that differ by a few words, among others that do not."""
    pages = random_pages(60, seed=5, shared=0.0)
    for base in list(pages[:40]):
        for _ in range(generator.randrange(1, 4)):
            tokens = base.text.split(" ")
            for _ in range(generator.randrange(8)):
                tokens[generator.randrange(len(tokens))] = generator.choice(WORDS.split())
            pages.append(Page(f"http://copy.example/{len(pages)}", " ".join(tokens), "2024-01-01T00:00:00Z"))
    return pages


def ngrams(text: str, size: int = 5) -> set:
    tokens = [word.strip(".").lower() for word in text.split()]
    return set(zip(*(tokens[start:] for start in range(size)), strict=False))


def test_pages_share_bands_as_often_as_the_formula_says():
    """All pairs of edited pages, by their true similarity: with 14 bands of 8, the probability of 1 − (1 − s⁸)¹⁴."""
    pages, min_hash = edited_pages(random.Random(1)), MinHash()
    grams, bands = [ngrams(page.text) for page in pages], [set(min_hash.band_hashes(page.text)) for page in pages]
    pairs = [(jaccard(grams[i], grams[j]), bool(bands[i] & bands[j])) for i, j in itertools.combinations(range(len(pages)), 2)]
    alike = [(similarity, shares) for similarity, shares in pairs if similarity > 0.3]
    assert len(alike) > 60
    expected = [1 - (1 - similarity**8) ** 14 for similarity, _ in alike]
    error = np.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(sum(shares for _, shares in alike) - sum(expected)) < 4 * error
    assert not any(shares for similarity, shares in pairs if similarity < 0.1)


def test_signatures_estimate_the_jaccard_similarity():
    pages, min_hash = edited_pages(random.Random(2)), MinHash(bands=16, rows=16)
    grams, signatures = [ngrams(page.text) for page in pages], [min_hash.signature(page.text) for page in pages]
    differences = [
        np.mean(signatures[i] == signatures[j]) - jaccard(grams[i], grams[j])
        for i, j in itertools.combinations(range(len(pages)), 2)
    ]
    assert abs(np.mean(differences)) < 0.002 and np.max(np.abs(differences)) < 5 * 0.5 / 16


def test_one_page_of_each_cluster_is_kept(tmp_path):
    """The kept pages are those of a search over all pairs: of pages that are joined by shared bands the first by URL's MD5."""
    pages = [page for page in edited_pages(random.Random(3)) if len(page.text.split("\n")) >= 3]
    inputs = write_pages(pages, tmp_path / "in")
    bindings = [*UNCHECKED, "Corpus.duplicates = None"]
    _, texts = run_corpus(inputs, tmp_path / "all", *bindings)
    _, unique = run_corpus(inputs, tmp_path / "unique", *bindings, "Corpus.near_duplicates = @MinHash()")
    urls, bands = list(texts), [set(MinHash().band_hashes(text)) for text in texts.values()]
    cluster = list(range(len(urls)))
    for i, j in itertools.combinations(range(len(urls)), 2):
        if bands[i] & bands[j]:
            cluster = [cluster[i] if number == cluster[j] else number for number in cluster]
    by_md5 = sorted(range(len(urls)), key=lambda index: md5(urls[index]))
    first = {cluster[index]: index for index in reversed(by_md5)}
    assert len(first) < 0.7 * len(urls)
    assert unique == {urls[index]: texts[urls[index]] for index in first.values()}


def test_a_span_of_three_sentences_is_in_the_corpus_once(tmp_path):
    generator = random.Random(4)
    shared = [" ".join(sentence(generator) for _ in range(3)) for _ in range(5)]
    pages = [
        Page(
            f"http://a.example/{number}",
            "\n".join([sentence(generator), generator.choice(shared), *(sentence(generator) for _ in range(4))]),
            "2024-01-01T00:00:00Z",
        )
        for number in range(60)
    ]
    _, texts = run_corpus(write_pages(pages, tmp_path / "in"), tmp_path / "out", *UNCHECKED, 'Corpus.duplicates = "spans"')
    assert len(texts) == 60
    counts = collections.Counter(
        span
        for text in texts.values()
        for listed in [[part for line in text.split("\n") for part in punkt_sentences(line)]]
        for span in {tuple(listed[start : start + 3]) for start in range(len(listed) - 2)}
    )
    assert max(counts.values()) == 1
    for text in shared:
        owners = [url for url, page in texts.items() if text in page]
        others = [page.url for page in pages if text in page.text]
        assert owners == [min(others, key=lambda url: md5(url))]


def test_a_text_without_repeated_spans_is_left_as_it_is():
    for text in ("One.  Two.\n\n Three.", "你好。再见。", " ".join(["So it is."] * 4)):
        assert remove_spans(text, (), punkt_sentences) == (text, 0)


def test_sentences_of_a_repeated_span_are_removed_once():
    text = "One one. Two two. Three three.\nFour four. One one. Two two. Three three."
    assert remove_spans(text, (), punkt_sentences) == ("One one. Two two. Three three.\nFour four.", 3)


def test_formats_hold_the_same_pages(tmp_path):
    import tensorflow as tf

    inputs = write_pages(random_pages(80), tmp_path / "in")
    _, texts = run_corpus(inputs, tmp_path / "jsonl", *UNCHECKED)
    tables, examples = {}, {}
    for name in ("parquet", "tfrecord"):
        corpus, text = parse_corpus(["corpora/c4.gin"], [*UNCHECKED, f'Corpus.format = "{name}"'])
        folder = tmp_path / name
        summary = pipeline.make_corpus(corpus, text, [inputs], str(folder), str(folder / "work"), [])
        for file in summary["files"]:
            if name == "parquet":
                tables |= {row["url"]: row["text"] for row in pq.read_table(folder / file).to_pylist()}
            else:
                for record in tf.data.TFRecordDataset(str(folder / file)).as_numpy_iterator():
                    features = tf.train.Example.FromString(record).features.feature
                    examples[features["url"].bytes_list.value[0].decode()] = features["text"].bytes_list.value[0].decode()
    assert tables == examples == texts


def test_the_tfds_layout_is_a_data_set(tmp_path):
    import tensorflow_datasets as tfds

    pages = random_pages(2500)
    corpus, text = parse_corpus(["corpora/c4.gin"], UNCHECKED)
    summary = pipeline.make_corpus(
        corpus, text, [write_pages(pages, tmp_path / "in")], str(tmp_path / "data"), str(tmp_path / "work"), []
    )
    builder = tfds.builder("c4/en:3.1.0", data_dir=str(tmp_path / "data"))
    for split in ("train", "validation"):
        urls = {example["url"].decode() for example in tfds.as_numpy(builder.as_dataset(split=split))}
        assert len(urls) == builder.info.splits[split].num_examples == summary["splits"][split]["pages"] > 0
        assert {split_name(Page(url, "").key) for url in urls} == {split}


def test_a_users_rule_is_a_rule_and_its_failures_are_counted(tmp_path):
    (tmp_path / "my_rules.py").write_text(
        "import functools\nimport gin\n\n@gin.configurable\ndef no_rivers(page, word='river'):\n"
        "    if '/13' in page.url:\n        raise ValueError('unlucky')\n"
        "    return None if word in page.text else page\n\n"
        "@gin.configurable\ndef shout(line):\n    return line.upper()\n\n"
        "@gin.configurable\ndef fail(line):\n    return 1 / 0\n\n"
        "@gin.configurable\ndef is_long(page):\n    return len(page.text) > 100\n\n"
        "def twice(rule):\n    @functools.wraps(rule)\n    def run(line):\n        return rule(rule(line))\n    return run\n\n"
        "@gin.configurable\n@twice\ndef more(line):\n    return line + '!'\n"
    )
    bindings = [
        "import my_rules",
        "Corpus.text_rules = (@no_rivers,)",
        "LineCleaning.rules = (@end_mark, @shout)",
        *UNCHECKED[1:],
    ]
    inputs = write_pages(random_pages(50), tmp_path / "in")
    summary, texts = run_corpus(inputs, tmp_path / "out", *bindings, "no_rivers.word = 'HARBOR'")
    assert texts and all("HARBOR" not in text and text.isupper() for text in texts.values())
    counts = summary["counts"]["finish"]
    assert counts["pages dropped: no_rivers"] > 5 and counts["failed: no_rivers: ValueError: unlucky"] == 1
    decorated = run_corpus(inputs, tmp_path / "out", "import my_rules", "LineCleaning.rules = (@end_mark, @more)", *UNCHECKED)[
        1
    ]
    assert all(line.endswith(".!!") for text in decorated.values() for line in text.split("\n"))
    with pytest.raises(
        UserError, match="The rule is_long has returned (True|False). A page rule returns the page, or None to drop it"
    ):
        run_corpus(inputs, tmp_path / "out", "import my_rules", "Corpus.text_rules = (@is_long,)")
    with pytest.raises(UserError, match="The rule fail has failed for 11 of 11 pages, .*ZeroDivisionError"):
        run_corpus(inputs, tmp_path / "out", "import my_rules", "LineCleaning.rules = (@end_mark, @fail)")
    bindings[1] = "Corpus.text_rules = (@no_rivers, @bad_words)"
    with pytest.raises(
        UserError,
        match=r"The rule bad_words has failed for 11 of 11 pages, last for http.*(TypeError|AttributeError).*Correct it, or switch it off",
    ):
        run_corpus(inputs, tmp_path / "out", *bindings, "bad_words.files = {'': 0}")
    with pytest.raises(UserError, match="missing://x.txt cannot be read or written: Protocol not known"):
        run_corpus(inputs, tmp_path / "out", *bindings, "bad_words.files = {'': 'missing://x.txt'}")
    with pytest.raises(UserError, match='Corpus.without has "javscript", which is no rule here. Did you mean "javascript"?'):
        parse_corpus(["corpora/c4.gin"], ["Corpus.without = ('javscript',)"])


def test_a_question_of_an_evaluation_set_does_not_survive(tmp_path):
    pages, generator = random_pages(40), random.Random(9)
    question = " ".join(generator.choices(WORDS.split(), k=15))
    short = " ".join(generator.choices(WORDS.split(), k=9))
    (tmp_path / "copa").mkdir()
    records = [{"premise": question, "choice1": "yes", "label": 0}] * 12  # as a passage with twelve questions
    records += [{"premise": "x", "choice1": short, "label": 1}]
    (tmp_path / "copa" / "validation.jsonl").write_text("\n".join(map(json.dumps, records)))
    planted = [
        dataclasses.replace(page, text=f"{page.text}\nSomebody asked: {text.upper()}, and waited long for it.")
        for page, text in zip(pages, [question, short, " ".join(question.split()[:12])], strict=False)
    ]
    bindings = [
        *UNCHECKED,
        "Corpus.decontamination = @Decontamination()",
        'Decontamination.data_sets = ("super_glue/copa",)',
        f'Decontamination.files = "{tmp_path}/copa/{{split}}.jsonl"',
        'Decontamination.splits = ("validation",)',
    ]
    summary, texts = run_corpus(write_pages([*planted, *pages[3:]], tmp_path / "in"), tmp_path / "out", *bindings)
    assert summary["counts"]["finish"]["pages dropped: decontamination"] == 2
    assert planted[0].url not in texts and planted[1].url not in texts and planted[2].url in texts


def test_paths_of_any_storage_are_read_and_written(tmp_path):
    """A storage that fsspec knows and Python does not: input, lists of words, intermediate files and output are all on it."""

    class FarFileSystem(DirFileSystem):
        protocol = "far"

        def __init__(self, **options):
            super().__init__(str(tmp_path), LocalFileSystem(auto_mkdir=True), **options)

    fsspec.register_implementation("far", FarFileSystem, clobber=True)
    (tmp_path / "words.txt").write_text("harbor\n")
    write_pages(random_pages(100), tmp_path / "in")
    bindings = ["Corpus.text_rules = (@bad_words,)", *UNCHECKED[1:]]
    listed = "bad_words.files = {'': '%s'}"
    _, texts = run_corpus(str(tmp_path / "in"), tmp_path / "near", *bindings, listed % (tmp_path / "words.txt"))
    corpus, text = parse_corpus(["corpora/c4.gin"], ['Corpus.format = "jsonl"', *bindings, listed % "far://words.txt"])
    pipeline.make_corpus(corpus, text, ["far://in/*.gz"], "far://out", "far://work", [], workers=1)
    assert 5 < len(texts) < 80 and not any("harbor" in text for text in texts.values())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "near").iterdir()} - {"work"}
    for name in names - {"corpus.json", "RECIPE"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()


@pytest.mark.exhaustive
def test_beams_portable_runner_with_workers_of_its_own_writes_the_same(tmp_path):
    """A job service and a pool of worker processes, over loopback, as a cluster has them."""
    inputs = write_pages(random_pages(300), tmp_path / "in")
    run_corpus(inputs, tmp_path / "here", *UNCHECKED)
    service, pool = free_port(), free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    beam = "apache_beam.runners"
    servers = [
        subprocess.Popen([sys.executable, "-m", module, *flags], env=environment, stderr=subprocess.DEVNULL)
        for module, *flags in (
            [f"{beam}.portability.local_job_service_main", "-p", str(service)],
            [f"{beam}.worker.worker_pool_main", f"--service_port={pool}"],
        )
    ]
    try:
        for port in (service, pool):
            wait_for_port(port)
        options = f"--job_endpoint=localhost:{service},--environment_type=EXTERNAL,--environment_config=localhost:{pool}"
        command = [sys.executable, "-m", "t5x_lab", "corpus", f"--input={inputs}", f"--output_dir={tmp_path}/there"]
        command += [f"--pipeline_options=--runner=PortableRunner,{options}", "--gin.Corpus.format=jsonl"]
        command += [f"--gin_bindings={binding}" for binding in UNCHECKED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert file_bytes(tmp_path / "there") == file_bytes(tmp_path / "here")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def wait_for_port(port: int) -> None:
    for _ in range(120):
        with socket.socket() as client:
            if client.connect_ex(("localhost", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(port)


def test_the_report_says_what_each_rule_removed(tmp_path):
    from t5x_lab.corpora.report import summary_table, write_report

    pages = [
        Page(
            "http://a.example/1",
            "\n".join(["This line has javascript in it, so to say.", *[f"A good line, number {n}." for n in range(5)]]),
        ),
        Page("http://a.example/2", "Some code { of a page } <script>alert(1)</script> that ends so."),
        Page("http://b.example/3", "Too short."),
    ]
    summary, texts = run_corpus(write_pages(pages, tmp_path / "in"), tmp_path / "out", "Corpus.text_rules = ()")
    assert list(texts) == ["http://a.example/1"]
    table = summary_table(summary)
    rows = [line.split() for line in table.splitlines() if line.startswith(("javascript", "curly", "few_words"))]
    assert rows == [
        ["few_words", "0", "-1", f"-{len(pages[2].text)}"],
        ["javascript", "0", "-1", f"-{len(pages[0].text.splitlines()[0]) + 1}"],
        ["curly_bracket", "-1", "0", f"-{len(pages[1].text)}"],
    ]
    page = pathlib.Path(write_report(str(tmp_path / "out"))).read_text()
    assert main(["report", str(tmp_path / "out"), f"--output={tmp_path}/again.html"]) == 0
    assert (tmp_path / "again.html").read_text() == page
    assert "http://a.example/2" in page and "<script>alert" not in page and "curly_bracket" in page


def test_bytes_add_up(tmp_path):
    """Input less what each rule has dropped is the output, but for the line ends of removed duplicates."""
    pages = random_pages(200)
    inputs = write_pages(
        [*pages, *(dataclasses.replace(page, timestamp="2025-01-01T00:00:00Z") for page in pages[:50])], tmp_path / "in"
    )
    summary, texts = run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    dropped = sum(n for counts in summary["counts"].values() for name, n in counts.items() if name.startswith("bytes dropped"))
    assert summary["counts"]["read"]["bytes in"] - dropped == sum(len(text.encode()) for text in texts.values())
    assert summary["counts"]["clean"]["bytes dropped: newest_per_url"] == sum(len(page.text) for page in pages[:50])


def test_inputs_that_are_missing_empty_or_repeated(tmp_path, capfd):
    inputs = write_pages(random_pages(20), tmp_path / "in, with commas")
    (tmp_path / "in, with commas" / "00.jsonl").write_text("")
    other = (
        write_pages(random_pages(20, seed=1), tmp_path / "months" / "2024-01") if (tmp_path / "months").mkdir() is None else ""
    )
    flags = [f"--output_dir={tmp_path}/out", "--gin.Corpus.format=jsonl", "--gin.Corpus.text_rules=()"]
    assert main(["corpus", f"--input={inputs}", f"--input={tmp_path}/months/2024-*", *flags]) == 0
    assert "input                          40" in capfd.readouterr().out.replace("              ", "      ") or other
    assert main(["corpus", f"--input={tmp_path}/months,{tmp_path}/nowhere", *flags]) == 2
    assert 'nowhere" has no pages. No file matches it.' in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["corpus", f"--input={inputs}", f"--output_dir={tmp_path}/file"]) == 2


def test_a_run_that_fails_leaves_the_corpus_before_it(tmp_path):
    inputs = write_pages(random_pages(50), tmp_path / "in")
    run_corpus(inputs, tmp_path / "out", *UNCHECKED)
    before = file_bytes(tmp_path / "out")
    (tmp_path / "my_wrong_rules.py").write_text(
        "import gin\n\n@gin.configurable\ndef wrong(line):\n    return line.cuont('a')\n"
    )
    with pytest.raises(UserError, match="The rule wrong has failed"):
        run_corpus(inputs, tmp_path / "out", "import my_wrong_rules", "LineCleaning.rules = (@wrong,)")
    assert file_bytes(tmp_path / "out") == before


def test_a_folder_without_pages_is_a_sentence(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "picture.png").write_bytes(b"x")
    corpus, text = parse_corpus(["corpora/c4.gin"], [])
    with pytest.raises(UserError, match="has no pages. .*Files are read by their names"):
        pipeline.make_corpus(corpus, text, [str(tmp_path / "in")], str(tmp_path / "out"), str(tmp_path / "work"), [])


def test_gzip_output_has_no_time_of_its_own(tmp_path):
    run_corpus(write_pages(random_pages(10), tmp_path / "in"), tmp_path / "out", *UNCHECKED)
    for path in (tmp_path / "out").glob("*.gz"):
        assert path.read_bytes()[4:8] == bytes(4)
        gzip.decompress(path.read_bytes())


def test_another_recipe_removes_the_files_of_the_last_one_and_no_others(tmp_path):
    inputs, folder = write_pages(random_pages(60), tmp_path / "in"), tmp_path / "o[1]"
    run_corpus(inputs, folder, *UNCHECKED, "Corpus.format = 'jsonl'")
    (folder / "mine-00000-of-00001.parquet").write_text("mine")
    (folder / "best-of-web").mkdir()
    (folder / "best-of-web" / "train-00000-of-00001.parquet").write_text("mine")
    before = set(folder.glob("*.jsonl.gz"))
    folders = [f"--input={inputs}", f"--output_dir={folder}", "--workers=1"]
    assert main(["corpus", *folders, *(f"--gin_bindings={b}" for b in UNCHECKED), "--gin.Corpus.format=parquet"]) == 0
    assert before and not list(folder.glob("*.jsonl.gz"))
    assert (folder / "mine-00000-of-00001.parquet").read_text() == "mine"
    assert (folder / "best-of-web" / "train-00000-of-00001.parquet").read_text() == "mine"


def test_a_bucket_is_read_alone_and_all_in_their_order(tmp_path):
    schema = exchange.pa.schema([exchange.pa.field("n", exchange.pa.int64())])
    generator, expected = random.Random(0), collections.defaultdict(list)
    with open(tmp_path / "rows", "wb") as file:
        writer = exchange.BucketWriter(file, schema, 1000)
        for number in range(5000):
            bucket = generator.choice((0, 3, 7, 998, 999))
            expected[bucket].append(number)
            writer.add(bucket, (number,), exchange.FLUSH_BYTES // 1000)
        writer.close()
    numbers = lambda batches: [n for batch in batches for n in batch.column("n").to_pylist()]
    with open(tmp_path / "rows", "rb") as file:
        assert all(numbers(exchange.read_bucket(file, bucket)) == expected[bucket] for bucket in range(1000))
        assert numbers(exchange.read_buckets(file)) == [n for bucket in sorted(expected) for n in expected[bucket]]
    (tmp_path / "rows").write_bytes(b"short")
    with open(tmp_path / "rows", "rb") as file, pytest.raises(UserError, match="rows is damaged"):
        list(exchange.read_bucket(file))


def test_settings_are_described_by_their_files_and_alike_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part-1.txt").write_text("a question")
    named = [f"{tmp_path}/part-?.txt", str(tmp_path), f"{tmp_path}/**/*.txt"]
    before = [describe(name) for name in named]
    marks = describe((".", "?", "!", "..", "*"))
    os.utime(tmp_path / "part-1.txt", (1, 1))
    assert describe((".", "?", "!", "..", "*")) == marks  # no files
    assert all(describe(name) != value for name, value in zip(named, before, strict=True))

    assert describe("https://a.example/") == describe("https://a.example/")  # an address, and no storage

    class Other:
        pass

    assert describe(Other()) == describe(Other()) and describe({"b", "a", "c"}) == describe({"c", "b", "a"})


def test_a_page_without_text_is_not_written(tmp_path, capsys):
    pages = [Page(f"http://a.example/{n}", "no mark\nnone here either", "2024-01-01T00:00:00Z") for n in range(30)]
    bindings = ["LineCleaning.min_sentences = 0", "Corpus.duplicates = None", "Corpus.text_rules = ()"]
    summary, texts = run_corpus(write_pages(pages, tmp_path / "in"), tmp_path / "out", *bindings)
    assert not texts and summary["counts"]["clean"]["pages dropped: no_text"] == 30
    assert summary["counts"]["clean"]["bytes dropped: end_mark"] == summary["counts"]["read"]["bytes in"]
    flags = [f"--gin_bindings={binding}" for binding in (*bindings, "Corpus.format = 'jsonl'")]
    folders = [f"--input={tmp_path}/in", f"--output_dir={tmp_path}/out", f"--work_dir={tmp_path}/work", "--workers=1"]
    assert main(["corpus", *folders, *flags]) == 2
    assert "The corpus has no page: the rules have dropped all." in capsys.readouterr().err


def test_bad_words_need_a_language(tmp_path):
    (tmp_path / "list.txt").write_text("badword\n")
    with pytest.raises(UserError, match="Put @language before @bad_words"):
        pages.bad_words(Page("http://a", "a badword here"), {"en": str(tmp_path / "list.txt")})


def test_a_long_line_of_a_list_is_read_in_linear_time(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"a" * (1 << 26) + b"\nb\n")
    start = time.process_time()
    assert [len(line) for line in files.read_text_lines(str(tmp_path / "list.txt"))] == [1 << 26, 1]
    assert time.process_time() - start < 10  # it was 100 seconds
