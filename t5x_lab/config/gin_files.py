"""Reading gin files and bindings, with errors that name the nearest key, before anything is built.

Gin's state is global. It is cleared, filled and turned into dataclasses here, and nothing else reads it.
"""

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import os
import pathlib
import re
import shlex
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin
from gin.config import _CONFIG, _FILE_READERS, _LOCATION_PREFIXES, _REGISTRY, ConfigurableReference, ParseContext

from t5x_lab.config.errors import NotSet, UserError, nearest
from t5x_lab.config.macros import defined_in
from t5x_lab.config.t5x_names import hint
from t5x_lab.config.user_code import raised_in

PACKAGE_GIN = pathlib.Path(__file__).resolve().parent.parent / "gin"
_of_fields: set[str] = set()  # macros that dataclasses name


def _get_configurable(context: ParseContext, selector: str):
    """What gin finds by a file's imports; with dynamic registration also what is registered under its own name, as ours are."""
    try:
        return _FIND_CONFIGURABLE(context, selector)
    except NameError:
        found = _REGISTRY.get_match(selector)
        if found is None:
            raise
        return found


_FIND_CONFIGURABLE = ParseContext.get_configurable
ParseContext.get_configurable = _get_configurable


def parse(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    source: str = "on the command line",
    before: str = "",
) -> None:
    """Clears gin and reads the text `before`, files, then bindings; later ones override earlier ones.

    Files are found in the working directory, the search paths, then the package's own `gin/`. The working directory is on
    Python's path, so that `import my_tasks` in a gin file finds the user's module.

    Args:
      source: what messages say of where the bindings stand.

    Raises:
      UserError: for a file that is not there, a line that gin cannot read, or a name it does not know.
    """
    gin.clear_config()
    _LOCATION_PREFIXES[:] = []
    _FILE_READERS[:] = [(open, os.path.isfile)]  # gin's other reader logs an error for every path that it tries in vain
    for path in ("", *search_paths, str(PACKAGE_GIN)):
        gin.add_config_file_search_path(path)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _of_fields.update(defined_in(before))
    try:
        gin.parse_config(before)
        gin.parse_config_files_and_bindings(list(files), list(bindings), finalize_config=False)
    except UserError as error:
        raise UserError(error.sentence) from None
    except Exception as error:
        _raise_if_of_user_code(error)
        if not isinstance(error, _OF_GIN):
            raise
        raise UserError(_sentence(error, search_paths, source)) from error
    _drop_replaced_macros(bindings)


def _drop_replaced_macros(bindings: Sequence[str]) -> None:
    """Forgets macros of our own gin files that fed a parameter which is now bound without them, as T5X's users do.

    Raises:
      UserError: for one that the bindings set.
    """
    said = {text.partition("=")[0].strip() for text in bindings}
    for name in sorted(_defined_macros() - _used_macros()):
        if name not in _of_fields | _shipped_macros():
            continue  # the user's own, which `build` refuses
        if name in said:
            raise UserError(f"Nothing uses {name}: what it feeds is bound to something else. Leave one of the two out.")
        del _CONFIG[name, "gin.macro"]


@functools.cache
def _shipped_macros() -> frozenset[str]:
    return frozenset(name for path in PACKAGE_GIN.rglob("*.gin") for name in defined_in(path.read_text()))


def _defined_macros() -> set[str]:
    return {scope for scope, name in _CONFIG if name == "gin.macro"}


def _used_macros() -> set[str]:
    return {macro for values in _CONFIG.values() for macro in _macros_in(values.values())}


def build(selector: str, hints: Mapping[str, str] = {}):
    """Calls a configurable ("RunConfig"), or evaluates what one of its parameters is bound to ("RunConfig.model").

    Args:
      selector: what to build, once everything it needs is known to be set.
      hints: for macros without a value, what to say of each.

    Raises:
      UserError: for a macro that is not set, one that nothing uses, or a value that a dataclass refuses.
    """
    _check_macros(selector, hints)
    try:
        if "." in selector:
            return copy.deepcopy(_bound_to(selector))  # which evaluates references
        return gin.get_configurable(selector)()
    except UserError as error:
        raise UserError(error.sentence) from None
    except RecursionError as error:
        raise UserError(f"The configuration of {selector} refers to itself. Look for a macro that is set to itself.") from error
    except Exception as error:
        _raise_if_of_user_code(error)
        if not isinstance(error, TypeError | RuntimeError):
            raise
        raise UserError(_sentence(error)) from error


_OF_GIN = (ValueError, TypeError, SyntaxError, OSError, ImportError, AttributeError, NameError, tokenize.TokenError)


def _raise_if_of_user_code(error: Exception) -> None:
    where = raised_in(error)
    if where:
        raise UserError(f"{where}.") from error


def as_configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which finds today's bindings also when another configuration was read before it is called."""
    today = {key: dict(values) for key, values in _CONFIG.items()}

    def call(*args: Any, **options: Any) -> Any:
        before = dict(_CONFIG)
        _CONFIG.clear()
        _CONFIG.update(today)
        try:
            return function(*args, **options)
        finally:
            _CONFIG.clear()
            _CONFIG.update(before)

    return call


def config_text() -> str:
    """The parsed configuration as one gin file: reading it alone repeats it."""
    return gin.config_str(max_line_length=120)


def binding(text: str) -> str:
    """Turns "NAME=VALUE" from the command line into a gin binding; a value that is no gin literal is a string."""
    name, separator, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not separator:
        raise UserError(f"--gin.{text} has no value; write it as --gin.{text}=VALUE.")
    is_field = re.match(r"\{[A-Za-z_]", value)  # of a text such as {hub}; a dictionary's keys are in quotes, or references
    if is_field or not value.startswith(("@", "%", "[", "{", "(")):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = repr(value)
    return f"{name} = {value}"


def flag(name: str, value: object) -> str:
    """The flag that sets a gin name, for messages: a shell takes it as it is printed."""
    return shlex.quote(f"--gin.{name}={value}")


def _check_macros(selector: str, hints: Mapping[str, str]) -> None:
    defined, used = _defined_macros(), _used_macros()
    for name in sorted(defined - used):
        raise UserError(f"Nothing uses {name}.{hint(name) or nearest(name, used)} Macros in use: {', '.join(sorted(used))}.")
    for name in _needed_macros(selector):
        value = _CONFIG.get((name, "gin.macro"), {}).get("value")
        if name not in defined or _is_required(value):
            similar = difflib.get_close_matches(name, defined, n=1)
            raise NotSet(
                f"{name} is not set. {hints.get(name, '')}".rstrip()
                + f" Set it in a gin file or with --gin.{name}=VALUE."
                + (f" ({similar[0]} is set: is that what you meant?)" if similar and name not in hints else "")
            )


def _needed_macros(selector: str) -> list[str]:
    """Macros that evaluating `selector` will ask for, in the order of the configuration."""
    is_parameter = "." in selector
    todo = _next([_bound_to(selector)]) if is_parameter else [("configurable", _REGISTRY.get_match(selector).selector)]
    seen, macros = set(), []
    while todo:
        kind, name = todo.pop(0)
        if (kind, name) in seen:
            continue
        seen.add((kind, name))
        if kind == "macro":
            macros.append(name)
            values = _CONFIG.get((name, "gin.macro"), {}).values()
        else:
            values = [v for (_, key), bound in _CONFIG.items() if key == name for v in bound.values()]
        todo += _next(values)
    return macros


def _bound_to(selector: str):
    """The value, perhaps a reference, of a parameter ("RunConfig.model"); None where it has none."""
    name, _, parameter = selector.partition(".")
    return _CONFIG.get(("", _REGISTRY.get_match(name).selector), {}).get(parameter)


def _next(values: Iterable) -> list[tuple[str, str]]:
    """The macros and configurables that values refer to."""
    references = [r for r in _references_in(values) if r.selector != "gin.constant"]
    is_macro = lambda reference: reference.selector == "gin.macro"
    return [("macro", "/".join(r.scopes)) if is_macro(r) else ("configurable", r.configurable.selector) for r in references]


def _references_in(values: Iterable) -> Iterator[ConfigurableReference]:
    for value in values:
        if isinstance(value, ConfigurableReference):
            yield value
        elif isinstance(value, list | tuple):
            yield from _references_in(value)
        elif isinstance(value, dict):
            yield from _references_in([*value.keys(), *value.values()])


def _macros_in(values: Iterable) -> Iterator[str]:
    return ("/".join(r.scopes) for r in _references_in(values) if r.selector == "gin.macro")


def _is_required(value) -> bool:
    return isinstance(value, ConfigurableReference) and value.scopes == ["gin.REQUIRED"]


def _sentence(error: Exception, search_paths: Sequence[str] = (), source: str = "") -> str:
    """Gin's errors, said so that the next step is clear."""
    text = str(error)
    where = re.search(r'In file "(.+?)", line (\d+)', text) or re.search(r"In bindings string line (\d+)()", text)
    place = ""
    if where:
        place = f" ({where[1]}, line {where[2]})" if where[2] else f" ({source})"
    if match := re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", text):
        known = [name.split(".")[-1] for name in _REGISTRY._selector_map]
        parameter = re.search(rf"{re.escape(match[1])}\.(\w+) *=", text)
        theirs = hint(f"{match[1]}.{parameter[1]}" if parameter else match[1])
        return f'Gin knows nothing called "{match[1]}"{place}.' + (
            theirs
            or f"{nearest(match[1].split('.')[-1], known)} If it is your own, import its module in the gin file."
            + _folders_imported(where[1] if where else "")
        )
    if match := re.search(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", text):
        fields = _parameters(match[1])
        name = match[1].split(".")[-1]
        theirs = hint(f"{name}.{match[2]}")
        return f"{name} has no parameter {match[2]!r}{place}.{theirs or nearest(match[2], fields)} It has: {', '.join(fields)}."
    if match := re.search(r"Unable to open file: (.+?)\. Searched config paths", text):
        known = [str(path.relative_to(PACKAGE_GIN)) for path in PACKAGE_GIN.rglob("*.gin")]
        return (
            f"There is no gin file {match[1]}{place}.{nearest(match[1], known)} Files are looked for in "
            f"{', '.join(['the working directory', *search_paths])} and t5x_lab's own gin/ folder."
        )
    if isinstance(error, ImportError) and re.match(r"No module named '(t5x|flaxformer)\b", text):
        return f"A gin file imports {text.split(chr(39))[1]}{place}. Leave that line out: t5x_lab's names need no import."
    if isinstance(error, ImportError):
        return (
            f"A gin file imports a module that cannot be imported: {text.splitlines()[0]}{place}. The working directory is on "
            "Python's path."
        )
    if match := re.search(r"missing \d+ required .*?argument.*?: (.+?)(?:\n|$)", text):
        called_later = {"rngs", "network", "hidden", "batch", "step", "x", "key"} & set(re.findall(r"\w+", match[1]))
        more = ". A network, a loss, a schedule and an activation are bound without parentheses: @Name" if called_later else ""
        return f"The configuration does not set {match[1]}: {text.splitlines()[0]}{more}"
    if match := re.search(r"malformed node .*Failed to parse token '(.+?)'", text, re.DOTALL):
        return f'Gin cannot read the value {match[1]}{place}. A text stands in quotes: "{match[1]}".'
    first = " ".join(line.strip() for line in text.splitlines()[:2])
    return f"Gin cannot read the configuration{place}: {first}"


def _folders_imported(file: str) -> str:
    """What to know of a file's imports that found a folder where a module was meant: Python takes it for an empty package."""
    names = re.findall(r"^import ([\w.]+)", pathlib.Path(file).read_text(), re.MULTILINE) if os.path.isfile(file) else []
    modules = [sys.modules[name] for name in names if name in sys.modules]
    empty = [module for module in modules if getattr(module, "__file__", None) is None and hasattr(module, "__path__")]
    return "".join(f" `import {m.__name__}` found no {m.__name__}.py, but the folder {next(iter(m.__path__))}." for m in empty)


def _parameters(selector: str) -> list[str]:
    wrapped = _REGISTRY.get_match(selector).wrapped
    if isinstance(wrapped, type) and not dataclasses.is_dataclass(wrapped):
        return list(inspect.signature(wrapped.__init__).parameters)[1:]  # type: ignore[misc]  # a metaclass may hide it
    return list(inspect.signature(wrapped).parameters)
