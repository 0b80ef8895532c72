"""Errors raised in a user's own module, told with file and line."""

import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

from t5x_lab.config.errors import UserError

_LIBRARIES = ("site-packages", "dist-packages", str(pathlib.Path(os.__file__).parent), str(pathlib.Path(__file__).parents[1]))


def raised_in(error: BaseException) -> str | None:
    """ "my_module.py, line 3, raises ValueError: …", of an error in a module that is neither ours nor installed; else None."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and str(error.filename).endswith(".py"):
        frames.append((str(error.filename), error.lineno))
    own = [(file, line) for file, line in frames if os.path.exists(file) and not any(part in file for part in _LIBRARIES)]
    if not own:
        return None
    file, line = own[-1]
    return f"{os.path.relpath(file)}, line {line}, raises {told(error)}"


def tried(what: str, call: Callable) -> Any:
    """What the call gives.

    Raises:
      UserError: `what` and where, for an error in a user's module; any other is passed on, as a fault of ours.
    """
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        called_wrongly = isinstance(error, TypeError) and "argument" in str(error)  # raised where it is called, not in it
        where = raised_in(error) or (told(error) if called_wrongly else None)
        if not where:
            raise
        raise UserError(f"{what}: {where}.") from error


def told(error: BaseException) -> str:
    """ "ValueError: the first line of what it says"."""
    said = str(error.args[0] if error.args else error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}".rstrip(": ").rstrip(".")
