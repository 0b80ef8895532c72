"""`Corpus`: how a corpus is made from crawl files, as gin configures it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError, check_choice, did_you_mean
from t5x_lab.corpora.decontamination import Decontamination
from t5x_lab.corpora.duplicates.min_hash import MinHash
from t5x_lab.corpora.reading.html import main_text
from t5x_lab.corpora.rules.language import language
from t5x_lab.corpora.rules.lines import LineCleaning
from t5x_lab.corpora.rules.pages import bad_words, long_text
from t5x_lab.corpora.rules.rule import rule_name
from t5x_lab.corpora.rules.sentences import punkt_sentences

FORMATS = ("tfds", "jsonl", "parquet", "tfrecord")
TFDS_NAMES = ("en", "en.noclean", "realnewslike", "webtextlike", "multilingual")
DUPLICATES = ("lines", "spans")
_OTHER_SETTINGS = {
    "few_sentences": " Set LineCleaning.min_sentences = 0.",
    "duplicates": " Set Corpus.duplicates = None.",
    "newest_per_url": " Set Corpus.newest_per_url = False.",
    "near_duplicates": " Set Corpus.near_duplicates = None.",
    "decontamination": " Set Corpus.decontamination = None.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A recipe for a corpus. Its stages are those of C4 in their order (TFDS's `c4`); defaults are C4's.

    Rules are functions, see `rules/rule.py`. A user's own function takes its place in a list like the others.

    Attributes:
      name: name of the corpus: of the TFDS configuration ("en"), and in the report.
      html_text: f(HTML, character encoding or "") -> text, for archives of HTML.
      text_key, url_key, timestamp_key: names in JSON objects. Names of nested objects are joined by dots.
      max_record_bytes: records, lines and files above this size are left out. Memory of a worker is bounded by it.
      read_rules: page rules for every page that is read.
      newest_per_url: whether only the newest of the pages with the same normalized URL is kept.
      page_rules: page rules for what remains, before lines are cleaned.
      lines: line rules and the minimum number of sentences. None = lines are not cleaned.
      duplicates: "lines" that occur on several pages are kept on one, as TFDS does; or "spans" of three sentences, as the paper
        says. None = duplicates are kept.
      text_rules: page rules for clean texts.
      decontamination: removal of pages that hold questions of evaluation sets. None = they are kept.
      near_duplicates: removal of pages that are nearly equal. None = they are kept.
      without: names of rules that are switched off, such as ("javascript",).
      by_language: whether each language is a split of its own, as in mC4.
      format: "tfds" (TensorFlow Datasets), "jsonl" (compressed), "parquet" or "tfrecord".
      shard_bytes: approximate bytes of text in an output file.
      bucket_bytes: approximate bytes of text that a worker holds at a time.
    """

    name: str = "en"
    html_text: Callable[[bytes, str], str] = main_text
    text_key: str = "text"
    url_key: str = "url"
    timestamp_key: str = "timestamp"
    max_record_bytes: int = 1 << 25
    read_rules: tuple = (long_text,)
    newest_per_url: bool = True
    page_rules: tuple = ()
    lines: LineCleaning | None = LineCleaning()
    duplicates: str | None = "lines"
    text_rules: tuple = (language, bad_words)
    decontamination: Decontamination | None = None
    near_duplicates: MinHash | None = None
    without: tuple = ()
    by_language: bool = False
    format: str = "tfds"
    shard_bytes: int = 1 << 28
    bucket_bytes: int = 1 << 26

    def __post_init__(self):
        check_types(self)
        check_positive(self, "max_record_bytes", "shard_bytes", "bucket_bytes")
        check_choice("Corpus.format", self.format, FORMATS)
        if self.format == "tfds":
            check_choice("Corpus.name (of a configuration of TensorFlow Datasets' c4)", self.name, TFDS_NAMES)
        if self.duplicates is not None:
            check_choice("Corpus.duplicates", self.duplicates, DUPLICATES)
        names = [rule_name(rule) for rule in self._all_rules()]
        for name in self.without:
            if name not in names:
                hint = _OTHER_SETTINGS.get(name) or did_you_mean(name, names)
                raise UserError(f'Corpus.without has "{name}", which is no rule here.{hint}')
        for field in ("read_rules", "page_rules", "text_rules"):
            object.__setattr__(self, field, tuple(rule for rule in getattr(self, field) if rule_name(rule) not in self.without))
        if self.lines is not None:
            rules = tuple(rule for rule in self.lines.rules if rule_name(rule) not in self.without)
            object.__setattr__(self, "lines", dataclasses.replace(self.lines, rules=rules))

    def _all_rules(self) -> list[Callable[..., Any]]:
        lines = self.lines.rules if self.lines is not None else ()
        rules = [*self.read_rules, *self.page_rules, *lines, *self.text_rules]
        not_callable = next((rule for rule in rules if not callable(rule)), None)
        if not_callable is not None:
            raise UserError(f"A rule of Corpus is {not_callable!r}. Rules are functions, bound without parentheses: @name.")
        return rules

    @property
    def min_sentences(self) -> int:
        """Number of sentences that a page must have after the removal of duplicates; 0 if lines are not cleaned."""
        return self.lines.min_sentences if self.lines is not None else 0

    @property
    def sentences(self) -> Callable[[str], Iterable[str]]:
        """f(text) -> sentences."""
        return self.lines.sentences if self.lines is not None else punkt_sentences
