"""Error messages for exceptions of gin, with the nearest known name."""

import dataclasses
import inspect
import os
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Sequence

from gin.config import _REGISTRY

from t5x_lab.config.errors import did_you_mean
from t5x_lab.config.t5x_names import hint

# Exceptions that gin raises for invalid files and bindings.
GIN_ERRORS = (ValueError, TypeError, SyntaxError, OSError, ImportError, AttributeError, NameError, tokenize.TokenError)

# Arguments that are passed when an object is called, so that it must be bound without parentheses.
_CALL_ARGUMENTS = {"rngs", "network", "hidden", "batch", "step", "x", "key"}


@dataclasses.dataclass(frozen=True)
class _Context:
    """Location and circumstances of an error.

    Attributes:
      text: message of gin.
      file: gin file, "" for bindings.
      place: file and line, or the origin of the bindings, in parentheses for a message.
      package_gin: folder of the library's gin files.
      search_paths: other folders with gin files.
    """

    text: str
    file: str
    place: str
    package_gin: pathlib.Path
    search_paths: Sequence[str]


def explain_error(error: Exception, package_gin: pathlib.Path, search_paths: Sequence[str] = (), source: str = "") -> str:
    """Returns a message for an exception of gin.

    Args:
      error: the exception.
      package_gin: folder of the library's gin files.
      search_paths: other folders with gin files.
      source: origin of the bindings, such as "on the command line".
    """
    if isinstance(error, tokenize.TokenError):
        reason, (line, _) = error.args
        return f"A gin file or binding ends before a bracket or quote is closed ({reason}, line {line})."
    text = str(error)
    file, place = "", ""
    if match := re.search(r'In file "(.+?)", line (\d+)', text):
        file, place = match[1], f" ({match[1]}, line {match[2]})"
    elif re.search(r"In bindings string line \d+", text):
        place = f" ({source})"
    context = _Context(text, file, place, package_gin, search_paths)
    if isinstance(error, ImportError):
        return _explain_import(context)
    for pattern, explain in _EXPLANATIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return explain(match, context)
    first_lines = " ".join(line.strip() for line in text.splitlines()[:2])
    return f"Gin cannot parse the configuration{place}: {first_lines}"


def _explain_import(context: _Context) -> str:
    if match := re.match(r"No module named '(t5x|flaxformer)\b", context.text):
        return f"A gin file imports {match[1]}{context.place}. Remove that line: names of t5x_lab need no import."
    return (
        f"A gin file imports a module that cannot be imported: {context.text.splitlines()[0]}{context.place}. The working "
        "directory is on Python's path."
    )


def _explain_unknown_name(match: re.Match, context: _Context) -> str:
    name = match[1]
    parameter = re.search(rf"{re.escape(name)}\.(\w+) *=", context.text)
    t5x_hint = hint(f"{name}.{parameter[1]}" if parameter else name)
    if t5x_hint:
        return f'Gin has no configurable "{name}"{context.place}.{t5x_hint}'
    candidates = [selector.split(".")[-1] for selector in _REGISTRY._selector_map]
    return (
        f'Gin has no configurable "{name}"{context.place}.{did_you_mean(name.split(".")[-1], candidates)} If it is your own, '
        f"import its module in the gin file.{_describe_imported_folders(context.file)}"
    )


def _explain_unknown_parameter(match: re.Match, context: _Context) -> str:
    parameters, name = _parameters(match[1]), match[1].split(".")[-1]
    suggestion = hint(f"{name}.{match[2]}") or did_you_mean(match[2], parameters)
    return f"{name} has no parameter {match[2]!r}{context.place}.{suggestion} It has: {', '.join(parameters)}."


def _explain_missing_file(match: re.Match, context: _Context) -> str:
    candidates = [str(path.relative_to(context.package_gin)) for path in context.package_gin.rglob("*.gin")]
    folders = ", ".join(["the working directory", *context.search_paths])
    return (
        f"There is no gin file {match[1]}{context.place}.{did_you_mean(match[1], candidates)} Files are searched in "
        f"{folders} and t5x_lab's gin/ folder."
    )


def _explain_missing_argument(match: re.Match, context: _Context) -> str:
    is_passed_later = _CALL_ARGUMENTS & set(re.findall(r"\w+", match[1]))
    advice = ". Bind networks, losses, schedules and activations without parentheses: @Name" if is_passed_later else ""
    return f"The configuration does not set {match[1]}: {context.text.splitlines()[0]}{advice}"


def _explain_value(match: re.Match, context: _Context) -> str:
    return f'Gin cannot parse the value {match[1]}{context.place}. Put text in quotes: "{match[1]}".'


# Patterns of gin's messages, in order.
_EXPLANATIONS: tuple[tuple[str, Callable[[re.Match, _Context], str]], ...] = (
    (r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", _explain_unknown_name),
    (r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", _explain_unknown_parameter),
    (r"Unable to open file: (.+?)\. Searched config paths", _explain_missing_file),
    (r"missing \d+ required [^\n]*?argument[^\n]*?: ([^\n]+)", _explain_missing_argument),
    (r"malformed node .*Failed to parse token '(.+?)'", _explain_value),
)


def _describe_imported_folders(file: str) -> str:
    """Returns a note for each import of a gin file that found a folder instead of a module."""
    names = re.findall(r"^import ([\w.]+)", pathlib.Path(file).read_text(), re.MULTILINE) if os.path.isfile(file) else []
    modules = [sys.modules[name] for name in names if name in sys.modules]
    folders = [module for module in modules if getattr(module, "__file__", None) is None and hasattr(module, "__path__")]
    return "".join(
        f" `import {m.__name__}` found no {m.__name__}.py, but the folder {next(iter(m.__path__))}." for m in folders
    )


def _parameters(selector: str) -> list[str]:
    wrapped = _REGISTRY.get_match(selector).wrapped
    if isinstance(wrapped, type) and not dataclasses.is_dataclass(wrapped):
        return list(inspect.signature(wrapped.__init__).parameters)[1:]  # type: ignore[misc]  # a metaclass may hide it
    return list(inspect.signature(wrapped).parameters)
