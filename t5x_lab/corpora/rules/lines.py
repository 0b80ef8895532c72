"""C4's rules for lines (Raffel et al., 2020, section 2.2), as TFDS's `c4_utils.clean_page` has them, each a function."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page, num_bytes
from t5x_lab.corpora.rules.rule import Dropped, LineRule, rule_name
from t5x_lab.corpora.rules.sentences import count_sentences, punkt_sentences

END_MARKS = (".", "?", "!", '"')
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")


def long_words(line: str, maximum: int = 1000) -> str | None:
    """Drops lines with a very long word.

    Args:
      line: the line.
      maximum: number of characters that a word may have.
    """
    return None if len(line) > maximum and any(len(word) > maximum for word in line.split()) else line


def citations(line: str) -> str:
    """Removes Wikipedia's citation marks: [1], [], [edit] and [citation needed].

    Args:
      line: the line.
    """
    return _CITATION.sub("", line) if "[" in line else line


def end_mark(line: str, marks: Sequence[str] = END_MARKS, ellipsis: str = "...") -> str | None:
    """Drops lines that do not end like a sentence.

    Args:
      line: the line.
      marks: ends of a sentence.
      ellipsis: an end that is none. "" = it is one.
    """
    return line if line.endswith(tuple(marks)) and not (ellipsis and line.endswith(ellipsis)) else None


def few_words(line: str, minimum: int = 5) -> str | None:
    """Drops short lines.

    Args:
      line: the line.
      minimum: number of words that a line must have.
    """
    return line if len(line.split(maxsplit=minimum)) >= minimum else None


def lorem_ipsum(line: str) -> str | Dropped:
    """Drops pages with the filler text "lorem ipsum".

    Args:
      line: a line of the page.
    """
    return Dropped() if "lorem ipsum" in line.lower() else line


def javascript(line: str) -> str | None:
    """Drops lines that mention JavaScript, most of which ask to enable it.

    Args:
      line: the line.
    """
    return None if "javascript" in line.lower() else line


def curly_bracket(line: str) -> str | Dropped:
    """Drops pages with an opening curly bracket, which are code.

    Args:
      line: a line of the page.
    """
    return Dropped() if "{" in line else line


def policy(line: str, phrases: Sequence[str] = POLICIES) -> str | None:
    """Drops lines with a phrase of policies for cookies, privacy and use.

    Args:
      line: the line.
      phrases: the phrases in lower case.
    """
    lower = line.lower()
    return None if any(phrase in lower for phrase in phrases) else line


C4_LINES = (long_words, citations, end_mark, few_words, lorem_ipsum, javascript, curly_bracket, policy)


@dataclasses.dataclass(frozen=True)
class LineCleaning:
    """Applies line rules to pages, and drops those with too few sentences.

    Attributes:
      rules: line rules, in their order. A page that one of them drops is dropped at that line.
      min_sentences: number of sentences of the remaining lines below which a page is dropped.
      sentences: f(text) -> sentences.
    """

    rules: Sequence[LineRule] = C4_LINES
    min_sentences: int = 3
    sentences: Callable[[str], Iterable[str]] = punkt_sentences

    def clean(self, page: Page, counts: collections.Counter[str], on_drop: Callable[[str, Page], None]) -> Page | None:
        """Returns the page with the remaining lines; None if it is dropped. See `PageRules`.

        Raises:
          UserError: if a rule returns something else than a line, None or `Dropped`.
        """
        lines, dropped, num_sentences = [], collections.Counter[LineRule](), 0
        sizes = collections.Counter[LineRule]()
        for raw in page.text.splitlines(keepends=True):
            line = raw.strip()
            for rule in self.rules:
                try:
                    outcome = rule(line)
                except Exception as error:
                    error.rule = rule_name(rule)  # type: ignore[attr-defined]
                    raise
                if outcome is None:
                    dropped[rule] += 1
                    sizes[rule] += num_bytes(raw)
                    break
                if isinstance(outcome, Dropped):
                    return self._drop(rule_name(rule), page, num_bytes(page.text), counts, on_drop)
                if not isinstance(outcome, str):
                    raise UserError(
                        f"The rule {rule_name(rule)} has returned {outcome!r:.80}. It must return the line, or None to drop it."
                    )
                line = outcome
            else:
                if num_sentences < self.min_sentences:
                    num_sentences += count_sentences(line, self.min_sentences - num_sentences, self.sentences)
                lines.append(line)
        for rule, number in dropped.items():
            counts[f"lines dropped: {rule_name(rule)}"] += number
            counts[f"bytes dropped: {rule_name(rule)}"] += sizes[rule]
        if num_sentences < self.min_sentences:
            return self._drop("few_sentences", page, sum(map(num_bytes, lines)), counts, on_drop)
        text = "\n".join(lines).strip()
        if not text:
            return self._drop("no_text", page, 0, counts, on_drop)
        return dataclasses.replace(page, text=text)

    @staticmethod
    def _drop(name: str, page: Page, size: int, counts: collections.Counter[str], on_drop: Callable[[str, Page], None]) -> None:
        counts[f"pages dropped: {name}"] += 1
        counts[f"bytes dropped: {name}"] += size
        on_drop(name, page)
