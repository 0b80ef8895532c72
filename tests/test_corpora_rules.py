"""Rules for lines and pages, against TensorFlow Datasets' functions, langdetect, and texts made for each rule."""

import gzip
import json
import random

import langdetect as langdetect_package
import pytest
from conftest import shared_data
from tensorflow_datasets.text import c4_utils

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page, normalize_url, split_name
from t5x_lab.corpora.reading.html import main_text, trafilatura_text, whole_text
from t5x_lab.corpora.rules import lines
from t5x_lab.corpora.rules.classifier import quality_score
from t5x_lab.corpora.rules.fast_langdetect import detect
from t5x_lab.corpora.rules.fineweb import fineweb_quality
from t5x_lab.corpora.rules.gopher import gopher_quality, gopher_repetition
from t5x_lab.corpora.rules.language import language
from t5x_lab.corpora.rules.pages import bad_words, domains, listed_urls, long_text, paragraphs
from t5x_lab.corpora.rules.personal_data import personal_data
from t5x_lab.corpora.rules.rule import Dropped
from t5x_lab.corpora.rules.sentences import count_sentences, punkt_sentences


def page(text: str, url: str = "http://a.example/", **fields: str) -> Page:
    return Page(url, text, **fields)


def features(source: Page) -> c4_utils.PageFeatures:
    return c4_utils.PageFeatures(source.url, c4_utils.normalize_url(source.url), source.text, language=source.language or None)


URLS = """
http://www.example.com/a/b/?utm_source=x&y=1
https://example.com/a/b//
example.com
http://example.com/?ref=1&utm_x
https://example.com/feed?feed=rss
https://www.bbc.co.uk/news/1?q=2
HTTPS://WWW.EXAMPLE.COM/
http://https://www.www.example.org/
http://user:pw@news.example.de:80/x
http://[::1]/a
"""


def test_urls_are_normalized_and_split_as_in_tfds():
    for url in URLS.split():
        assert normalize_url(url) == c4_utils.normalize_url(url)
    is_validation = c4_utils.get_hashed_url_filter_fn(lambda value: value % 1000 == 0)
    names = set()
    for number in range(5000):
        source = page("", f"http://www.example.com/{number}/?utm_a")
        names.add(split_name(source.key))
        assert (split_name(source.key) == "validation") == is_validation(features(source))
    assert names == {"train", "validation"}


@pytest.mark.parametrize(
    "rule, dropped, remaining",
    [
        (lines.long_words, "a " + "x" * 1001, "a " + "x" * 1000),
        (lines.end_mark, "No end", 'An "end"'),
        (lines.end_mark, "And so on...", "And so on?"),
        (lines.few_words, "One two  three four.", "One two three four five."),
        (lines.javascript, "Please enable JavaScript now.", "Please enable scripts now."),
        (lines.policy, "See our Privacy Policy.", "See our policy on privacy."),
    ],
)
def test_a_line_rule_drops_the_line(rule, dropped, remaining):
    assert rule(dropped) is None and rule(remaining) == remaining


def test_line_rules_that_change_a_line_or_drop_its_page():
    assert lines.citations("A[1] fact[] of it[edit] is this[citation needed].") == "A fact of it is this."
    assert lines.lorem_ipsum("Lorem IPSUM dolor.") == Dropped() and lines.curly_bracket("if x {") == Dropped()


@pytest.mark.parametrize(
    "text, number",
    [
        ("Mr. Smith went to Washington. He liked it there! Did he?", 3),
        ("The U.S. economy grew by 3.5 percent in Jan. 2019, e.g. in cars.", 1),
        ('He said "No." She left.', 2),
        ("One line.\nAnother line without an end", 2),
    ],
)
def test_sentences_of_english(text, number):
    assert len(list(punkt_sentences(text))) == number
    assert [count_sentences(text, limit) for limit in (1, 2, 9)] == [min(limit, number) for limit in (1, 2, 9)]


def real_texts() -> list[str]:
    texts = []
    for path in sorted(shared_data("crawl", "mozilla_readability").glob("*/source.html.gz")):
        texts.append(whole_text(gzip.decompress(path.read_bytes())))
    for name in ("cc_en_head-0091", "cc_en_head-0174"):
        content = shared_data("crawl", "dolma", "multiple_files", f"{name}.jsonl").read_text()
        texts += [json.loads(line)["text"] for line in content.splitlines()]
    return texts


def test_languages_are_those_of_langdetect_to_the_last_bit():
    """On whole pages in several languages, on pieces of them, in capitals, and with characters of all scripts."""
    langdetect_package.DetectorFactory.seed = 0
    generator, pages = random.Random(0), real_texts()
    texts = pages[::5]
    for number in range(250):
        source = generator.choice(pages)
        start = generator.randrange(max(1, len(source)))
        text = source[start : start + generator.choice([1, 3, 20, 60, 200])]
        if number % 3 == 0:
            blocks = [
                (32, 127),
                (160, 1500),
                (0x900, 0x3100),
                (0x4E00, 0x9FFF),
                (0x1EA0, 0x1EFF),
                (0x300, 0x330),
                (0xAC00, 0xB000),
            ]
            text += "".join(chr(generator.randrange(*generator.choice(blocks))) for _ in range(generator.randrange(50)))
        texts.append(text.upper() if number % 5 == 0 else text)
    for text in texts:
        try:
            expected = [(best.lang, best.prob) for best in langdetect_package.detect_langs(text)]
        except langdetect_package.LangDetectException:
            expected = []
        assert detect(text) == expected, text


def test_a_language_rule_keeps_what_it_is_told():
    german = "Das ist ein Text in deutscher Sprache, und er ist lang genug, um erkannt zu werden."
    assert language(page(german)) == Dropped("de")
    assert language(page(german), languages=("en", "de")).language == "de"
    assert language(page("12345")) == Dropped("no language")
    assert language(page("12345"), keep_unknown=True).language == "und"
    assert language(page(german), minimum=1.1) == Dropped("low probability")
    assert language(page(german), languages=(), detect=lambda text: ("xx", 1.0)).language == "xx"


WORDS = {"en": ["dirty", "c++", "two words"], "de": ["böse"], "ja": ["sm", "悪い"], "zh": ["坏", "性"]}


@pytest.mark.parametrize("share", [1.0, 0.999, 0.5])
def test_bad_words_are_found_as_in_tfds(share, tmp_path):
    for code, phrases in WORDS.items():
        (tmp_path / f"{code}.txt").write_text("\n".join([*phrases, ""]))
    files = {code: f"{tmp_path}/{code}.txt" for code in WORDS}
    allowed = {code: set(phrases) - {"ja": {"sm"}, "zh": {"性"}}.get(code, set()) for code, phrases in WORDS.items()}
    expected = c4_utils.get_badwords_filter_fn(allowed, share)
    texts = [
        "A dirty word.",
        "Dirtyish.",
        "I write C++!",
        "Xc++x",
        "Two words, two.",
        "BÖSE",
        "これは悪いです",
        "sm",
        "不坏吧",
        "性",
        "dirty",
    ]
    outcomes = set()
    for number in range(40):
        for code in ("en", "de", "ja", "zh", "fr"):
            for text in texts:
                source = page(text, f"http://a.example/{number}", language=code)
                outcomes.add(remains := bad_words(source, files, share) is not None)
                assert remains == expected(features(source)), (text, code)
    assert outcomes == {True, False} and bad_words(page("dirty", language="en")) is not None


def test_domains_are_those_of_the_list_as_in_tfds(tmp_path):
    allowed = {"bbc.co.uk": ["", "news"], "example.com": True, "example.org": ["www2"]}
    (tmp_path / "domains.json").write_text(json.dumps(allowed))
    (tmp_path / "domains.txt").write_text("bbc.co.uk\n")
    urls = [*URLS.split(), "http://news.bbc.co.uk/1", "http://sport.bbc.co.uk/1", "http://www2.example.org/", "http://co.uk/"]
    outcomes = []
    for url in urls:
        remains = isinstance(domains(page("", url), f"{tmp_path}/domains.json"), Page)
        outcomes.append(remains)
        assert remains == c4_utils.is_realnews_domain(features(page("", url.lower())), allowed), url  # hosts have no case
    assert 3 < sum(outcomes) < len(urls) - 3
    assert domains(page("", "http://sport.bbc.co.uk/1"), f"{tmp_path}/domains.txt") == page("", "http://sport.bbc.co.uk/1")
    (tmp_path / "parts.txt").write_text("https://news.bbc.co.uk/\nwww.example.com\n")
    keep = lambda url: isinstance(domains(page("", url), f"{tmp_path}/parts.txt"), Page)
    urls = ["http://news.bbc.co.uk/1", "http://sport.bbc.co.uk/1", "http://a.example.com/"]
    assert [keep(url) for url in urls] == [True, False, True]
    with pytest.raises(UserError, match="domains needs a list"):
        domains(page(""))


def test_listed_urls_are_normalized(tmp_path):
    (tmp_path / "urls1.txt").write_bytes(gzip.compress(b"https://www.example.com/a/\n\nhttp://example.org/b?utm_x=1\n"))
    keep = lambda url: listed_urls(page("", url), (f"{tmp_path}/urls*.txt",)) is not None
    assert [keep(url) for url in ("http://example.com/a", "http://www.example.org/b/", "http://example.com/c")] == [
        True,
        True,
        False,
    ]


def test_lengths_and_paragraphs_as_in_tfds():
    generator = random.Random(0)
    for _ in range(200):
        source = page("\n".join("x" * generator.choice([0, 10, 199, 200, 300]) for _ in range(generator.randrange(1, 7))))
        assert (paragraphs(source) is not None) == c4_utils.paragraph_filter(features(source))
    for size in (189_999, 190_000, 190_001):
        assert (long_text(page("x" * size)) is not None) == c4_utils.is_valid_length(features(page("x" * size)))


NOUNS = ["station", "market", "bridge", "harbor", "garden", "library", "theater", "museum"]
TIMES = ["winter", "spring", "summer", "autumn", "morning", "evening", "weekend", "night"]
PROSE = " ".join(
    f"The {noun} of the old town was closed in the {time}, and most people had to walk around it with their bags."
    for noun, time in zip(NOUNS, TIMES, strict=True)
)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("The end of it and that is so.", "words"),
        ("a b c of the " * 20, "word length"),
        (PROSE + " #" * 40, "hash signs"),
        (PROSE + " so..." * 40, "ellipses"),
        ("\n".join(f"- {line} and that is the end of it" for line in PROSE.split(".")), "bullets"),
        ("\n".join(f"{line.strip()}…" for line in PROSE.split(", ")), "lines with ellipsis"),
        (PROSE + " 1234 5678 9012" * 40, "letters"),
        ("Der alte Bahnhof war geschlossen und wir liefen. " * 10, "stop words"),
    ],
)
def test_gophers_quality_rules(text, reason):
    assert gopher_quality(page(text)) == Dropped(reason)
    assert gopher_quality(page(PROSE)) == page(PROSE)


def varied_lines(number: int) -> list[str]:
    generator = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [" ".join("".join(generator.choices(letters, k=7)) for _ in range(8)) for _ in range(number)]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("\n".join([*varied_lines(6), *["same"] * 5]), "repeated lines"),
        ("\n".join([*varied_lines(9), *[varied_lines(20)[19]] * 4]), "characters of repeated lines"),
        ("\n\n".join([*varied_lines(4), *["x\ny"] * 4]), "repeated lines"),
        (" ".join([*varied_lines(5), *["very often"] * 30]), "top 2-gram"),
        (" ".join([*varied_lines(6), varied_lines(8)[7], "x", varied_lines(8)[7]]), "repeated 5-grams"),
    ],
)
def test_gophers_repetition_rules(text, reason):
    assert gopher_repetition(page(text)) == Dropped(reason)
    assert isinstance(gopher_repetition(page("\n".join(varied_lines(20)))), Page)


def test_characters_of_overlapping_repeated_ngrams_count_once():
    """Six words occur twice among 24: all twelve are in repeated 5-grams, and count once."""
    repeated = varied_lines(1)[0].split()[:6]
    text = " ".join([*repeated, *" ".join(varied_lines(3)[1:]).split()[:12], *repeated])
    shares = {5: 12 / 24 - 0.001}, {5: 12 / 24}
    assert [isinstance(gopher_repetition(page(text), top_ngrams={}, repeated_ngrams=share), Page) for share in shares] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("\n".join(f"A menu entry without an end {number} of it" for number in range(10)), "lines without end mark"),
        (
            "\n".join(
                [*(f"This is line {number} of the text, and it ends." for number in range(4)), *["Read more of it here."] * 3]
            ),
            "repeated lines",
        ),
        ("\n".join(f"Short line {number}." for number in range(10)), "short lines"),
        ("", "empty"),
    ],
)
def test_finewebs_rules(text, reason):
    assert fineweb_quality(page(text)) == Dropped(reason)
    good = "\n".join(f"This is line {number} of the text, and it ends." for number in range(6))
    assert fineweb_quality(page(good)) == page(good)


def test_personal_data_are_masked():
    text = "Write to jane.o'neil+x@mail.example.co.uk or call 555-123-4567 from 8.8.8.8, not 192.168.1.1 or 1.2.3.4.5 @home."
    expected = "Write to email@example.com or call 555-123-4567 from 22.214.171.124, not 192.168.1.1 or 1.2.3.4.5 @home."
    assert personal_data(page(text)).text == expected
    for other in ("Version 01.02.20.19 is out.", "a-" * 50_000 + " @b.com", "@" * 1000):
        assert personal_data(page(other)).text == other
    assert "[number]" in personal_data(page(text), phone="[number]").text
    assert personal_data(page(text), email="", ip="").text == text


def test_a_classifier_of_the_users_own():
    assert (
        quality_score(page("aaa"), score=len, minimum=3) == page("aaa")
        and quality_score(page("aa"), score=len, minimum=3) is None
    )
    with pytest.raises(UserError, match="quality_score needs a function"):
        quality_score(page(""))


@pytest.mark.parametrize("text", ["He hasn’t changed anything so far.", "The café is open today."])
def test_utf8_without_a_charset_is_read_as_utf8(text):
    assert whole_text(f"<html><body><p>{text}</p></body></html>".encode()).strip() == text
    assert main_text(f"<p>{text}</p>".encode()[:-5]).strip().startswith(text[:-3])


def word_f1(text: str, expected: str) -> float:
    from collections import Counter

    first, second = Counter(text.split()), Counter(expected.split())
    shared = sum((first & second).values())
    return 2 * shared / max(1, first.total() + second.total())


def test_articles_of_readability_are_extracted_as_well_as_by_trafilatura():
    """Mozilla Readability's pages: mean F1 of words against the expected article, of a third of them."""
    scores: dict[str, list[float]] = {"main": [], "trafilatura": [], "whole": []}
    for folder in sorted(shared_data("crawl", "mozilla_readability").iterdir())[::3]:
        if folder.is_dir():
            html = gzip.decompress((folder / "source.html.gz").read_bytes())
            expected = whole_text(gzip.decompress((folder / "expected.html.gz").read_bytes()))
            for name, extract in {"main": main_text, "trafilatura": trafilatura_text, "whole": whole_text}.items():
                scores[name].append(word_f1(extract(html, ""), expected))
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    assert means["main"] > 0.9 and means["main"] > means["trafilatura"] - 0.02 and means["main"] > means["whole"] + 0.05
