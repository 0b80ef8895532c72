"""Decompression of files that may be damaged: what can be read is returned, and reading goes on after the damage."""

import dataclasses
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import BinaryIO

import zstandard

CHUNK_BYTES = 1 << 16
_MAX_MEMBER_BYTES = 1 << 25  # of a compressed member that are kept to look for the next one after damage
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_PROBE_BYTES, _PROBE_INPUT_BYTES = 64, 1024
_ZSTD_STEP_BYTES = 1 << 9  # which expand to 16 MB at most
_MAX_WINDOW_BYTES = 1 << 27


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
    is_gzip = compression == "gzip"
    yield from _Members(file, _GZIP_MAGIC if is_gzip else _ZSTD_MAGIC, _Inflater if is_gzip else _ZstdFrame).read()


class _Inflater:
    """Decompressor of a gzip member. Its output per call is bounded, whatever the input expands to."""

    def __init__(self):
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def decompress(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns (content, input that is left)."""
        content = self._inflater.decompress(data, 16 * CHUNK_BYTES)
        return content, self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inflater.eof


class _ZstdFrame:
    """Decompressor of a Zstandard frame. See `_Inflater`."""

    def __init__(self):
        self._frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()

    def decompress(self, data: bytes) -> tuple[bytes, bytes]:
        content = self._frame.decompress(data[:_ZSTD_STEP_BYTES])
        return content, (self._frame.unused_data if self._frame.eof else b"") + data[_ZSTD_STEP_BYTES:]

    @property
    def eof(self) -> bool:
        return self._frame.eof


class _Members:
    """Members of a compressed file, one after the other."""

    def __init__(self, file: BinaryIO, magic: bytes, new_decompressor: Callable[[], _Inflater | _ZstdFrame]):
        self._file, self._magic, self._new = file, magic, new_decompressor
        self._input = b""  # compressed bytes that are read and not yet decompressed

    def read(self) -> Iterator[bytes | Damage]:
        while self._input or self._fill():
            if not self._starts_member():
                yield Damage("corrupt")
                if not self._find_member(0):
                    return
            if (yield from self._read_member()):
                return

    def _fill(self) -> bool:
        chunk = self._file.read(CHUNK_BYTES)
        self._input += chunk
        return bool(chunk)

    def _starts_member(self) -> bool:
        while len(self._input) < len(self._magic) and self._fill():
            pass
        if self._input.strip(b"\0") == b"":  # padding at the end of a file, as tapes and some writers leave it
            while self._input.strip(b"\0") == b"" and self._fill():
                self._input = self._input.lstrip(b"\0")
            if not self._input.strip(b"\0"):
                self._input = b""
                return True
        return self._input.startswith(self._magic)

    def _read_member(self) -> Generator[bytes | Damage, None, bool]:
        """Yields the content of the member at the start of the input. Returns whether the file ends with it."""
        if not self._input:
            return True
        decompressor, consumed = self._new(), bytearray()
        pending, self._input, size = self._input, b"", 0
        while pending or (pending := self._file.read(CHUNK_BYTES)):
            try:
                content, rest = decompressor.decompress(pending)
            except (zlib.error, zstandard.ZstdError) as error:
                yield Damage("checksum" if "check" in str(error) else "corrupt", size)
                self._input = bytes(consumed) + pending
                return not self._find_member(1)
            if content:
                size += len(content)
                yield content
            if decompressor.eof:
                self._input = rest
                return False
            consumed += pending[: len(pending) - len(rest)]
            del consumed[: max(0, len(consumed) - _MAX_MEMBER_BYTES)]
            pending = rest
        yield Damage("truncated", size)
        self._input = bytes(consumed)  # damage may hide where the member ends: others may follow
        return not self._find_member(1)

    def _find_member(self, start: int) -> bool:
        """Drops input before the next member that can be decompressed. Returns whether there is one."""
        while True:
            position = self._input.find(self._magic, start)
            if position < 0:
                self._input = self._input[-(len(self._magic) - 1) :]
                start = 0
                if not self._fill():
                    self._input = b""
                    return False
            else:
                self._input = self._input[position:]
                while len(self._input) < _PROBE_INPUT_BYTES and self._fill():
                    pass
                if self._is_readable():
                    return True
                start = 1

    def _is_readable(self) -> bool:
        try:
            decompressor, content, data = self._new(), b"", self._input[:_PROBE_INPUT_BYTES]
            while data and len(content) < _PROBE_BYTES and not decompressor.eof:
                more, data = decompressor.decompress(data)
                content += more
            return len(content) >= _PROBE_BYTES or decompressor.eof
        except (zlib.error, zstandard.ZstdError):
            return False
