"""A user's code: which modules it is, and error messages for its exceptions, with file and line."""

import os
import pathlib
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

from t5x_lab.config.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = pathlib.Path(os.__file__).resolve().parent


def describe_user_code_error(error: BaseException) -> str | None:
    """Returns "my_module.py, line 3, raises ValueError: ..." for an error in a user's file, otherwise None."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and str(error.filename).endswith(".py"):
        frames.append((str(error.filename), error.lineno))
    own = [(file, line) for file, line in frames if is_user_file(file)]
    if not own:
        return None
    file, line = own[-1]
    return f"{os.path.relpath(file)}, line {line}, raises {describe_error(error)}"


def is_user_file(file: str) -> bool:
    """Returns whether a Python file belongs to the user: it exists and is neither ours nor an installed package."""
    return os.path.exists(file) and not _is_library(file)


def user_modules() -> dict[str, str]:
    """Returns the CRC-32 of the file of each imported module that belongs to the user, by name."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {
        name: f"{zlib.crc32(pathlib.Path(file).read_bytes()):08x}"
        for name, file in sorted(files.items())
        if file and file.endswith(".py") and is_user_file(file)
    }


def _is_library(file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & set(pathlib.Path(file).parts)
    return bool(packages) or _is_in(file, _PACKAGE) or _is_in(file, _STANDARD_LIBRARY)


def _is_in(file: str, folder: pathlib.Path) -> bool:
    return pathlib.Path(file).resolve().is_relative_to(folder)


def call_user_code(problem: str, call: Callable) -> Any:
    """Returns the result of `call`.

    Raises:
      UserError: `problem` with file and line, if a user's file raises. Other exceptions are not caught.
    """
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        # A TypeError for wrong arguments is raised in the calling frame, which is ours, not in the user's function.
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        is_call_error = isinstance(error, TypeError) and "argument" in str(error) and _is_in(last, _PACKAGE)
        location = describe_user_code_error(error) or (describe_error(error) if is_call_error else None)
        if not location:
            raise
        raise UserError(f"{problem}: {location}.") from error


def shown(value: Any) -> str:
    """Returns "float32 [2, 3]" for an array or a shape, otherwise a shortened repr."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    return f"{value!r:.200}"


def describe_error(error: BaseException) -> str:
    """Returns the type and first line of an error, such as "ValueError: ..."; the original error for one of AutoGraph."""
    message = str(error.args[0] if error.args else error).strip()
    if message.startswith("in user code:"):
        return message.splitlines()[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {message.splitlines()[0] if message else ''}".rstrip(": ").rstrip(".")
