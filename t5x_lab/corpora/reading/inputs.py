"""Pages of any input file: archives, HTML, JSON lines and text, compressed or not."""

import collections
import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from t5x_lab.config.json_files import parse_json
from t5x_lab.corpora.page import Page
from t5x_lab.corpora.reading.archives import decode_text, extract, join_lines, read_archive
from t5x_lab.corpora.reading.decompression import Damage, decompress, find_compression

COMPRESSED = (".gz", ".zst", ".zstd")
_KINDS = {
    **dict.fromkeys(("warc", "wet", "wat", "arc"), "archive"),
    **dict.fromkeys(("html", "htm", "xhtml"), "html"),
    **dict.fromkeys(("jsonl", "json", "ndjson"), "json"),
    **dict.fromkeys(("txt", "text"), "text"),
}

_DIGITS = re.compile(r"((?:19|20)\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)")
_MILLISECONDS = 1e11  # a larger time is not one in seconds


def file_kind(path: str) -> str | None:
    """Returns how a file is read, by the ending of its name: "archive", "html", "json" or "text". None if it is no input."""
    name = path.rpartition("/")[2].lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return _KINDS.get(name.rpartition(".")[2]) if "." in name else None


def read_pages(
    file: BinaryIO,
    path: str,
    html_text: Callable[[bytes, str], str],
    keys: dict[str, str],
    counts: collections.Counter[str],
    max_bytes: int,
) -> Iterator[Page]:
    """Yields the pages of a file. What cannot be read is counted, and reading goes on after it.

    Args:
      file: the file, at its start.
      path: its path, for its kind. It is the URL of pages that have none.
      html_text: f(HTML, character encoding or "") -> text.
      keys: names of "text", "url" and "timestamp" in JSON objects. Names of nested objects are joined by dots.
      counts: receives the number of records without a page, by reason, and of damaged ones, by kind.
      max_bytes: length of a record, line or page above which it is left out.
    """
    kind = file_kind(path)
    path = path if "://" in path else os.path.abspath(path)
    start = file.read(4)
    file.seek(0)
    compression = find_compression(start)
    if kind == "archive":
        yield from read_archive(file, compression, html_text, counts, max_bytes)
    elif kind == "json":
        yield from _read_json(file, compression, path, keys, counts, max_bytes)
    else:
        content = _read_whole(file, compression, counts, max_bytes)
        if content is not None:
            text = join_lines(extract(html_text, content, "", counts)) if kind == "html" else decode_text(content, "", counts)
            if text:
                yield Page(path, text, content_type="text/html" if kind == "html" else "text/plain")
            else:
                counts["dropped_no_text"] += 1


def _read_whole(file: BinaryIO, compression: str, counts: collections.Counter[str], max_bytes: int) -> bytes | None:
    content = bytearray()
    for chunk in decompress(file, compression):
        if isinstance(chunk, Damage):
            counts[f"damaged_{chunk.kind}"] += 1
        else:
            content += chunk
            if len(content) > max_bytes:
                counts["dropped_too_long_record"] += 1
                return None
    return bytes(content)


def _read_json(
    file: BinaryIO,
    compression: str,
    path: str,
    keys: dict[str, str],
    counts: collections.Counter[str],
    max_bytes: int,
) -> Iterator[Page]:
    for number, line in enumerate(_read_lines(file, compression, counts, max_bytes)):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            counts["damaged_json_lines"] += 1
            continue
        text, url, timestamp = (_lookup(record, keys[name]) for name in ("text", "url", "timestamp"))
        if not isinstance(text, str):
            counts["dropped_no_text_key"] += 1
        elif not text:
            counts["dropped_no_text"] += 1
        else:
            counts["pages without URL"] += not url
            yield Page(url if isinstance(url, str) and url else f"{path}#{number}", text, _to_timestamp(timestamp))


def _to_timestamp(value: Any) -> str:
    """Returns a time as text. Numbers are seconds or milliseconds since 1970, or have 14 digits, as in indices of crawls."""
    if match := _DIGITS.fullmatch(str(value)):
        return "{}-{}-{}T{}:{}:{}Z".format(*match.groups())
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if abs(value) > _MILLISECONDS else value
        with contextlib.suppress(OverflowError, ValueError, OSError):
            return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return value if isinstance(value, str) else ""


def _lookup(record: dict[str, Any], name: str) -> Any:
    value: Any = record
    for key in [name] if name in record else name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read_lines(file: BinaryIO, compression: str, counts: collections.Counter[str], max_bytes: int) -> Iterator[bytes]:
    """Yields the lines of a file. Those that are too long, and those that damage cuts, are counted."""
    line, is_too_long = bytearray(), False

    def end_line() -> bytes | None:
        nonlocal is_too_long
        content, was_too_long = bytes(line), is_too_long
        line.clear()
        is_too_long = False
        if was_too_long:
            counts["dropped_too_long_record"] += 1
        return None if was_too_long else content

    for chunk in decompress(file, compression):
        if isinstance(chunk, Damage):
            counts[f"damaged_{chunk.kind}"] += 1
            line.clear()
            is_too_long = False
            continue
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line += part
            is_too_long = is_too_long or len(line) > max_bytes
            content = end_line()
            if content is not None:
                yield content
        line += rest
        if len(line) > max_bytes:
            line.clear()
            is_too_long = True
    if line or is_too_long:
        content = end_line()
        if content is not None:
            yield content
