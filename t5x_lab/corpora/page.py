"""A page of a crawl, and what is derived from its URL: the key for duplicates and the split."""

import dataclasses
import hashlib
import re

VALIDATION_MODULUS = 1000  # one page in a thousand is for validation


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Text of a web page.

    Attributes:
      url: its address as the crawl has it.
      text: lines of text, separated by newline characters.
      timestamp: time of the crawl in UTC, such as "2019-04-18T10:22:31Z"; "" if unknown.
      content_type, content_length: as the record of the crawl has them.
      language: code of the language, set by a language rule; "" before.
      position: order of the page in the input: file and record.
    """

    url: str
    text: str
    timestamp: str = ""
    content_type: str = ""
    content_length: str = ""
    language: str = ""
    position: tuple[int, int] = (0, 0)

    @property
    def key(self) -> bytes:
        """MD5 of the normalized URL, 16 bytes. Pages with the same key are versions of one page."""
        return md5(normalize_url(self.url))


def num_bytes(text: str) -> int:
    """Returns the length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def md5(text: str) -> bytes:
    """Returns the MD5 of a text, 16 bytes."""
    return hashlib.md5(text.encode("utf-8", "surrogatepass")).digest()


_SCHEME = re.compile(r"https?:\/\/(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")


def normalize_url(url: str) -> str:
    """Returns a URL without scheme, "www.", tracking parameters and trailing slashes, as `c4_utils.normalize_url` of TFDS."""
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")


def split_name(key: bytes) -> str:
    """Returns the split of the page with this key: "validation" for one in a thousand, else "train".

    It depends on the URL alone, so that no later crawl moves a page to the other split. It is the split of TFDS's `c4`.
    """
    return "validation" if int.from_bytes(key, "big") % VALIDATION_MODULUS == 0 else "train"
