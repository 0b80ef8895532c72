"""Pages of any input file: archives, HTML, JSON lines and text, compressed or not."""

import collections
import os
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
    for number, record in _read_objects(file, compression, counts, max_bytes):
        text, url, timestamp = (_lookup(record, keys[name]) for name in ("text", "url", "timestamp"))
        if not isinstance(text, str):
            counts["dropped_no_text_key"] += 1
        elif not text:
            counts["dropped_no_text"] += 1
        else:
            counts["pages without URL"] += not url
            time = "" if timestamp is None or isinstance(timestamp, dict | list) else str(timestamp)
            yield Page(url if isinstance(url, str) and url else f"{path}#{number}", text, time)


def _read_objects(
    file: BinaryIO, compression: str, counts: collections.Counter[str], max_bytes: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number, object) of a file that has one on each line, or an array of them, or a single one, on several lines."""
    document = _parse_document(file, compression, max_bytes)
    if document is not None:
        yield from enumerate(document)
        return
    for number, line in enumerate(_read_lines(file, compression, counts, max_bytes)):
        records = _parse_objects(line) if line.strip() else []
        if records is None:
            counts["damaged_json_lines"] += 1
        for record in records or ():
            yield number, record


def _parse_document(file: BinaryIO, compression: str, max_bytes: int) -> list[dict[str, Any]] | None:
    """Returns the objects of a file that is one JSON document; None if it is none, or longer than `max_bytes`."""
    first = next(filter(bytes.strip, _read_lines(file, compression, collections.Counter(), max_bytes)), b"")
    file.seek(0)
    if _parse_objects(first) is not None or not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"[", b"{")):
        return None
    content = _read_whole(file, compression, collections.Counter(), max_bytes)
    file.seek(0)
    return _parse_objects(content) if content is not None else None


def _parse_objects(text: bytes) -> list[dict[str, Any]] | None:
    """Returns the object in a text, or those of an array; None if it is damaged or something else."""
    try:
        record = parse_json(text.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return None
    records = record if isinstance(record, list) else [record]
    return records if all(isinstance(record, dict) for record in records) else None


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
