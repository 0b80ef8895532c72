"""Counting of English sentences with Punkt (Kiss and Strunk, 2006), without a download.

TFDS's `c4` downloads NLTK's English model. Here NLTK's algorithm has a list of abbreviations instead. Only pages whose number
of sentences is near the minimum can be judged differently.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable

# English, in lower case, without their last full stop.
ABBREVIATIONS = frozenset(pathlib.Path(__file__).with_name("abbreviations.txt").read_text().split())


def punkt_sentences(text: str, abbreviations: Iterable[str] = ABBREVIATIONS) -> Iterable[str]:
    """Yields the sentences of a text.

    Args:
      text: the text.
      abbreviations: words that are no end of a sentence, in lower case, without their last full stop.
    """
    return (text[start:end] for start, end in _tokenizer(frozenset(abbreviations)).span_tokenize(text))


@functools.cache
def _tokenizer(abbreviations: frozenset[str]):
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(abbreviations)
    return PunktSentenceTokenizer(parameters)


def count_sentences(text: str, limit: int, sentences: Callable[[str], Iterable[str]] = punkt_sentences) -> int:
    """Returns the number of sentences of a text, at most `limit`: no more of the text is read than needed."""
    return sum(1 for _ in itertools.islice(sentences(text), limit))
