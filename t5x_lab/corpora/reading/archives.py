"""Pages of WARC, WET and ARC files."""

import collections
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.reading.http import parse_response
from t5x_lab.corpora.reading.records import Record, read_records

HTML_TYPES = ("text/html", "application/xhtml+xml")
_METADATA_PREFIXES = ("WARC", "CONTENT-", "Content-")
# The end of a line before or after which are spaces or a field. It begins with one fixed character, so that a search takes a
# fourth of the time of splitting and stripping lines.
_LINE_TO_CHANGE = re.compile(rf"\n(?:(?<=\s\n)|(?=\s|{'|'.join(_METADATA_PREFIXES)}))")
_PROBE_BYTES, _MAX_CONTROL = 4096, 0.05
_CONTROL = bytes({*range(32), 127} - {9, 10, 12, 13, 27})  # which text has in UTF-16 and UTF-32 alone
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
_MAX_UNREADABLE = 0.1  # of a text's characters, above which it is binary data
# Control characters other than tab, line feed, form feed and carriage return, and what undecodable bytes become.
_UNREADABLE = dict.fromkeys([*(set(range(32)) - {9, 10, 12, 13}), 0xFFFD])


def read_archive(
    file: BinaryIO,
    compression: str,
    html_text: Callable[[bytes, str], str],
    counts: collections.Counter[str],
    max_bytes: int,
) -> Iterator[Page]:
    """Yields the pages of an archive: WET files' texts, and the text of the HTML of responses.

    Args:
      file: the file.
      compression: "gzip", "zstd" or "".
      html_text: f(HTML, character encoding or "") -> text.
      counts: receives the number of records that have no page, by reason, and of damaged ones, by kind.
      max_bytes: length of records above which they are left out.
    """
    for record in read_records(file, compression, counts, max_bytes):
        page = _read_page(record, html_text, counts, max_bytes)
        if page is not None:
            yield page


def _read_page(
    record: Record, html_text: Callable[[bytes, str], str], counts: collections.Counter[str], max_bytes: int
) -> Page | None:
    raw, content_type, charset = record.content, record.fields.get("content-type", ""), ""
    media_type = content_type.partition(";")[0].strip().lower()
    if record.type == "response":
        response = parse_response(raw, counts, max_bytes)
        if response is None:
            counts["dropped_no_http"] += 1
            return None
        if response.status != 200:
            counts["dropped_http_status"] += 1
            return None
        raw, media_type, charset = response.body, response.content_type, response.charset
        content_type = media_type
    elif record.type not in ("conversion", "resource"):
        counts[f"skipped_{record.type if record.type in _OTHER_TYPES else 'other'}_record"] += 1
        return None
    if not record.url:
        counts["dropped_no_url"] += 1
        return None
    if media_type not in HTML_TYPES and media_type != "text/plain":
        counts["dropped_content_type"] += 1
        return None
    text = extract(html_text, raw, charset, counts) if media_type in HTML_TYPES else decode_text(raw, charset, counts)
    text = join_lines(text)
    if not text:
        counts["dropped_no_text"] += 1
        return None
    if not record.date:
        counts["dropped_no_timestamp"] += 1
        return None
    return Page(record.url, text, record.date, content_type, record.fields.get("content-length", ""))


_OTHER_TYPES = ("warcinfo", "filedesc", "request", "metadata", "revisit", "continuation")


def extract(html_text: Callable[[bytes, str], str], raw: bytes, charset: str, counts: collections.Counter[str]) -> str:
    """Returns the text of HTML; "" for binary data, and if the extractor fails."""
    start = raw[:_PROBE_BYTES]
    may_be_wide = start.startswith(_WIDE) or "16" in charset or "32" in charset
    if not may_be_wide and len(start.translate(None, _CONTROL)) < (1 - _MAX_CONTROL) * len(start):
        counts["dropped_binary"] += 1
        return ""
    try:
        return html_text(raw, charset)
    except UserError:
        raise
    except Exception as error:  # of any extractor, on any page of the web
        counts[f"damaged_html ({type(error).__name__})"] += 1
        return ""


def decode_text(raw: bytes, charset: str, counts: collections.Counter[str]) -> str:
    """Returns the text in bytes; "" for binary data. Bytes that cannot be decoded become U+FFFD."""
    try:
        return raw.decode(charset or "utf-8").removeprefix("\ufeff")
    except (UnicodeError, LookupError):
        text = raw.decode("utf-8", "replace")
    if len(text) - len(text.translate(_UNREADABLE)) > _MAX_UNREADABLE * len(text):
        counts["dropped_binary"] += 1
        return ""
    counts["damaged_characters"] += 1
    return text


def join_lines(text: str) -> str:
    """Returns the lines of a text that are not blank and not an archive's fields, stripped, as TFDS's `split_wet_file`."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.strip()
    if not text.startswith(_METADATA_PREFIXES) and not _LINE_TO_CHANGE.search(text):  # as most texts of WET files
        return text
    lines = filter(None, map(str.strip, text.split("\n")))
    return "\n".join(line for line in lines if not line.startswith(_METADATA_PREFIXES))
