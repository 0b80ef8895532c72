"""Units of a text that a corpus has once: its lines, or spans of three sentences."""

from collections.abc import Callable, Collection, Iterable

from t5x_lab.corpora.page import md5

SPAN = 3  # sentences


def line_hashes(text: str) -> list[bytes]:
    """Returns the MD5 of each line, stripped and in lower case, as TFDS's `remove_duplicate_text`."""
    return [md5(line.strip().lower()) for line in text.split("\n")]


def remove_lines(text: str, lost: Collection[bytes]) -> tuple[str, int]:
    """Returns (the text without duplicate lines, their number).

    Args:
      text: the text.
      lost: hashes of the lines that another page keeps. Of equal lines in the text the first is kept.
    """
    digests = set(lost)
    lines = text.split("\n")
    remaining = [line for line, digest in zip(lines, line_hashes(text), strict=True) if _is_new(digest, digests)]
    return "\n".join(remaining), len(lines) - len(remaining)


def span_hashes(text: str, sentences: Callable[[str], Iterable[str]]) -> list[bytes]:
    """Returns the MD5 of each span of three sentences, stripped and in lower case (Raffel et al., 2020, section 2.2)."""
    listed = [sentence.strip().lower() for line in text.split("\n") for sentence in sentences(line)]
    return [md5("\n".join(listed[start : start + SPAN])) for start in range(len(listed) - SPAN + 1)]


def remove_spans(text: str, lost: Collection[bytes], sentences: Callable[[str], Iterable[str]]) -> tuple[str, int]:
    """Returns (the text without the sentences of duplicate spans, the number of these sentences).

    Args:
      text: the text.
      lost: hashes of the spans that another page keeps. Of equal spans in the text the first is kept.
      sentences: f(line) -> sentences.
    """
    by_line = [list(sentences(line)) for line in text.split("\n")]
    listed = [(number, sentence) for number, line in enumerate(by_line) for sentence in line]
    dropped: set[int] = set()
    first: dict[bytes, int] = {}
    for start, digest in enumerate(span_hashes(text, sentences)):
        if digest in lost or start - first.setdefault(digest, start) >= SPAN:  # a repetition does not overlap the first
            dropped.update(range(start, start + SPAN))
    if not dropped:
        return text, 0
    lines: dict[int, list[str]] = {}
    for index, (number, sentence) in enumerate(listed):
        if index not in dropped:
            lines.setdefault(number, []).append(sentence.strip())
    return "\n".join(" ".join(line) for line in lines.values()), len(dropped)


def _is_new(digest: bytes, digests: set[bytes]) -> bool:
    if digest in digests:
        return False
    digests.add(digest)
    return True
