"""Parses gin files and bindings and builds the configured objects.

Gin's state is global. Only this module reads and changes it. `gin_errors` has the error messages.
"""

import ast
import copy
import difflib
import functools
import io
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin
from etils import epath
from gin.config import (
    _CONFIG,
    _FILE_READERS,
    _LOCATION_PREFIXES,
    _REGISTRY,
    ConfigurableReference,
    ParseContext,
    _config_str,
)

from t5x_lab.config.errors import NotSet, UserError, did_you_mean
from t5x_lab.config.gin_errors import GIN_ERRORS, explain_error
from t5x_lab.config.macros import defined_macros
from t5x_lab.config.object_storage import retry
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.config.renamed import replace_old_names
from t5x_lab.config.t5x_names import hint
from t5x_lab.config.user_code import describe_user_code_error

PACKAGE_GIN = pathlib.Path(__file__).resolve().parent.parent / "gin"
MAX_REFERENCES = 1_000_000  # to macros and configurables in one built value
_field_macros: set[str] = set()  # macros of dataclass fields
_macros_in_files: set[str] = set()  # macros that the parsed files refer to


def _get_configurable(context: ParseContext, selector: str):
    """Finds a configurable by the imports of a gin file, or by its registered name.

    With dynamic registration gin accepts imported names only; ours must work without an import.
    """
    try:
        return _FIND_CONFIGURABLE(context, selector)
    except NameError:
        configurable = _REGISTRY.get_match(selector)
        if configurable is None:
            raise
        return configurable


_FIND_CONFIGURABLE = ParseContext.get_configurable
ParseContext.get_configurable = _get_configurable


def parse(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    source: str = "on the command line",
    before: str = "",
) -> None:
    """Clears gin and parses `before`, files and bindings, in this order. Later values override earlier ones.

    Files are searched in the working directory, `search_paths` and the package's `gin/` folder. The working directory is added
    to Python's path, so that `import my_tasks` in a gin file works.

    Args:
      files: paths of gin files.
      bindings: gin bindings such as "BATCH_SIZE = 8".
      search_paths: folders with gin files.
      source: describes the origin of the bindings in error messages.
      before: gin text that is parsed first.

    Raises:
      UserError: for a missing file, a line that gin cannot parse, an unknown name, or a binding of a T5X class without effect.
    """
    gin.clear_config()
    _macros_in_files.clear()
    _LOCATION_PREFIXES[:] = []
    _FILE_READERS[:] = [(_GinFile, _is_file)]  # gin's other reader logs an error for every path without the file
    for path in ("", *search_paths, str(PACKAGE_GIN)):
        gin.add_config_file_search_path(path)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _field_macros.update(defined_macros(before))
    try:
        gin.parse_config(before)
        gin.parse_config_files_and_bindings(
            [replace_old_names(str(file)) for file in files],
            [replace_old_names(binding) for binding in bindings],
            finalize_config=False,
        )
    except UserError as error:
        raise UserError(error.sentence) from None
    except Exception as error:
        _raise_user_code_error(error)
        if not isinstance(error, GIN_ERRORS):
            raise
        raise UserError(explain_error(error, PACKAGE_GIN, search_paths, source)) from error
    _drop_replaced_macros(bindings)
    _check_t5x_bindings()


def _is_file(path: str) -> bool:
    return retry(lambda: is_regular_file(path), path)


class _GinFile(io.StringIO):
    """Text of a gin file, with the name that gin reads for its error messages."""

    def __init__(self, path: str):
        text = replace_old_names(epath.Path(path).read_text())
        super().__init__(text)
        self.name = path
        _macros_in_files.update(re.findall(r"%([A-Za-z_]\w*)", re.sub("#.*", "", text)))


def _drop_replaced_macros(bindings: Sequence[str]) -> None:
    """Deletes macros that are unused because another binding of their parameter replaces the one in a file, as in T5X.

    Raises:
      UserError: if the bindings set such a macro.
    """
    bound = {text.partition("=")[0].strip() for text in bindings}
    replaceable = _field_macros | _shipped_macros() | _macros_in_files  # `build` reports others
    while replaced := sorted((_bound_macros() - _used_macros()) & replaceable):
        for name in replaced:
            if name in bound:
                raise UserError(f"{name} has no effect: its parameter is bound directly. Remove one of the two.")
            del _CONFIG[name, "gin.macro"]


@functools.cache
def _shipped_macros() -> frozenset[str]:
    return frozenset(name for path in PACKAGE_GIN.rglob("*.gin") for name in defined_macros(path.read_text()))


def _bound_macros() -> set[str]:
    return {scope for scope, name in _CONFIG if name == "gin.macro"}


def _used_macros() -> set[str]:
    return {macro for values in _CONFIG.values() for macro in _macros_in(values.values())}


def build(selector: str, hints: Mapping[str, str] = {}):
    """Builds a configurable ("RunConfig") or the value of a parameter ("RunConfig.model").

    Args:
      selector: name of the configurable or parameter.
      hints: hints for macros without a value, for the error message.

    Raises:
      UserError: for a macro without a value, an unused macro, or an invalid value.
    """
    _check_macros(selector, hints)
    _check_size(selector)
    try:
        if "." in selector:
            return copy.deepcopy(_get_binding(selector))  # copying evaluates references
        return gin.get_configurable(selector)()
    except UserError as error:
        raise UserError(error.sentence) from None
    except RecursionError as error:
        raise UserError(f"The configuration of {selector} is circular. Look for a macro that is set to itself.") from error
    except Exception as error:
        _raise_user_code_error(error)
        if not isinstance(error, TypeError | RuntimeError):
            raise
        raise UserError(explain_error(error, PACKAGE_GIN)) from error


def _raise_user_code_error(error: Exception) -> None:
    description = describe_user_code_error(error)
    if description:
        raise UserError(f"{description}.") from error


def with_current_bindings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs with the current gin bindings, even if another configuration is parsed before the call."""
    bindings = {key: dict(values) for key, values in _CONFIG.items()}

    def call(*args: Any, **options: Any) -> Any:
        saved = dict(_CONFIG)
        _CONFIG.clear()
        _CONFIG.update(bindings)
        try:
            return function(*args, **options)
        finally:
            _CONFIG.clear()
            _CONFIG.update(saved)

    return call


def config_text(selector: str | None = None) -> str:
    """Returns the parsed configuration as a self-contained gin text, without parameters that `selector` does not depend on."""
    shown = _CONFIG
    if selector is not None:
        used = {name for kind, name in _reachable(selector) if kind == "configurable"}
        shown = {key: values for key, values in _CONFIG.items() if key[1] in used or key[1] == "gin.macro"}
    return _config_str(shown, max_line_length=120, continuation_indent=4)


def binding(text: str) -> str:
    """Returns the gin binding for "NAME=VALUE" of the command line.

    Values that begin with @, %, [, { or ( are passed to gin, except format fields such as {hub}. Other values that are not
    Python literals become strings.
    """
    name, separator, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not separator:
        raise UserError(f"--gin.{text} has no value. Write it as --gin.{text}=VALUE.")
    is_format_field = re.match(r"\{[A-Za-z_]", value)  # a text such as "{hub}": keys of a dictionary are quoted
    if is_format_field or not value.startswith(("@", "%", "[", "{", "(")):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = repr(value)
    return f"{name} = {value}"


def gin_flag(name: str, value: object) -> str:
    """Returns the flag that sets a gin name, quoted for a shell, for use in messages."""
    return shlex.quote(f"--gin.{name}={value}")


def _check_macros(selector: str, hints: Mapping[str, str]) -> None:
    defined, used = _bound_macros(), _used_macros()
    for name in sorted(defined - used):
        raise UserError(
            f"The macro {name} is not used.{hint(name) or did_you_mean(name, used)} Used macros: {', '.join(sorted(used))}."
        )
    for name in _required_macros(selector):
        value = _CONFIG.get((name, "gin.macro"), {}).get("value")
        if name not in defined or _is_required(value):
            similar = difflib.get_close_matches(name, defined - {name}, n=1)
            raise NotSet(
                f"{name} is not set. {hints.get(name, '')}".rstrip()
                + f" Set it in a gin file or with --gin.{name}=VALUE."
                + (f" ({similar[0]} is set. Did you mean {name}?)" if similar and name not in hints else "")
            )


def _check_t5x_bindings() -> None:
    """Raises a `UserError` for a binding of a class of an installed T5X that nothing refers to, and that has an equivalent."""
    referenced = {name for values in _CONFIG.values() for kind, name in _find_references(values.values())}
    for (_, name), parameters in _CONFIG.items():
        if name.partition(".")[0] in ("t5x", "flaxformer") and name not in referenced:
            for parameter in parameters:
                if equivalent := hint(f"{name}.{parameter}"):
                    raise UserError(
                        f"The binding of {name}.{parameter} has no effect, because nothing here uses it.{equivalent}"
                    )


def _required_macros(selector: str) -> list[str]:
    """Returns the macros that `selector` depends on, in the order of the configuration."""
    return [name for kind, name in _reachable(selector) if kind == "macro"]


def _reachable(selector: str) -> list[tuple[str, str]]:
    """Returns the macros and configurables that `selector` depends on, as (kind, name), in the order of the configuration."""
    todo = _references_of(selector)
    visited: dict[tuple[str, str], None] = {}
    while todo:
        reference = todo.pop(0)
        if reference not in visited:
            visited[reference] = None
            todo += _find_references(_bound_values(*reference))
    return list(visited)


def _check_size(selector: str) -> None:
    """Raises `UserError` if lists of macros of lists of macros make the value of a selector too large to build."""
    sizes: dict[tuple[str, str], int] = {}

    def size(reference: tuple[str, str]) -> int:
        if reference not in sizes:
            sizes[reference] = 0  # a circle, which `build` reports
            sizes[reference] = 2 + sum(map(size, _find_references(_bound_values(*reference))))  # itself and its value
        return sizes[reference]

    if sum(map(size, _references_of(selector))) > MAX_REFERENCES:
        raise UserError(f"The configuration of {selector} has more than {MAX_REFERENCES:,} values. Look for lists of macros.")


def _references_of(selector: str) -> list[tuple[str, str]]:
    """Returns the references of a parameter's value, or the configurable itself, as (kind, name)."""
    if "." in selector:
        return _find_references([_get_binding(selector)])
    return [("configurable", _REGISTRY.get_match(selector).selector)]


def _bound_values(kind: str, name: str) -> list:
    """Returns the value of a macro, or what is bound to the parameters of a configurable."""
    if kind == "macro":
        return [*_CONFIG.get((name, "gin.macro"), {}).values()]
    return [value for (_, key), bound in _CONFIG.items() if key == name for value in bound.values()]


def _get_binding(selector: str):
    """Returns the value or reference that a parameter ("RunConfig.model") is bound to, or None."""
    name, _, parameter = selector.partition(".")
    return _CONFIG.get(("", _REGISTRY.get_match(name).selector), {}).get(parameter)


def _find_references(values: Iterable) -> list[tuple[str, str]]:
    """Returns the macros and configurables that values refer to, as (kind, name)."""
    references = [r for r in _iterate_references(values) if r.selector != "gin.constant"]
    is_macro = lambda reference: reference.selector == "gin.macro"
    return [("macro", "/".join(r.scopes)) if is_macro(r) else ("configurable", r.configurable.selector) for r in references]


def _iterate_references(values: Iterable) -> Iterator[ConfigurableReference]:
    for value in values:
        if isinstance(value, ConfigurableReference):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iterate_references(value)
        elif isinstance(value, dict):
            yield from _iterate_references([*value.keys(), *value.values()])


def _macros_in(values: Iterable) -> Iterator[str]:
    return ("/".join(r.scopes) for r in _iterate_references(values) if r.selector == "gin.macro")


def _is_required(value) -> bool:
    return isinstance(value, ConfigurableReference) and value.scopes == ["gin.REQUIRED"]
