"""Rules for pages of C4, mC4 and their variants, as TFDS's `c4_utils` has them, each a function."""

import dataclasses
import functools
import heapq
import json
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.files import open_input, read_text_lines
from t5x_lab.corpora.page import Page, normalize_url
from t5x_lab.corpora.rules.rule import Dropped

# Languages whose words are not separated: bad words are looked for anywhere.
_WITHOUT_SPACES = ("ja", "th", "zh")
# Common parts of harmless words in languages without spaces, which TFDS allows.
_ALLOWED = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}


def long_text(page: Page, maximum: int = 190_000) -> Page | None:
    """Drops very long pages (TFDS's `is_valid_length`).

    Args:
      page: the page.
      maximum: number of characters that a page may have.
    """
    return page if len(page.text) <= maximum else None


def paragraphs(page: Page, minimum: int = 3, min_length: int = 200) -> Page | None:
    """Drops pages with few long lines (mC4: Xue et al., 2021, section 3).

    Args:
      page: the page.
      minimum: number of long lines that a page must have.
      min_length: number of characters of a long line.
    """
    lengths = heapq.nlargest(minimum, map(len, page.text.split("\n")))
    return page if len(lengths) == minimum and lengths[-1] >= min_length else None


def bad_words(page: Page, files: Mapping[str, str] | None = None, share: float = 1.0) -> Page | None:
    """Drops pages with a bad word of their language.

    C4 has the List of Dirty, Naughty, Obscene or Otherwise Bad Words, https://github.com/LDNOOBW. Its commit 25e679f has the
    English list of C4, 5faf2ba those of mC4.

    Args:
      page: the page, with its language.
      files: files with a word or phrase per line, by language, such as {"en": "badwords_en.txt"}, "" for pages without one.
        None = keep all pages.
      share: share of the pages with bad words that are dropped, chosen by their URL. mC4: 0.999.

    Raises:
      UserError: for a page without a language, if there is no list for it.
    """
    if files and not isinstance(files, Mapping):
        raise UserError(f"bad_words.files is {files!r}. Set a file for each language, such as {{'en': 'badwords_en.txt'}}.")
    if files and not page.language and "" not in files:
        raise UserError(
            "bad_words needs the language of a page, which the rule language sets. Put @language before @bad_words in "
            "Corpus.text_rules."
        )
    listed = _bad_phrases(tuple((files or {}).items())).get(page.language.partition("-")[0])
    if listed is None or not listed.occur_in(page.text.lower()):
        return page
    numerator, denominator = share.as_integer_ratio()
    return page if int.from_bytes(page.key, "big") % denominator >= numerator else None


@dataclasses.dataclass(frozen=True)
class _Phrases:
    """Bad words of a language.

    Attributes:
      single: those of letters, digits and underscores alone, which are looked up.
      pattern: all others.
    """

    single: frozenset[str]
    pattern: re.Pattern[str] | None

    def occur_in(self, text: str) -> bool:
        """Returns whether a text in lower case has one of them."""
        if not self.single.isdisjoint(_NOT_WORD.split(text)):
            return True
        return self.pattern is not None and self.pattern.search(text) is not None


_NOT_WORD = re.compile(r"\W+")


@functools.cache
def _bad_phrases(files: tuple[tuple[str, str], ...]) -> dict[str, _Phrases]:
    phrases: dict[str, set[str]] = {}
    for name, path in files:
        phrases.setdefault(name.partition("-")[0], set()).update(filter(None, read_text_lines(path)))
    return {code: _compile_phrases(listed - _ALLOWED.get(code, set()), code) for code, listed in phrases.items()}


def _compile_phrases(phrases: set[str], code: str) -> _Phrases:
    has_spaces = code not in _WITHOUT_SPACES
    single = frozenset(phrase for phrase in phrases if has_spaces and re.fullmatch(r"\w+", phrase))
    either = "|".join(re.escape(phrase) for phrase in sorted(phrases - single))
    if not either:
        return _Phrases(single, None)
    return _Phrases(single, re.compile(rf"(?:\W|^)({either})(?:\W|$)" if has_spaces else either))


def domains(page: Page, file: str = "") -> Page | Dropped:
    """Keeps pages of listed domains. With the list of RealNews (Zellers et al., 2019) the corpus is C4's RealNews-like variant.

    Args:
      page: the page.
      file: JSON file {domain: true, or the list of its subdomains}, such as Grover's domain_to_allowed_subdomains.json; or a
        text file with a domain or URL per line. One with a subdomain is for that subdomain alone.
    """
    parts = _domain_splitter()(normalize_url(page.url).lower())
    allowed = _allowed_domains(file).get(f"{parts.domain}.{parts.suffix}")
    if allowed is None:
        return Dropped("domain")
    return Dropped("subdomain") if isinstance(allowed, list) and parts.subdomain not in allowed else page


@functools.cache
def _allowed_domains(file: str) -> dict[str, object]:
    if not file:
        raise UserError("The rule domains needs a list. Set --gin.domains.file=FILE.")
    if not file.endswith(".json"):
        return _parse_domains(read_text_lines(file))
    with open_input(file) as stream:
        return json.loads(stream.read())


def _parse_domains(lines: Iterable[str]) -> dict[str, object]:
    """Returns the allowed domains in lines such as "example.com" (with all subdomains) or "https://news.example.com/"."""
    allowed: dict[str, object] = {}
    for line in filter(None, lines):
        parts = _domain_splitter()(normalize_url(line.lower()))
        name = f"{parts.domain}.{parts.suffix}"
        if parts.subdomain in ("", "www"):
            allowed[name] = True
        elif isinstance(listed := allowed.setdefault(name, []), list):
            listed.append(parts.subdomain)
    return allowed


@functools.cache
def _domain_splitter():
    try:
        import tldextract
    except ImportError as error:
        raise UserError(f"The rule domains needs tldextract ({error}). Run: pip install 't5x_lab[corpus]'") from error
    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)  # the list that comes with the package, no download


def listed_urls(page: Page, files: str | Sequence[str] = ()) -> Page | None:
    """Keeps pages whose URL is listed. With OpenWebText's list the corpus is C4's WebText-like variant.

    Args:
      page: the page.
      files: files with a URL per line. Patterns are allowed. URLs are normalized.
    """
    keys = _listed_keys((files,) if isinstance(files, str) else tuple(files))
    key = np.frombuffer(page.key, keys.dtype)[0]
    index = np.searchsorted(keys, key)
    return page if index < len(keys) and keys[index] == key else None


@functools.cache
def _listed_keys(files: tuple[str, ...]) -> np.ndarray:
    """Returns the sorted keys of the URLs: 16 bytes each, so that tens of millions fit a worker."""
    if not files:
        raise UserError("The rule listed_urls needs a list. Set --gin.listed_urls.files=(FILE,).")
    keys = b"".join(Page(url.strip(), "").key for file in files for url in read_text_lines(file) if url.strip())
    return np.unique(np.frombuffer(keys, "S16"))
