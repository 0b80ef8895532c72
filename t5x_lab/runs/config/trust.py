"""Trust in stored configurations.

The gin text of a run directory can import Python modules, and with dynamic registration call any function in them. That of
another person's run directory is therefore read as data: without imports, it can only name configurables of the library. As
with `trust_remote_code` of transformers, the user has to say if its code may run. Configurations that the same user trained,
saved or converted on this machine are trusted: their hashes are in a file of the user's.
"""

import contextlib
import hashlib
import os
import pathlib
from typing import Any

from gin.config_parser import ConfigParser, ImportStatement, IncludeStatement, ParserDelegate

from t5x_lab.config.errors import UserError

_LIBRARY = ("t5x_lab", "seqio")  # packages whose import registers configurables and does nothing else


def check_trusted(text: str, origin: Any) -> None:
    """Raises `UserError` if a stored configuration runs code that the user did not train with.

    Args:
      text: gin text.
      origin: file or checkpoint with the text, for the message.
    """
    code = _code_in(text)
    if code and _digest(text) not in _remembered():
        raise UserError(
            f"The configuration of {origin} runs Python code: {', '.join(code)}. Read these modules. If you trust their "
            "author, use --trust, or trust=True in Python."
        )


def remember(text: str) -> None:
    """Trusts a configuration of this user's in the future. Does nothing if it runs no code or the file cannot be written."""
    if _code_in(text) and _digest(text) not in _remembered():
        with contextlib.suppress(OSError):
            _store().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _store().open("a") as file:
                file.write(f"{_digest(text)}\n")


def _code_in(text: str) -> list[str]:
    """Returns the statements of a gin text that can run code outside of the library."""
    code = []
    with contextlib.suppress(Exception):  # gin runs the statements before an error too
        for statement in iter(ConfigParser(text, _Values()).parse_statement, None):
            if isinstance(statement, ImportStatement) and statement.module.partition(".")[0] not in _LIBRARY:
                code.append(statement.format())
            if isinstance(statement, IncludeStatement):
                code.append(f'include "{statement.filename}"')
    return code


class _Values(ParserDelegate):
    """Values of parsed references and macros, which are not looked at."""

    def configurable_reference(self, *_: Any) -> None:
        return None

    def macro(self, *_: Any) -> None:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _store() -> pathlib.Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return pathlib.Path(state) / "t5x_lab" / "trusted_configurations"


def _remembered() -> set[str]:
    try:
        return set(_store().read_text().split())
    except OSError:
        return set()
