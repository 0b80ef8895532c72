"""The language of pages: C4's English by langdetect, and mC4's hundred languages by CLD3."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.rules.rule import Dropped

UNKNOWN = "und"
Detector = Callable[[str], tuple[str, float] | None]


def langdetect(text: str) -> tuple[str, float] | None:
    """Returns (language, probability) as the package langdetect does with seed 0; None if the text has no letters.

    C4 is made with it. The result is the package's own to the last bit. See `fast_langdetect.detect`.

    Args:
      text: the text.
    """
    from t5x_lab.corpora.rules.fast_langdetect import detect

    best = detect(text)
    return best[0] if best else None


def cld3(text: str) -> tuple[str, float] | None:
    """Returns (language, probability) of CLD3, as TFDS's mC4 has it; None if CLD3 says that its answer is not reliable.

    Args:
      text: the text. CLD3 looks at its first ten kilobytes, if it has at least a hundred bytes.
    """
    result = _cld3_identifier().FindLanguage(text)
    return (result.language, result.probability) if result.is_reliable else None


@functools.cache
def _cld3_identifier():
    if "tensorflow" in sys.modules:  # both have protocol buffers of their own
        raise UserError(
            "CLD3 crashes in a process that has loaded TensorFlow. With Decontamination, set texts instead of data_sets."
        )
    try:
        import gcld3
    except ImportError as error:
        raise UserError(f"CLD3 is not installed ({error}). Run: pip install cld3-py") from error
    return gcld3.NNetLanguageIdentifier(min_num_bytes=100, max_num_bytes=10_000)


def language(
    page: Page,
    languages: str | Sequence[str] = ("en",),
    minimum: float = 0.99,
    detect: Detector = langdetect,
    keep_unknown: bool = False,
) -> Page | Dropped:
    """Keeps pages in one of the languages.

    Args:
      page: the page.
      languages: codes of the languages; () = all.
      minimum: probability below which the language is unknown.
      detect: f(text) -> (language, probability), or None.
      keep_unknown: whether pages of unknown language are kept, as "und".
    """
    best = detect(page.text)
    if best is None or best[1] < minimum:
        if keep_unknown:
            return dataclasses.replace(page, language=UNKNOWN)
        return Dropped("no language" if best is None else "low probability")
    if languages and best[0] not in ((languages,) if isinstance(languages, str) else languages):
        return Dropped(best[0])
    return dataclasses.replace(page, language=best[0])
