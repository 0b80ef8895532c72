"""Records of WARC, WET and ARC files, split with care: a damaged record costs itself, not those after it."""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import BinaryIO

from t5x_lab.corpora.reading.decompression import Damage, decompress

_MAX_HEADER_BYTES = 1 << 18
_WARC_START = re.compile(rb"WARC/\d+\.\d+[ \t]*\r?\n")
# The start of a record where none is expected. Names of fields tell it from text that mentions one.
_NEXT_WARC = re.compile(rb"(?=WARC/\d+\.\d+[ \t]*\r?\n(?:WARC|Content)-)", re.IGNORECASE)
_ARC_LINE = re.compile(  # bounded, so that no line takes more time than its length
    rb"(?P<url>[a-zA-Z][a-zA-Z0-9+.\-]{0,31}:[^\n]{0,8192}?) (?P<ip>[0-9a-fA-F.:\-]{0,64}) (?P<date>\d{14}) "
    rb"(?P<type>[^ \n]{0,256})(?: [^\n]{0,512})? (?P<length>\d{1,18})\r?\n"
)
_NEXT_ARC = re.compile(rb"(?<=\n)(?=" + _ARC_LINE.pattern + rb")")
_HEADER_STOP = re.compile(rb"\n\r?\n|" + _NEXT_WARC.pattern, re.IGNORECASE)  # its end, or another record
_EMPTY_LINES = re.compile(rb"[\r\n]+")
_LONGEST_START = 1 << 14  # bytes that may be needed to recognize the start of a record


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A record of an archive.

    Attributes:
      type: WARC-Type, such as "conversion" or "response". Records of ARC files are responses.
      url, date: as in the record; "" if missing.
      fields: all fields by lower-case name.
      content: its content. For a response these are HTTP's header and body.
      is_truncated: whether the file ends inside it.
    """

    type: str
    url: str
    date: str
    fields: dict[str, str]
    content: bytes
    is_truncated: bool = False


def read_records(
    file: BinaryIO, compression: str, counts: collections.Counter[str], max_bytes: int = 1 << 25
) -> Iterator[Record]:
    """Yields the records of a WARC, WET or ARC file.

    Damage is counted. Records of a wrong length end where the next one starts, and the last one of a truncated file where the
    file ends. All other damaged records are left out.

    Args:
      file: the file.
      compression: "gzip", "zstd" or "".
      counts: receives the number of damaged parts by kind.
      max_bytes: length of content above which a record is left out. Memory for a record is bounded by it.
    """
    chunks = decompress(file, compression)
    while True:
        stream = _Stream(chunks)
        last, end = None, 0
        for record in _Splitter(stream, counts, max_bytes).read():
            if last is not None:
                yield last
            last, end = record, stream.position
        damage = stream.damage
        if damage is not None:
            counts[f"damaged_{damage.kind}"] += 1
        if last is not None:
            is_intact = damage is None or damage.kind == "truncated"
            if damage is not None and not is_intact:  # the last record may be one before the damaged member
                is_intact = not last.is_truncated and (damage.kind == "corrupt" or end <= stream.position - damage.size)
            if is_intact:
                yield last
        if damage is None:
            return


class _Stream:
    """Buffered bytes up to the next damage.

    Attributes:
      damage: why the bytes end; None at the end of the file, and while there are more.
      position: number of bytes that have been taken.
    """

    def __init__(self, chunks: Iterator[bytes | Damage]):
        self._chunks, self._buffer, self._start, self._ended = chunks, bytearray(), 0, False
        self.damage: Damage | None = None
        self.position = 0

    def fill(self, size: int) -> int:
        """Reads until so many bytes are buffered, or all. Returns their number."""
        while len(self._buffer) - self._start < size and not self._ended:
            chunk = next(self._chunks, None)
            if chunk is None or isinstance(chunk, Damage):
                self.damage, self._ended = chunk, True
            else:
                if self._start > 1 << 20:
                    del self._buffer[: self._start]
                    self._start = 0
                self._buffer += chunk
        return len(self._buffer) - self._start

    def peek(self, size: int, start: int = 0) -> bytes:
        self.fill(start + size)
        with memoryview(self._buffer) as view:  # a slice of the buffer itself would be copied twice
            return bytes(view[self._start + start : self._start + start + size])

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Matches the start of the stream."""
        self.fill(_LONGEST_START)
        return pattern.match(self._buffer, self._start)

    def search(self, pattern: re.Pattern[bytes], end: int, start: int = 0) -> int | None:
        """Returns the position after the first match in the bytes from `start` to `end`; None if there is none."""
        size = self.fill(end + _LONGEST_START)
        match = pattern.search(self._buffer, self._start + start, self._start + min(size, end + _LONGEST_START))
        return match.end() - self._start if match and match.end() - self._start <= end else None

    def take(self, size: int) -> bytes:
        content = self.peek(size)
        self._start += len(content)
        self.position += len(content)
        return content

    def skip(self, size: int) -> None:
        size = min(size, self.fill(size))
        self._start += size
        self.position += size

    def skip_to(self, pattern: re.Pattern[bytes]) -> None:
        """Drops bytes before the next match of a pattern, or all."""
        while self.fill(2 * _LONGEST_START):
            size = self.fill(1 << 20)
            position = self.search(pattern, size)
            if position is not None:
                self.skip(position)
                return
            self.skip(max(size - _LONGEST_START, 1) if not self._ended else size)


class _Splitter:
    """Records of a stream."""

    def __init__(self, stream: _Stream, counts: collections.Counter[str], max_bytes: int):
        self._stream, self._counts, self._max_bytes = stream, counts, max_bytes

    def read(self) -> Iterator[Record]:
        while self._skip_empty_lines():
            if self._stream.match(_WARC_START):
                record = self._read_warc()
            elif match := self._stream.match(_ARC_LINE):
                record = self._read_arc(match)
            else:
                self._counts["damaged_no_record"] += 1
                self._resynchronize()
                continue
            if record is not None:
                yield record

    def _skip_empty_lines(self) -> bool:
        """Returns whether there is more."""
        while match := self._stream.match(_EMPTY_LINES):
            self._stream.skip(match.end() - match.start())
        return self._stream.fill(1) > 0

    def _resynchronize(self) -> None:
        self._stream.skip(1)
        self._stream.skip_to(_NEXT_RECORD)

    def _read_warc(self) -> Record | None:
        header = self._take_header()
        if header is None:
            self._counts["damaged_header"] += 1
            self._resynchronize()
            return None
        fields = _parse_fields(header)
        url = fields.get("warc-target-uri", "").strip("<>")  # as some versions of Wget write them
        return self._read_content(fields.get("warc-type", "").lower(), url, fields.get("warc-date", ""), fields, _NEXT_WARC)

    def _take_header(self) -> bytes | None:
        """Returns the lines of a header; None if it does not end, or another record starts inside."""
        end = self._stream.search(_HEADER_STOP, 1 << 12, 1) or self._stream.search(_HEADER_STOP, _MAX_HEADER_BYTES, 1)
        if end is None or not self._stream.peek(end).endswith((b"\n\n", b"\n\r\n")):
            return None
        return self._stream.take(end)

    def _read_arc(self, match: re.Match[bytes]) -> Record | None:
        url, date = _text(match["url"]), match["date"].decode()
        self._stream.skip(match.end() - match.start())
        fields = {"content-type": _text(match["type"]), "content-length": match["length"].decode()}
        iso = f"{date[:4]}-{date[4:6]}-{date[6:8]}T{date[8:10]}:{date[10:12]}:{date[12:]}Z"
        return self._read_content("filedesc" if url.startswith("filedesc:") else "response", url, iso, fields, _NEXT_ARC)

    def _read_content(
        self, kind: str, url: str, date: str, fields: dict[str, str], following: re.Pattern[bytes]
    ) -> Record | None:
        """Returns the record whose header has been read; None if it is left out."""
        length = fields.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        if size is not None and size <= self._max_bytes and self._ends_at(size, following):
            return Record(kind, url, date, fields, self._stream.take(size))
        end = self._stream.search(following, self._max_bytes)
        available = self._stream.fill(self._max_bytes + 1)
        if end is None and available > self._max_bytes:
            self._counts["dropped_too_long_record"] += 1
            self._stream.skip_to(following)
            return None
        is_truncated = end is None and size is not None and size > available
        problem = "truncated_record" if is_truncated else "no_length" if size is None else "wrong_length"
        self._counts[f"damaged_{problem}"] += 1
        content = self._stream.take(available if end is None else end)
        if not is_truncated:  # the empty lines that separate records
            content = content.removesuffix(b"\n").removesuffix(b"\r").removesuffix(b"\n").removesuffix(b"\r")
        return Record(kind, url, date, fields, content, is_truncated)

    def _ends_at(self, size: int, following: re.Pattern[bytes]) -> bool:
        """Returns whether a record's content can have this size.

        It can if the file ends after it or another record follows. If the next one is damaged, the empty lines between two
        records must follow, and no other record may start inside.
        """
        if self._stream.fill(size) < size:
            return False
        separator, start = (b"\r\n\r\n", _WARC_START) if following is _NEXT_WARC else (b"\n", _ARC_LINE)
        rest = self._stream.peek(64, start=size)
        if rest.startswith(b"\r\n\r\nWARC/") and _WARC_START.match(rest, 4):  # as nearly always
            return True
        rest = self._stream.peek(_LONGEST_START, start=size)
        next_record = rest.lstrip(b"\r\n")
        if not next_record or start.match(next_record):
            return True
        return rest.startswith(separator) and self._stream.search(following, size) is None


_NEXT_RECORD = re.compile(_NEXT_WARC.pattern + rb"|" + _NEXT_ARC.pattern, re.IGNORECASE)


def _parse_fields(header: bytes) -> dict[str, str]:
    """Returns the fields of a header by lower-case name. A line that starts with a space continues the one before."""
    fields: dict[str, str] = {}
    name = ""
    for line in _text(header).split("\n")[1:]:
        if line[:1] in (" ", "\t") and name:
            fields[name] += " " + line.strip()
            continue
        key, colon, value = line.partition(":")
        if colon:
            name = key.strip().lower()
            fields.setdefault(name, value.strip())
    return fields


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
