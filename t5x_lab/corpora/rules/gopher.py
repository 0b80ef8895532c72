"""MassiveText's quality and repetition rules (Rae et al., 2021, "Scaling Language Models: Methods, Analysis & Insights from
Training Gopher", appendix A.1.1)."""

import collections
import re
from collections.abc import Mapping, Sequence

from t5x_lab.corpora.page import Page
from t5x_lab.corpora.rules.rule import Dropped

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–", "-", "*", "●", "‧", "·")
_ELLIPSES = ("...", "…")
_LETTER = re.compile(r"[^\W\d_]")


def gopher_quality(
    page: Page,
    min_words: int = 50,
    max_words: int = 100_000,
    min_word_length: float = 3.0,
    max_word_length: float = 10.0,
    max_symbols_per_word: float = 0.1,
    max_bullet_lines: float = 0.9,
    max_ellipsis_lines: float = 0.3,
    min_words_with_letter: float = 0.8,
    stop_words: Sequence[str] = STOP_WORDS,
    min_stop_words: int = 2,
) -> Page | Dropped:
    """Drops pages that do not look like prose.

    Args:
      page: the page.
      min_words, max_words: number of words that a page must have, and may have.
      min_word_length, max_word_length: bounds of the mean number of characters of a word.
      max_symbols_per_word: number of hash signs, and of ellipses, per word.
      max_bullet_lines, max_ellipsis_lines: share of lines that start with a bullet, and that end with an ellipsis.
      min_words_with_letter: share of words with at least one letter.
      stop_words, min_stop_words: English words, and how many different ones of them the page must have.
    """
    tokens, lines = page.text.split(), page.text.splitlines()
    if not min_words <= len(tokens) <= max_words:
        return Dropped("words")
    if not min_word_length <= sum(map(len, tokens)) / len(tokens) <= max_word_length:
        return Dropped("word length")
    if page.text.count("#") > max_symbols_per_word * len(tokens):
        return Dropped("hash signs")
    if sum(page.text.count(mark) for mark in _ELLIPSES) > max_symbols_per_word * len(tokens):
        return Dropped("ellipses")
    if sum(line.lstrip().startswith(_BULLETS) for line in lines) > max_bullet_lines * len(lines):
        return Dropped("bullets")
    if sum(line.rstrip().endswith(_ELLIPSES) for line in lines) > max_ellipsis_lines * len(lines):
        return Dropped("lines with ellipsis")
    if sum(_LETTER.search(word) is not None for word in tokens) < min_words_with_letter * len(tokens):
        return Dropped("letters")
    if len({word.lower().strip(".,;:!?\"'()") for word in tokens} & set(stop_words)) < min_stop_words:
        return Dropped("stop words")
    return page


# Shares of characters (Rae et al., 2021, Table A1).
TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def gopher_repetition(
    page: Page,
    max_lines: float = 0.30,
    max_paragraphs: float = 0.30,
    max_line_characters: float = 0.20,
    max_paragraph_characters: float = 0.20,
    top_ngrams: Mapping[int, float] | None = None,
    repeated_ngrams: Mapping[int, float] | None = None,
) -> Page | Dropped:
    """Drops pages that repeat themselves.

    Args:
      page: the page.
      max_lines, max_paragraphs: share of lines, and of paragraphs, that are repetitions of an earlier one.
      max_line_characters, max_paragraph_characters: share of characters in these.
      top_ngrams: maximum share of characters in the most frequent n-gram of words, by n. None = the paper's.
      repeated_ngrams: maximum share of characters in n-grams of words that occur more than once, by n. Characters of several
        such n-grams count once. None = the paper's.
    """
    units = {
        "lines": ([line for line in page.text.splitlines() if line.strip()], max_lines, max_line_characters),
        "paragraphs": (
            [part for part in re.split(r"\n{2,}", page.text) if part.strip()],
            max_paragraphs,
            max_paragraph_characters,
        ),
    }
    for name, (parts, max_share, max_characters) in units.items():
        repeated = repetitions(parts)
        if len(repeated) > max_share * len(parts):
            return Dropped(f"repeated {name}")
        if sum(map(len, repeated)) > max_characters * len(page.text):
            return Dropped(f"characters of repeated {name}")
    tokens = page.text.split()
    characters = sum(map(len, tokens))
    for size, maximum in (TOP_NGRAMS if top_ngrams is None else top_ngrams).items():
        if _top_ngram_characters(tokens, size) > maximum * characters:
            return Dropped(f"top {size}-gram")
    for size, maximum in (REPEATED_NGRAMS if repeated_ngrams is None else repeated_ngrams).items():
        if _repeated_ngram_characters(tokens, size) > maximum * characters:
            return Dropped(f"repeated {size}-grams")
    return page


def repetitions(parts: Sequence[str]) -> list[str]:
    """Returns the parts that are equal to an earlier one."""
    earlier: set[str] = set()
    return [part for part in parts if part in earlier or earlier.add(part)]  # type: ignore[func-returns-value]


def _ngrams(tokens: Sequence[str], size: int):
    return zip(*(tokens[start:] for start in range(size)))


def _top_ngram_characters(tokens: Sequence[str], size: int) -> int:
    """Returns the number of characters in the most frequent n-gram; 0 if none occurs twice."""
    counts = collections.Counter(_ngrams(tokens, size))
    return max((sum(map(len, gram)) * count for gram, count in counts.items() if count > 1), default=0)


def _repeated_ngram_characters(tokens: Sequence[str], size: int) -> int:
    """Returns the number of characters of words in n-grams that occur more than once."""
    grams = list(_ngrams(tokens, size))
    counts = collections.Counter(grams)
    total, end = 0, 0
    for start, gram in enumerate(grams):
        if counts[gram] > 1:
            total += sum(map(len, tokens[max(start, end) : start + size]))
            end = start + size
    return total
