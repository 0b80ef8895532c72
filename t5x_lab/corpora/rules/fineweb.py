"""FineWeb's additional rules (Penedo et al., 2024, "The FineWeb Datasets", section 3.6)."""

from collections.abc import Sequence

from t5x_lab.corpora.page import Page
from t5x_lab.corpora.rules.gopher import repetitions
from t5x_lab.corpora.rules.lines import END_MARKS
from t5x_lab.corpora.rules.rule import Dropped


def fineweb_quality(
    page: Page,
    min_ended_lines: float = 0.12,
    end_marks: Sequence[str] = END_MARKS,
    max_repeated_characters: float = 0.1,
    max_short_lines: float = 0.67,
    short_line: int = 30,
) -> Page | Dropped:
    """Drops pages that are lists, menus or repetitions.

    Args:
      page: the page.
      min_ended_lines: a page is dropped if this share of its lines or less ends with one of `end_marks`.
      end_marks: ends of sentences.
      max_repeated_characters: a page is dropped if this share of its characters or more is in repeated lines.
      max_short_lines: a page is dropped if this share of its lines or more has fewer than `short_line` characters.
      short_line: see `max_short_lines`.
    """
    lines = [line for line in page.text.splitlines() if line.strip()]
    if not lines:
        return Dropped("empty")
    if sum(line.endswith(tuple(end_marks)) for line in lines) <= min_ended_lines * len(lines):
        return Dropped("lines without end mark")
    repeated = sum(map(len, repetitions(lines)))
    if repeated >= max_repeated_characters * sum(map(len, lines)):
        return Dropped("repeated lines")
    if sum(len(line) < short_line for line in lines) >= max_short_lines * len(lines):
        return Dropped("short lines")
    return page
