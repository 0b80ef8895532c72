"""Markdown where <name> in a sentence is no tag of HTML, but a word of ours: docstrings say evals/<name>/<step>.json."""

import re
import xml.etree.ElementTree as etree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

TAGS = ("a", "b", "br", "i", "img", "code", "em", "kbd", "span", "strong", "sub", "sup")  # that a sentence may have


class Placeholders(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # Before what keeps HTML as it is (90), and after code (190), which has no tags.
        md.inlinePatterns.register(_Placeholder(r"<([a-z][a-z0-9_ ]*)>", md), "placeholder", 95)


class _Placeholder(InlineProcessor):
    def handleMatch(self, m: re.Match, data: str) -> tuple[etree.Element | str | None, int | None, int | None]:
        if m[1] in TAGS:
            return None, None, None
        return m[0], m.start(0), m.end(0)
