"""Errors for users. A message says what is wrong, which value was found, and what to do."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix. Commands print its message to stderr without a traceback and exit with `status`."""

    status = 2

    def __init__(self, sentence: str):
        super().__init__(sentence)
        self.sentence = sentence  # gin appends its call stack to str(error), but not to this attribute


class NotSet(UserError):
    """A required configuration value is not set."""


class NotHere(UserError):
    """Data or a vocabulary are not on this machine. Another machine may have them."""


def write_error(path: object, error: OSError) -> UserError:
    """Returns the error for a file of a run that cannot be written."""
    return UserError(f"{path} cannot be written: {error.strerror or error}. Free disk space, or choose another MODEL_DIR.")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns ' Did you mean "…"?' for the known name closest to `name`, '' if none is close."""
    candidates = {str(candidate).lower(): str(candidate) for candidate in choices}
    matches = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.6)
    return f' Did you mean "{candidates[matches[0]]}"?' if matches else ""


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raises a `UserError` with the nearest choice unless `value` is one of `known`."""
    choices = sorted(choices)
    if value not in choices:
        raise UserError(f'{setting} is "{value}".{did_you_mean(str(value), choices)} Choose one of: {", ".join(choices)}.')
