"""Statistics of the finished pages, for the report: lengths, languages, domains."""

import collections
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from t5x_lab.corpora.page import Page

_MAX_DOMAINS = 300  # the most frequent ones of a job and of all: counts of rare domains are lower bounds


class Statistics:
    """Counts of the pages of a job by length, language and domain."""

    def __init__(self):
        self._lengths, self._languages, self._domains = (collections.Counter[str]() for _ in range(3))

    def add(self, page: Page) -> None:
        self._lengths[str(len(page.text).bit_length())] += 1
        self._languages[page.language or "not looked at"] += 1
        self._domains[domain_of(page.url)] += 1

    def to_json(self) -> dict[str, Any]:
        """Returns pages by number of binary digits of the length in characters, by language, and by domain."""
        domains = dict(sorted(self._domains.items(), key=lambda item: (-item[1], item[0]))[:_MAX_DOMAINS])
        return {"lengths": self._lengths, "languages": self._languages, "domains": domains}


def merge_statistics(summaries: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns the counts of several jobs together, the most frequent first."""
    merged = {name: collections.Counter[str]() for name in ("lengths", "languages", "domains")}
    for summary in summaries:
        for name, counts in merged.items():
            counts.update(summary[name])
    ordered = {name: sorted(counts.items(), key=lambda item: (-item[1], item[0])) for name, counts in merged.items()}
    return {name: dict(counts[:_MAX_DOMAINS]) for name, counts in ordered.items()}


def domain_of(url: str) -> str:
    """Returns the host of a URL without "www."; "files" for a path."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    return (host or "files").removeprefix("www.")
