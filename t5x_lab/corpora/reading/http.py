"""Body of an HTTP response in an archive: status, content type, transfer and content encodings."""

import collections
import dataclasses
import io
import re

_PROTOCOLS = ["HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/2", "HTTP/3"]
_ENCODINGS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate", "br": "br"}
_CHARSET = re.compile(r"charset=[\"']?([A-Za-z0-9._:\-]+)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Response:
    """An HTTP response.

    Attributes:
      status: status code; 0 if it cannot be read.
      content_type: media type in lower case, without parameters; "" if missing.
      charset: character encoding by the header; "" if missing.
      body: decoded body.
    """

    status: int
    content_type: str
    charset: str
    body: bytes


def parse_response(content: bytes, counts: collections.Counter[str], max_bytes: int) -> Response | None:
    """Returns the response in a record; None if it has no HTTP header.

    Args:
      content: header and body.
      counts: receives the number of damaged bodies by kind.
      max_bytes: length of the decoded body above which it is cut.
    """
    from warcio.statusandheaders import StatusAndHeadersParser

    stream = io.BytesIO(content)
    try:
        header = StatusAndHeadersParser(_PROTOCOLS).parse(stream)
    except Exception:  # of a header of any form
        return None
    status = header.get_statuscode()
    media_type, _, parameters = (header.get_header("content-type") or "").partition(";")
    charset = _CHARSET.search(parameters)
    body = _decode_body(
        stream.read(),
        (header.get_header("transfer-encoding") or "").lower(),
        (header.get_header("content-encoding") or "").lower().strip(),
        counts,
        max_bytes,
    )
    return Response(
        int(status) if status.isascii() and status.isdigit() else 0,
        media_type.strip().lower(),
        charset[1] if charset else "",
        body,
    )


def _decode_body(body: bytes, transfer: str, encoding: str, counts: collections.Counter[str], max_bytes: int) -> bytes:
    """Returns the body without its encodings. What a damaged one has before the damage is returned, and counted."""
    from warcio.bufferedreaders import BufferedReader, ChunkedDataReader

    if transfer == "chunked":
        body = _read(ChunkedDataReader(io.BytesIO(body)), counts, "damaged_chunks", max_bytes)
    for name in reversed([part.strip() for part in encoding.split(",") if part.strip() not in ("", "identity")]):
        decoder = _ENCODINGS.get(name)
        if decoder not in BufferedReader.get_supported_decompressors():
            counts["dropped_encoding"] += 1
            return b""
        body = _read(BufferedReader(io.BytesIO(body), decomp_type=decoder), counts, "damaged_encoding", max_bytes)
    return body[:max_bytes]


def _read(reader, counts: collections.Counter[str], problem: str, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while size < max_bytes and (part := reader.read(1 << 16)):
            parts.append(part)
            size += len(part)
    except Exception:  # of the decompressors, each of which raises its own
        counts[problem] += 1
    return b"".join(parts)[:max_bytes]
