"""Rules: functions of a line or a page. A user's own function is a rule like any other.

A line rule is f(line) -> the line, changed or not; None drops the line, `Dropped` its page.
A page rule is f(page) -> the page, changed or not; None or `Dropped` drops it.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import describe_error
from t5x_lab.corpora.page import Page


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


def apply_page_rules(
    page: Page, rules: Sequence[PageRule], counts: collections.Counter[str], on_drop: Callable[[str, Page], None]
) -> Page | None:
    """Applies rules in their order. Returns the page; None if one drops it.

    Args:
      page: the page.
      rules: page rules.
      counts: receives the number of pages that each rule has dropped or changed, and of its failures.
      on_drop: f(name of the rule, page) that is called for a page that is dropped.
    """
    for rule in rules:
        name = rule_name(rule)
        try:
            outcome = rule(page)
        except UserError:
            raise
        except Exception as error:  # a page that a rule cannot handle must not end a run of days
            counts[f"failed: {name}: {describe_error(error)[:120]}"] += 1
            outcome = Dropped("failed")
        if outcome is None or isinstance(outcome, Dropped):
            counts[f"pages dropped: {name}"] += 1
            counts[f"characters dropped: {name}"] += len(page.text)
            if outcome is not None and outcome.detail:
                counts[f"pages dropped: {name}: {outcome.detail}"] += 1
            on_drop(name, page)
            return None
        if outcome is not page and outcome.text != page.text:
            counts[f"pages changed: {name}"] += 1
        page = outcome
    return page
