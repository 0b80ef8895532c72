"""Decompression of files that may be damaged: what can be read is returned, and reading goes on after the damage."""

import contextlib
import dataclasses
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, cast

import zstandard
from zlib_ng import zlib_ng  # as zlib, in two thirds of its time

CHUNK_BYTES = 1 << 16
_InflateError = cast(type[Exception], zlib_ng.error)  # which its stubs have as an instance
_FIRST_BYTES = 1 << 12  # of a member: most are short, and each byte after their end is copied twice
_MAX_MEMBER_BYTES = 1 << 25  # of a compressed member that are kept to look for the next one after damage
_MAX_FAILURES = 1000  # of starts of members, one after the other, before the kept bytes are given up
_PROBE_BYTES, _PROBE_INPUT_BYTES = 64, 1024
_ZSTD_STEP_BYTES = 1 << 9  # which expand to 16 MB at most
_MAX_WINDOW_BYTES = 1 << 27
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of Zstandard that is no content
_ZEROS = re.compile(rb"\0+")
_DICTIONARY = b"\x37\xa4\x30\xec"


@dataclasses.dataclass(frozen=True)
class Damage:
    """End of intact data.

    Attributes:
      kind: "truncated" (the file ends too early), "checksum" (the content has another checksum) or "corrupt".
      size: number of bytes of the damaged member that precede it.
    """

    kind: str
    size: int = 0


def decompress(file: BinaryIO, compression: str) -> Iterator[bytes | Damage]:
    """Yields the decompressed content of a file in chunks, and a `Damage` wherever some of it is lost.

    Files of several members, such as those of Common Crawl with one per record, lose only damaged members.

    Args:
      file: the compressed file.
      compression: "gzip", "zstd" or "" (none).
    """
    if not compression:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
        return
    yield from _Members(file, _Gzip() if compression == "gzip" else _Zstd()).read()


def find_compression(start: bytes) -> str:
    """Returns the compression of a file with these first bytes: "gzip", "zstd" or ""."""
    if start.startswith(_Gzip.magic):
        return "gzip"
    return "zstd" if start.startswith(_Zstd.magic) or _SKIPPABLE.match(start) else ""


class _Gzip:
    """Format of gzip's members."""

    magic = b"\x1f\x8b\x08"

    def new(self) -> "_Inflater":
        return _Inflater()

    def is_readable(self, start: bytes) -> bool:
        """Returns whether a member can begin with these bytes."""
        try:
            inflater = _Inflater()
            content, _ = inflater.decompress(start[:_PROBE_INPUT_BYTES])
        except _InflateError:
            return False
        return len(content) >= _PROBE_BYTES or inflater.eof


class _Zstd:
    """Format of Zstandard's frames.

    Attributes:
      dictionary: that of the file, which its first frame may hold (the IIPC's specification of .warc.zst).
    """

    magic = b"\x28\xb5\x2f\xfd"

    def __init__(self):
        self.dictionary: zstandard.ZstdCompressionDict | None = None

    def new(self) -> "_ZstdFrame":
        return _ZstdFrame(self.dictionary)

    def is_readable(self, start: bytes) -> bool:
        try:
            zstandard.get_frame_parameters(start)
        except zstandard.ZstdError:
            return False
        return True


class _Inflater:
    """Decompressor of a gzip member. Its output per call is bounded, whatever the input expands to."""

    def __init__(self):
        self._inflater = zlib_ng.decompressobj(zlib_ng.MAX_WBITS | 16)

    def decompress(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns (content, input that is left)."""
        content = self._inflater.decompress(data, 16 * CHUNK_BYTES)
        return content, self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inflater.eof


class _ZstdFrame:
    """Decompressor of a Zstandard frame. See `_Inflater`."""

    def __init__(self, dictionary: zstandard.ZstdCompressionDict | None):
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=_MAX_WINDOW_BYTES)
        self._frame = decompressor.decompressobj()

    def decompress(self, data: bytes) -> tuple[bytes, bytes]:
        content = self._frame.decompress(data[:_ZSTD_STEP_BYTES])
        return content, (self._frame.unused_data if self._frame.eof else b"") + data[_ZSTD_STEP_BYTES:]

    @property
    def eof(self) -> bool:
        return self._frame.eof


class _Members:
    """Members of a compressed file, one after the other.

    Bytes from `_start` of the buffer on are not decompressed, or belong to the present member, which may turn out damaged.
    """

    def __init__(self, file: BinaryIO, form: _Gzip | _Zstd):
        self._file, self._form = file, form
        self._buffer, self._start, self._failures = bytearray(), 0, 0

    def read(self) -> Iterator[bytes | Damage]:
        while self._skip_padding():
            if self._starts_member():
                yield from self._read_member()
            else:
                yield Damage("corrupt")
                self._find_member(self._start)

    def _fill(self) -> bool:
        """Reads more. Returns whether there was more."""
        chunk = self._file.read(CHUNK_BYTES)
        self._buffer += chunk
        return bool(chunk)

    def _available(self, size: int) -> bool:
        while len(self._buffer) - self._start < size:
            if not self._fill():
                return False
        return True

    def _skip_padding(self) -> bool:
        """Drops zeros between members, as tapes and some writers leave them. Returns whether there is more."""
        if self._start > 16 * CHUNK_BYTES:
            del self._buffer[: self._start]
            self._start = 0
        while self._available(1):
            zeros = _ZEROS.match(self._buffer, self._start)
            if zeros is None:
                return True
            self._start = zeros.end()
        return False

    def _starts_member(self) -> bool:
        self._available(4)
        if isinstance(self._form, _Zstd):
            self._skip_frames(self._form)
        return self._buffer.startswith(self._form.magic, self._start)

    def _skip_frames(self, form: _Zstd) -> None:
        """Drops frames without content. The first one may hold the dictionary of the file."""
        while self._available(8) and _SKIPPABLE.match(self._buffer, self._start):
            size = struct.unpack_from("<I", self._buffer, self._start + 4)[0]
            if size > _MAX_MEMBER_BYTES or not self._available(8 + size):
                return
            content = bytes(self._buffer[self._start + 8 : self._start + 8 + size])
            self._start += 8 + size
            if form.dictionary is None and content.startswith((form.magic, _DICTIONARY)):
                with contextlib.suppress(zstandard.ZstdError):
                    raw = zstandard.ZstdDecompressor().decompress(content) if content.startswith(form.magic) else content
                    form.dictionary = zstandard.ZstdCompressionDict(raw)
            self._available(4)

    def _read_member(self) -> Iterator[bytes | Damage]:
        """Yields the content of the member at the start."""
        decompressor, position, size, step = self._form.new(), self._start, 0, _FIRST_BYTES
        while position < len(self._buffer) or self._fill():
            chunk = bytes(self._buffer[position : position + step])
            step = CHUNK_BYTES
            try:
                content, rest = decompressor.decompress(chunk)
            except (_InflateError, zstandard.ZstdError) as error:
                yield Damage("checksum" if "check" in str(error) else "corrupt", size)
                break
            if content:
                size += len(content)
                yield content
            position += len(chunk) - len(rest)
            if decompressor.eof:
                self._start, self._failures = position, 0
                return
            if position - self._start > 2 * _MAX_MEMBER_BYTES:  # the start of a long member is not needed any more
                removed = position - self._start - _MAX_MEMBER_BYTES
                del self._buffer[: self._start + removed]
                self._start, position = 0, position - self._start - removed
        else:
            yield Damage("truncated", size)  # damage may hide where the member ends: others may follow
        self._failures += 1
        self._find_member(self._start + 1)

    def _find_member(self, position: int) -> None:
        """Moves the start to the next member that can be decompressed, or to the end of the file."""
        magic = self._form.magic
        while True:
            if self._failures > _MAX_FAILURES:
                position, self._failures = len(self._buffer), 0
            match = self._buffer.find(magic, position)
            if match >= 0:
                self._start = match
                self._available(_PROBE_INPUT_BYTES)
                if self._form.is_readable(bytes(self._buffer[match : match + _PROBE_INPUT_BYTES])):
                    return
                self._failures += 1
                position = match + 1
                continue
            position = max(position, len(self._buffer) - len(magic) + 1)
            del self._buffer[:position]
            position = self._start = 0
            if not self._fill():
                self._start = len(self._buffer)
                return
