"""Reading gin files and bindings, with errors that name the nearest key, before anything is built.

Gin's state is global. It is cleared, filled and turned into dataclasses here, and nothing else reads it.
"""

import ast
import difflib
import inspect
import os
import pathlib
import re
import shlex
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence

import gin
from gin.config import _CONFIG, _FILE_READERS, _LOCATION_PREFIXES, _REGISTRY, ConfigurableReference

from t5x_lab.config.errors import NotSet, UserError, nearest

PACKAGE_GIN = pathlib.Path(__file__).resolve().parent.parent / "gin"


def parse(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> None:
    """Clears gin and reads files, then bindings; later ones override earlier ones.

    Files are found in the working directory, the search paths, then the package's own `gin/`. The working directory is on
    Python's path, so that `import my_tasks` in a gin file finds the user's module.

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
    try:
        gin.parse_config_files_and_bindings(list(files), list(bindings), finalize_config=False)
    except UserError as error:
        raise UserError(error.sentence) from None
    except (ValueError, TypeError, SyntaxError, OSError, ImportError, AttributeError, tokenize.TokenError) as error:
        raise UserError(_sentence(error, search_paths)) from error


def build(selector: str, hints: Mapping[str, str] = {}):
    """Calls a configurable ("RunConfig") or evaluates a macro ("MODEL") once everything it needs is known to be set.

    Args:
      selector: what to build.
      hints: for macros without a value, what to say of each.

    Raises:
      UserError: for a macro that is not set, one that nothing uses, or a value that a dataclass refuses.
    """
    _check_macros(selector, hints)
    is_macro = selector.isupper()
    try:
        return gin.get_configurable(f"{selector}/gin.macro" if is_macro else selector)()
    except UserError as error:
        raise UserError(error.sentence) from None
    except RecursionError as error:
        raise UserError(f"The configuration of {selector} refers to itself. Look for a macro that is set to itself.") from error
    except (TypeError, RuntimeError) as error:
        raise UserError(_sentence(error, ())) from error


def config_text() -> str:
    """The parsed configuration as one gin file: reading it alone repeats it."""
    return gin.config_str(max_line_length=120)


def binding(text: str) -> str:
    """Turns "NAME=VALUE" from the command line into a gin binding; a value that is no gin literal is a string."""
    name, separator, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not separator:
        raise UserError(f"--gin.{text} has no value; write it as --gin.{text}=VALUE.")
    if not value.startswith(("@", "%", "[", "{", "(")):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = repr(value)
    return f"{name} = {value}"


def flag(name: str, value: object) -> str:
    """The flag that sets a gin name, for messages: a shell takes it as it is printed."""
    return shlex.quote(f"--gin.{name}={value}")


def _check_macros(selector: str, hints: Mapping[str, str]) -> None:
    defined = {scope for scope, name in _CONFIG if name == "gin.macro"}
    used = {macro for values in _CONFIG.values() for macro in _macros_in(values.values())}
    for name in sorted(defined - used):
        if name != selector:
            raise UserError(f"Nothing uses {name}.{nearest(name, used)} Macros in use: {', '.join(sorted(used))}.")
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
    todo = [("macro", selector)] if selector.isupper() else [("configurable", _REGISTRY.get_match(selector).selector)]
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
        for reference in _references_in(values):
            if reference.selector == "gin.macro":
                todo.append(("macro", "/".join(reference.scopes)))
            elif reference.selector != "gin.constant":
                todo.append(("configurable", reference.configurable.selector))
    return macros


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


def _sentence(error: Exception, search_paths: Sequence[str]) -> str:
    """Gin's errors, said so that the next step is clear."""
    text = str(error)
    where = re.search(r'In file "(.+?)", line (\d+)', text) or re.search(r"In bindings string line (\d+)()", text)
    place = ""
    if where:
        place = f" ({where[1]}, line {where[2]})" if where[2] else " (on the command line)"
    if match := re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", text):
        known = [name.split(".")[-1] for name in _REGISTRY._selector_map]
        return (
            f'Gin knows nothing called "{match[1]}"{place}.{nearest(match[1].split(".")[-1], known)} If it is your own, '
            "import its module in the gin file."
        )
    if match := re.search(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", text):
        fields = _parameters(match[1])
        name = match[1].split(".")[-1]
        return f"{name} has no parameter {match[2]!r}{place}.{nearest(match[2], fields)} It has: {', '.join(fields)}."
    if match := re.search(r"Unable to open file: (.+?)\. Searched config paths", text):
        known = [str(path.relative_to(PACKAGE_GIN)) for path in PACKAGE_GIN.rglob("*.gin")]
        return (
            f"There is no gin file {match[1]}{place}.{nearest(match[1], known)} Files are looked for in "
            f"{', '.join(['the working directory', *search_paths])} and t5x_lab's own gin/ folder."
        )
    if isinstance(error, ImportError):
        return (
            f"A gin file imports a module that cannot be imported: {text.splitlines()[0]}{place}. The working directory is on "
            "Python's path."
        )
    if match := re.search(r"missing \d+ required .*?argument.*?: (.+?)(?:\n|$)", text):
        return f"The configuration does not set {match[1]}: {text.splitlines()[0]}"
    first = " ".join(line.strip() for line in text.splitlines()[:2])
    return f"Gin cannot read the configuration{place}: {first}"


def _parameters(selector: str) -> list[str]:
    return list(inspect.signature(_REGISTRY.get_match(selector).wrapped).parameters)
