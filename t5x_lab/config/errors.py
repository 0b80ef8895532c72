"""A user's mistake is one sentence: what was wrong, the value found, what is allowed, the nearest name, how to fix it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can correct. Commands print its message on stderr, without a traceback, and exit with `status`."""

    status = 2

    def __init__(self, sentence: str):
        super().__init__(sentence)
        self.sentence = sentence  # gin appends its own call stack to str(error); this stays as it was


class NotSet(UserError):
    """A configuration lacks a value that was asked for."""


class NotHere(UserError):
    """Data or a vocabulary that this machine does not have, and another may."""


def unwritable(path: object, error: OSError) -> UserError:
    """What to raise when a file of a run cannot be written."""
    return UserError(f"{path} cannot be written: {error.strerror}. Make room, or choose another MODEL_DIR.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean "…"?' for the known name closest to `name`, or '' when none is close."""
    candidates = {str(candidate).lower(): str(candidate) for candidate in known}
    matches = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.6)
    return f' Did you mean "{candidates[matches[0]]}"?' if matches else ""


def one_of(what: str, value: str, known: Iterable[str]) -> None:
    """Raises a `UserError` that names the nearest choice unless `value` is one of `known`."""
    choices = sorted(known)
    if value not in choices:
        raise UserError(f'{what} is "{value}".{nearest(str(value), choices)} Choose one of: {", ".join(choices)}.')
