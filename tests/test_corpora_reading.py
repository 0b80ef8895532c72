"""Reading of crawl files: real ones as warcio reads them, broken ones without losing what is not broken."""

import collections
import gzip
import io
import json
import os
import random
import time
import zlib

import pytest
import zstandard
from conftest import shared_data
from warcio.archiveiterator import ArchiveIterator

from t5x_lab.corpora.page import Page
from t5x_lab.corpora.reading.archives import join_lines
from t5x_lab.corpora.reading.decompression import Damage, decompress
from t5x_lab.corpora.reading.html import main_text, whole_text
from t5x_lab.corpora.reading.inputs import file_kind, read_pages
from t5x_lab.corpora.reading.records import Record, read_records
from t5x_lab.corpora.reading.timestamps import to_utc

INTACT = [
    "cc_whirlwind/whirlwind.warc",
    "cc_whirlwind/whirlwind.warc.gz",
    "cc_whirlwind/whirlwind.warc.wet",
    "cc_whirlwind/whirlwind.warc.wet.gz",
    "dolma/warc/sample-0000.warc.gz",
    "dolma/warc/sample-0001.warc.gz",
    "pywb/dupes.warc.gz",
    "pywb/example.warc.gz",
    "pywb/iana.warc.gz",
    "resiliparse/warcfile.warc",
    "resiliparse/clueweb-quirk.warc.gz",
    "warcio/example.warc",
    "warcio/example.warc.gz",
    "warcio/example-resource.warc.gz",
    "warcio/example-iana.org-chunked.warc",
    "warcio/post-test.warc.gz",
    "warcio/example-digest.warc",
    "webarchive_commons/IAH-urls-wget.warc",
]


def records_of(content: bytes, compression: str = "") -> tuple[list[Record], collections.Counter]:
    counts = collections.Counter[str]()
    return list(read_records(io.BytesIO(content), compression, counts)), counts


def pages_of(content: bytes, name: str, max_bytes: int = 1 << 25) -> tuple[list[Page], collections.Counter]:
    counts = collections.Counter[str]()
    keys = {"text": "text", "url": "url", "timestamp": "timestamp"}
    return list(read_pages(io.BytesIO(content), name, main_text, keys, counts, max_bytes)), counts


@pytest.mark.parametrize("name", INTACT)
def test_records_of_real_archives_are_those_of_warcio(name):
    path = shared_data("crawl", *name.split("/"))
    content = path.read_bytes()
    records, counts = records_of(content, "gzip" if content.startswith(b"\x1f\x8b") else "")
    assert not counts
    with open(path, "rb") as file:
        expected = [
            (record.rec_type, record.rec_headers.get_header("WARC-Target-URI"), record.raw_stream.read())
            for record in ArchiveIterator(file, no_record_parse=True)
        ]
    assert [(record.type, record.url or None, record.content) for record in records] == expected


@pytest.mark.parametrize(
    "name, pages, problems",
    [
        ("resiliparse/clipped.warc.gz", 1, {"damaged_truncated": 1, "damaged_truncated_record": 1}),
        ("warcio/example-bad.warc.gz.bad", 1, {}),  # one gzip member for all records
        ("warcio/example-bad-non-chunked.warc.gz", 1, {}),
        ("warcio/example-trunc.warc", 1, {"damaged_wrong_length": 1}),
        ("warcio/example-wrong-chunks.warc.gz", 1, {}),
        ("warcio/example-space-in-url.arc", 1, {"damaged_truncated_record": 1}),
        ("warcio/example.arc.gz", 1, {}),
        ("warcio/bad.arc", 0, {"damaged_no_record": 2}),
        ("warcio/example-wget-bad-target-uri.warc.gz", 3, {}),
    ],
)
def test_archives_that_are_broken_on_purpose_give_the_pages_that_they_have(name, pages, problems):
    path = shared_data("crawl", *name.split("/"))
    texts, counts = pages_of(path.read_bytes(), str(path))
    assert len(texts) == pages and all("xample" in page.text or "<" not in page.text for page in texts)
    assert {problem: number for problem, number in counts.items() if problem.startswith("damaged")} == problems


def wet_record(number: int, text: str | None = None) -> bytes:
    content = (f"Text {number} begins.\n" + "A line of it, quite long.\n" * (number % 7) if text is None else text).encode()
    header = (
        f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://example.org/{number}\r\n"
        f"WARC-Date: 2024-05-18T01:58:{number % 60:02d}Z\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
        f"Content-Type: text/plain\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return header.encode() + content + b"\r\n\r\n"


def mutate(record: bytes, generator: random.Random) -> bytes:
    """Returns a record with one fault."""
    data = bytearray(record)
    start = generator.randrange(len(data))
    size = generator.randrange(1, 40)
    kind = generator.randrange(9)
    if kind == 0:  # other bytes
        for position in range(start, min(start + size, len(data))):
            data[position] = generator.randrange(256)
    elif kind == 1:  # a part is lost
        del data[start : start + size]
    elif kind == 2:  # binary data comes in
        data[start:start] = generator.randbytes(size)
    elif kind == 3:  # the rest is lost
        del data[start:]
    elif kind == 4:  # a wrong length
        length = generator.choice([b"0", b"3", b"-7", b"", b"1e3", b"99999", b"1" + b"0" * 30, b"\xd9\xa3"])
        head, _, tail = bytes(data).partition(b"Content-Length: ")
        data = bytearray(head + b"Content-Length: " + length + tail[tail.index(b"\r\n") :])
    elif kind == 5:  # a field is lost
        field = generator.choice([b"WARC-Target-URI", b"WARC-Date", b"Content-Length", b"WARC-Type", b"Content-Type"])
        lines = bytes(data).split(b"\r\n")
        data = bytearray(b"\r\n".join(line for line in lines if not line.startswith(field)))
    elif kind == 6:  # a page in the future, or at no time
        data = bytearray(bytes(data).replace(b"2024-", generator.choice([b"9999-", b"\xff\xfe-", b"0000-"])))
    elif kind == 7:  # twice
        data += data[: generator.randrange(len(data))]
    else:  # another end of lines
        data = bytearray(bytes(data).replace(b"\r\n", generator.choice([b"\n", b"\r", b"\n\n"])))
    return bytes(data)


@pytest.mark.parametrize("form", ["plain", "members", "one member", "zstd"])
def test_no_mutated_record_costs_another(form):
    """Every third of 7,500 records has a fault in each form: 10,000 in all."""
    generator = random.Random(form)
    for _ in range(50):
        records = [wet_record(number) for number in range(150)]
        for number in range(1, 150, 3):
            records[number] = mutate(records[number], generator)
        content = b"".join(records)
        if form == "members":
            content = b"".join(gzip.compress(record, 1) for record in records)
        elif form != "plain":
            content = gzip.compress(content) if form == "one member" else zstandard.compress(content)
        pages, _ = pages_of(content, "file.warc.wet")
        texts = {page.url: page.text for page in pages}
        for number in range(150):
            if number % 3 != 1:
                expected, _ = pages_of(wet_record(number), "file.warc.wet")
                assert texts.get(f"http://example.org/{number}") == expected[0].text, (number, records[number - 1])


def test_no_damage_of_compressed_members_costs_others():
    """Bytes of every third gzip member are changed, lost or added: 2,500 members."""
    generator = random.Random(0)
    for _ in range(50):
        members = [bytearray(gzip.compress(wet_record(number))) for number in range(150)]
        for number in range(1, 150, 3):
            start, size = generator.randrange(len(members[number])), generator.randrange(1, 30)
            members[number][start : start + size] = generator.randbytes(generator.choice([0, size, 2 * size]))
        pages, counts = pages_of(b"".join(members), "file.warc.wet.gz")
        intact = {f"http://example.org/{number}" for number in range(150) if number % 3 != 1}
        assert intact <= {page.url for page in pages}
        assert sum(number for name, number in counts.items() if name.startswith("damaged")) >= 40


def test_a_damaged_frame_of_zstandard_costs_itself():
    """Frames of seven kilobytes and more, whose first block is larger than what is looked at to recognize one."""
    generator = random.Random(0)
    texts = ["".join(chr(generator.randrange(33, 120)) for _ in range(9000)) for _ in range(10)]
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    frames = [bytearray(compressor.compress(wet_record(number, text))) for number, text in enumerate(texts)]
    frames[3][len(frames[3]) // 2] ^= 255
    pages, counts = pages_of(b"".join(frames), "x.warc.wet.zst")
    assert [page.url[-1] for page in pages] == list("012456789") and sum(counts.values()) == 1


def test_frames_without_content_and_dictionaries_are_read():
    """Skippable frames, as pzstd writes them, and a dictionary in the first one, as in the .warc.zst of web archives."""
    records = [wet_record(number) for number in range(300)]
    dictionary = zstandard.train_dictionary(2000, records)
    compressor = zstandard.ZstdCompressor(dict_data=dictionary)
    skippable = lambda content: b"\x5d\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content
    for first in (dictionary.as_bytes(), zstandard.compress(dictionary.as_bytes())):
        content = skippable(first) + b"".join(map(compressor.compress, records))
        pages, counts = pages_of(content, "x.warc.wet.zst")
        assert len(pages) == 300 and not counts
    content = b"".join(skippable(b"12345") + zstandard.compress(record) for record in records)
    assert len(pages_of(content, "x.warc.wet.zst")[0]) == 300


def test_only_content_encodings_that_can_be_read_are_text():
    body = b"<p>One good line of text is here.</p>"
    bodies = {
        b"gzip": gzip.compress(body), b"gzip, gzip": gzip.compress(gzip.compress(body)), b"identity": body, b"": body,
        b"zstd": zstandard.compress(body), b"compress": b"\x1f\x9dabc",
    }  # fmt: skip
    records = []
    for number, (encoding, content) in enumerate(bodies.items()):
        content = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: %s\r\n\r\n" % encoding + content
        head = wet_record(number, "").replace(b"conversion", b"response").replace(b"Length: 0", b"Length: %d" % len(content))
        records.append(head[:-4] + content + b"\r\n\r\n")
    pages, counts = pages_of(b"".join(records), "x.warc")
    assert [page.url[-1] for page in pages] == list("0123") and counts["dropped_encoding"] == 2


def test_problems_are_counted_by_their_kind():
    nul = "\0\1\2 binary" * 30
    records = [
        wet_record(0).replace(b"WARC-Target-URI: http://example.org/0\r\n", b""),
        wet_record(1).replace(b"WARC-Date: 2024-05-18T01:58:01Z\r\n", b""),
        wet_record(2, ""),
        wet_record(3).replace(b"Text 3", b"T\xe9xt 3"),
        wet_record(4, nul).replace(b"\0", b"\xff"),
        wet_record(5).replace(b"text/plain", b"image/jpeg"),
        wet_record(6).replace(b"conversion", b"metadata"),
        wet_record(7),
    ]
    pages, counts = pages_of(b"".join(records), "x.warc.wet")
    assert [page.url[-1] for page in pages] == ["3", "7"]
    assert pages[0].text == "T\ufffdxt 3 begins.\n" + "\n".join(["A line of it, quite long."] * 3)
    assert counts == {
        "dropped_no_url": 1, "dropped_no_timestamp": 1, "dropped_no_text": 2, "damaged_characters": 1, "dropped_binary": 1,
        "dropped_content_type": 1, "skipped_metadata_record": 1,
    }  # fmt: skip


@pytest.mark.parametrize("size", [10, 1 << 40])
def test_a_record_that_is_too_long_is_never_held(size):
    """A hundred megabytes in one line, in a record that says so and in one that does not, between two others."""
    line = b"x" * (100 << 20)
    header = wet_record(1, "").replace(b"Content-Length: 0", f"Content-Length: {size}".encode())[:-4]
    content = io.BytesIO(wet_record(0) + header + line + b"\r\n\r\n" + wet_record(2))
    counts = collections.Counter[str]()
    records = list(read_records(content, "", counts, max_bytes=1 << 20))
    assert [record.url[-1] for record in records] == ["0", "2"] and counts == {"dropped_too_long_record": 1}
    pages, counts = pages_of(b'{"text": "' + line + b'"}\n{"text": "short"}', "x.jsonl", max_bytes=1 << 20)
    assert [page.text for page in pages] == ["short"] and counts["dropped_too_long_record"] == 1


@pytest.mark.parametrize("compress, name", [(gzip.compress, "gzip"), (zstandard.compress, "zstd")])
def test_a_bomb_of_compressed_zeros_is_read_in_small_pieces(compress, name):
    bomb = compress(bytes(1 << 28))
    assert len(bomb) < 1 << 19
    sizes = [len(chunk) for chunk in decompress(io.BytesIO(bomb), name)]
    assert sum(sizes) == 1 << 28 and max(sizes) <= 1 << 25


def test_content_before_a_damage_is_read_to_the_byte():
    text = random.Random(0).randbytes(1 << 18)
    content = zlib.compressobj(wbits=31)
    whole = content.compress(text) + content.flush()
    for cut in (0, 1, 5, 10, 11, 1000, len(whole) - 8, len(whole) - 1):
        parts = list(decompress(io.BytesIO(whole[:cut]), "gzip"))
        assert text.startswith(b"".join(part for part in parts if isinstance(part, bytes)))
        kinds = [part.kind for part in parts if isinstance(part, Damage)]
        assert kinds == ["truncated" if cut > 2 else "corrupt"] * (cut > 0)


@pytest.mark.parametrize(
    "part",
    [
        b"a:b 1 20240101000000 x ",
        b"a: 0 ",
        b"WARC/1.0\r\nWARC-Type: conversion\r\n",
        b"\r\n",
        b"\x1f\x8b\x08\x00",
        b"{",
        b"<div>",
    ],
)
def test_no_content_takes_more_time_than_its_length(part):
    """Eight megabytes that look like the start of records again and again. A quadratic reader would take hours."""
    content = b"http://a 1 20240101000000 x 5\nabcde\nx" + part * ((8 << 20) // len(part))
    start = time.process_time()
    for name in ("x.arc", "x.warc.wet", "x.html"):
        pages_of(content, name)
    pages_of(gzip.compress(b"x") + content, "x.warc.gz")
    pages_of(content + part.replace(b"<", b"</") * ((8 << 20) // len(part)), "x.html")
    stored = zlib.compressobj(0, wbits=31)
    pages_of((stored.compress(content) + stored.flush())[:-8] + bytes(8), "x.warc.gz")
    assert time.process_time() - start < 60


def test_encodings_and_extractors_that_fail_cost_one_page():
    html = b"<p>One good line of text is here.</p>"
    response = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=%s\r\n\r\n" + html
    records = []
    for number, charset in enumerate([b"undefined", b"utf-7", b"no-such-thing", b"hex", b"latin1"]):
        content = response % charset
        head = wet_record(number, "").replace(b"conversion", b"response").replace(b"Length: 0", b"Length: %d" % len(content))
        records.append(head[:-4] + content + b"\r\n\r\n")
    pages, _ = pages_of(b"".join(records), "x.warc")
    assert [page.text for page in pages] == ["One good line of text is here."] * 5
    counts = collections.Counter[str]()
    failing = lambda html, charset: 1 / 0
    keys = {"text": "text", "url": "url", "timestamp": "timestamp"}
    assert not list(read_pages(io.BytesIO(b"".join(records)), "x.warc", failing, keys, counts, 1 << 20))
    assert counts == {"damaged_html (ZeroDivisionError)": 5, "dropped_no_text": 5}


def test_json_text_and_html_files():
    lines = [
        b'{"text": "a", "url": "http://a", "timestamp": 1587205351}', b"[1]", b"{broken", b"", b'{"text": ""}', b'{"body": "a"}',
        b'{"text": "\\ud800b", "timestamp": 1587205351000}',
    ]  # fmt: skip
    pages, counts = pages_of(b"\n".join(lines), "d/x.jsonl")
    assert [(page.url, page.text) for page in pages] == [("http://a", "a"), (os.path.abspath("d/x.jsonl#6"), "\ud800b")]
    assert {to_utc(page.timestamp) for page in pages} == {"2020-04-18T10:22:31Z"}
    assert counts == {"damaged_json_lines": 2, "dropped_no_text": 1, "dropped_no_text_key": 1, "pages without URL": 1}
    assert [page.text for page in pages_of(gzip.compress(b"One.\r\nTwo.\n"), "x.txt.gz")[0]] == ["One.\r\nTwo.\n"]
    html = "<html><head><meta charset=latin1></head><body><p>Caf\xe9 is a word of four letters.</p></body></html>".encode(
        "latin1"
    )
    assert [page.text for page in pages_of(html, "a/b.html")[0]] == ["Caf\xe9 is a word of four letters."]


def test_lines_are_stripped_and_fields_of_archives_are_dropped():
    generator = random.Random(0)
    parts = ["a", "bc", " ", "\n", "\n", "\t", "\xa0", "\u2028", "\r", "\x1c", "WARC", "Content-", "CONTENT-", "é."]
    for _ in range(20_000):
        text = "".join(generator.choices(parts, k=generator.randrange(12)))
        lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
        expected = [line for line in lines if line and not line.startswith(("WARC", "Content-", "CONTENT-"))]
        assert join_lines(text) == "\n".join(expected), repr(text)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("CC-MAIN-1.warc.jsonl.gz", "json"), ("page.html.jsonl", "json"), ("a.warc.wet.gz", "archive"), ("a.arc", "archive"),
        ("A.WARC.ZST", "archive"), ("b.htm", "html"), ("c.txt.zstd", "text"), ("warc", None), ("a.warc.os.cdx.gz", None),
        ("data.csv", None), (".gz", None),
    ],
)  # fmt: skip
def test_the_kind_of_a_file_is_told_by_the_ending_of_its_name(name, kind):
    assert file_kind(f"folder.warc/{name}") == kind


def test_a_mark_of_byte_order_is_no_text():
    (page,) = read_pages(io.BytesIO(b"\xef\xbb\xbfa text"), "a.txt", main_text, {}, collections.Counter(), 1 << 20)
    assert page.text == "a text"


@pytest.mark.parametrize(
    "value, expected",
    [
        ("1716000000", "2024-05-18T02:40:00Z"), (1716000000.5, "2024-05-18T02:40:00Z"), (1716000000000, "2024-05-18T02:40:00Z"),
        ("Sat, 18 May 2024 01:58:10 GMT", "2024-05-18T01:58:10Z"), ("2024-05-18T01:58:10+02:00", "2024-05-17T23:58:10Z"),
        ("2024-05-18T01:58:10.5Z", "2024-05-18T01:58:10Z"), ("2024-05-18 01:58:10", "2024-05-18T01:58:10Z"),
        ("2024-05-18", "2024-05-18T00:00:00Z"), ("20240518015810", "2024-05-18T01:58:10Z"), ("2024-05-18T01:58:10Z",) * 2,
        ("yesterday", ""), ("05/18/2021", ""), ("", ""), (None, ""), (True, ""), ("9" * 30, ""), ("2024-13-45T00:00:00Z+x", ""),
    ],
)  # fmt: skip
def test_times_of_all_forms_are_read(value, expected):
    assert to_utc(value) == expected


@pytest.mark.parametrize("content", [b"\x7fELF" + bytes(3000), bytes(range(256)) * 50, random.Random(0).randbytes(20_000)])
def test_binary_data_under_a_name_of_html_is_counted(content):
    counts = collections.Counter()
    assert (
        not list(read_pages(io.BytesIO(content), "a.html", whole_text, {}, counts, 1 << 20)) and counts["dropped_binary"] == 1
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "shift_jis", "iso-2022-jp", "windows-1251", "euc-jp"])
def test_html_in_other_encodings_is_not_binary(encoding):
    text = "Это текст. " if "1251" in encoding else "これは長い文章です。"
    html = f'<html><head><meta charset="{encoding}"></head><body><p>{text * 40}</p></body></html>'.encode(encoding)
    counts = collections.Counter()
    assert list(read_pages(io.BytesIO(html), "a.html", whole_text, {}, counts, 1 << 20)) and not counts["dropped_binary"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_json_document_is_read_whole(indent, mark):
    keys = {name: name for name in ("text", "url", "timestamp")}
    records = [{"text": f"page {n}", "url": f"http://a/{n}"} for n in range(3)]

    def read(content):
        counts = collections.Counter()
        pages = list(read_pages(io.BytesIO(mark + content), "a.json", whole_text, keys, counts, 1 << 20))
        return [page.text for page in pages], +counts

    assert read(json.dumps(records, indent=indent).encode()) == (["page 0", "page 1", "page 2"], {})
    assert read(json.dumps(records[0], indent=indent).encode()) == (["page 0"], {})
    lines = "\n".join(map(json.dumps, records)).encode()
    assert read(lines) == (["page 0", "page 1", "page 2"], {})
    assert read(b'{"text": "cut\n' + lines) == (["page 0", "page 1", "page 2"], {"damaged_json_lines": 1})
