"""Errors raised in a user's own module, told with file and line."""

import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

from t5x_lab.config.errors import UserError

_OURS = pathlib.Path(__file__).resolve().parents[1]
_PYTHONS = pathlib.Path(os.__file__).resolve().parent


def raised_in(error: BaseException) -> str | None:
    """ "my_module.py, line 3, raises ValueError: …", of an error in a module that is neither ours nor installed; else None."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and str(error.filename).endswith(".py"):
        frames.append((str(error.filename), error.lineno))
    own = [(file, line) for file, line in frames if is_users(file)]
    if not own:
        return None
    file, line = own[-1]
    return f"{os.path.relpath(file)}, line {line}, raises {told(error)}"


def is_users(file: str) -> bool:
    """Whether a file of Python is the user's: neither ours, nor installed, nor made up by whoever compiles code."""
    return os.path.exists(file) and not _is_library(file)


def _is_library(file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & set(pathlib.Path(file).parts)
    return bool(packages) or _is_in(file, _OURS) or _is_in(file, _PYTHONS)


def _is_in(file: str, folder: pathlib.Path) -> bool:
    return pathlib.Path(file).resolve().is_relative_to(folder)


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
        # Of wrong arguments Python speaks where a function is called, here or by our caller, not in it.
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        called_wrongly = isinstance(error, TypeError) and "argument" in str(error) and _is_in(last, _OURS)
        where = raised_in(error) or (told(error) if called_wrongly else None)
        if not where:
            raise
        raise UserError(f"{what}: {where}.") from error


def shown(value: Any) -> str:
    """ "float32 [2, 3]" of an array or its shape; of anything else what Python shows, in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    return f"{value!r:.200}"


def told(error: BaseException) -> str:
    """ "ValueError: the first line of what it says"; of an error that AutoGraph tells again, what was raised first."""
    said = str(error.args[0] if error.args else error).strip()
    if said.startswith("in user code:"):
        return said.splitlines()[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}".rstrip(": ").rstrip(".")
