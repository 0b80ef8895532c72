"""Times of pages, in all forms that crawls have, as texts that sort by time."""

import contextlib
import datetime
import email.utils
import re
from typing import Any

_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_DIGITS = re.compile(r"((?:19|20)\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)")
_SECONDS = re.compile(r"-?\d{1,13}(\.\d*)?")
_MILLISECONDS = 1e11  # a larger time is not one in seconds


def to_utc(value: Any) -> str:
    """Returns a time as "2024-05-18T01:58:10Z"; "" if it cannot be read.

    Args:
      value: a text in ISO 8601 (UTC if it has no offset), as in e-mails and HTTP ("Sat, 18 May 2024 01:58:10 GMT"), or of 14
        digits; or seconds or milliseconds since 1970, as a number or a text.
    """
    if isinstance(value, bool) or value is None:
        return ""
    text = str(value).strip()
    if _UTC.fullmatch(text):
        return text
    with contextlib.suppress(OverflowError, ValueError, OSError, TypeError):
        return _parse(text).astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ").rjust(20, "0")  # years before 1000
    return ""


def _parse(text: str) -> datetime.datetime:
    if match := _DIGITS.fullmatch(text):
        year, month, day, hour, minute, second = map(int, match.groups())
        return datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
    if _SECONDS.fullmatch(text):
        number = float(text)
        return datetime.datetime.fromtimestamp(number / 1000 if abs(number) > _MILLISECONDS else number, datetime.UTC)
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        time = email.utils.parsedate_to_datetime(text)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
