"""Functions and classes that gin may bind in a recipe for a corpus, and rules with their bindings as arguments."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import gin

from t5x_lab.corpora.config import Corpus
from t5x_lab.corpora.decontamination import Decontamination
from t5x_lab.corpora.duplicates.min_hash import MinHash
from t5x_lab.corpora.reading.html import main_text, trafilatura_text, whole_text
from t5x_lab.corpora.rules.classifier import quality_score
from t5x_lab.corpora.rules.fineweb import fineweb_quality
from t5x_lab.corpora.rules.gopher import gopher_quality, gopher_repetition
from t5x_lab.corpora.rules.language import cld3, langdetect, language
from t5x_lab.corpora.rules.lines import C4_LINES, LineCleaning
from t5x_lab.corpora.rules.pages import bad_words, domains, listed_urls, long_text, paragraphs
from t5x_lab.corpora.rules.personal_data import personal_data
from t5x_lab.corpora.rules.sentences import punkt_sentences

CONFIGURABLES = (
    Corpus,
    LineCleaning,
    Decontamination,
    MinHash,
    main_text,
    whole_text,
    trafilatura_text,
    long_text,
    listed_urls,
    domains,
    paragraphs,
    *C4_LINES,
    punkt_sentences,
    language,
    langdetect,
    cld3,
    bad_words,
    gopher_quality,
    gopher_repetition,
    fineweb_quality,
    personal_data,
    quality_score,
)
for _configurable in CONFIGURABLES:
    gin.external_configurable(_configurable, module="t5x_lab")


def bind_rules(corpus: Corpus) -> Corpus:
    """Returns the recipe with functions that have their gin bindings as arguments. Gin would look these up at every call."""
    lines = corpus.lines
    if lines is not None:
        rules = tuple(map(_bind, lines.rules))
        lines = dataclasses.replace(lines, rules=rules, sentences=_bind(lines.sentences))
    return dataclasses.replace(
        corpus,
        html_text=_bind(corpus.html_text),
        read_rules=tuple(map(_bind, corpus.read_rules)),
        page_rules=tuple(map(_bind, corpus.page_rules)),
        lines=lines,
        text_rules=tuple(map(_bind, corpus.text_rules)),
        without=(),
    )


def _bind(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        bindings = gin.get_bindings(function)
    except ValueError:  # a function with a scope, such as @long/paragraphs, or one that gin does not know
        return function
    original = getattr(function, "__wrapped__", function)  # gin's wrapper; a decorator of the user's own stays
    bound = {name: _bind(value) if callable(value) else value for name, value in bindings.items()}
    return functools.partial(original, **bound) if bound else original
