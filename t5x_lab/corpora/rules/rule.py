"""Rules: functions of a line or a page. A user's own function is a rule like any other.

A line rule is f(line) -> the line, changed or not; None drops the line, `Dropped` its page.
A page rule is f(page) -> the page, or a changed one by `dataclasses.replace(page, text=...)`; None or `Dropped` drops it.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import describe_error
from t5x_lab.corpora.page import Page, num_bytes


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Drops a page.

    Attributes:
      detail: the reason, for the counts, such as a language; "" if the rule has one reason only.
    """

    detail: str = ""


LineRule = Callable[[str], str | Dropped | None]
PageRule = Callable[[Page], Page | Dropped | None]


def rule_name(rule: Callable[..., Any]) -> str:
    """Returns the name of a rule in counts and in the report: that of its function."""
    while isinstance(rule, functools.partial):
        rule = rule.func
    return getattr(rule, "__name__", type(rule).__name__)


class PageRules:
    """Page rules in their order, with counts of what they do.

    Args:
      rules: page rules.
      counts: receives the number of pages that each rule has dropped or changed, and of its failures.
      on_drop: f(name of the rule, page) that is called for a page that is dropped.
    """

    def __init__(self, rules: Sequence[PageRule], counts: collections.Counter[str], on_drop: Callable[[str, Page], None]):
        self._rules = [(rule, rule_name(rule)) for rule in rules]
        self._counts, self._on_drop = counts, on_drop
        self._calls, self._failures = collections.Counter[str](), Failures(counts)

    def apply(self, page: Page) -> Page | None:
        """Returns the page as the rules leave it; None if one of them drops it.

        Raises:
          UserError: if a rule fails for more than a tenth of the pages.
        """
        for rule, name in self._rules:
            self._calls[name] += 1
            try:
                outcome = rule(page)
            except UserError:
                raise
            except Exception as error:  # a page that a rule cannot handle must not end a run of days
                self._failures.add(name, error, page, self._calls[name])
                outcome = Dropped("failed")
            if isinstance(outcome, Page) and not outcome.text:
                outcome = Dropped("no text")
            if outcome is None or isinstance(outcome, Dropped):
                self._counts[f"pages dropped: {name}"] += 1
                self._counts[f"bytes dropped: {name}"] += num_bytes(page.text)
                if outcome is not None and outcome.detail:
                    self._counts[f"pages dropped: {name}: {outcome.detail}"] += 1
                self._on_drop(name, page)
                return None
            if not isinstance(outcome, Page):
                raise UserError(
                    f"The rule {name} has returned {outcome!r:.80}. A page rule returns the page, or None to drop it."
                )
            if outcome.text != page.text:
                self._counts[f"pages changed: {name}"] += 1
            page = outcome
        return page


class Failures:
    """Counts pages for which a rule has failed. A few are dropped. Many end the run.

    Args:
      counts: receives the number of failures by their description.
    """

    def __init__(self, counts: collections.Counter[str]):
        self._counts, self._numbers = counts, collections.Counter[str]()

    def add(self, name: str, error: Exception, page: Page, calls: int) -> None:
        """Counts a failure of a rule that has been called for so many pages.

        Raises:
          UserError: if it has failed for more than a tenth of them.
        """
        description = describe_error(error)
        if self._numbers[name] < _MAX_MESSAGES:
            self._counts[f"failed: {name}: {description[:120]}"] += 1
        else:
            self._counts[f"failed: {name}: later failures"] += 1
        self._numbers[name] += 1
        if self._numbers[name] > _MAX_FAILURES and 10 * self._numbers[name] > calls:
            raise UserError(
                f"The rule {name} has failed for {self._numbers[name]} of {calls} pages, last for {page.url}: {description}. "
                "Correct it, or switch it off with Corpus.without."
            ) from error


_MAX_FAILURES, _MAX_MESSAGES = 10, 20
