"""Checks of dataclass fields, so that an invalid value is reported with its gin name."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import gin

from t5x_lab.config.errors import NotSet, UserError

_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
    Callable: "a function, bound without parentheses: @name",
    tuple: "a tuple or a list, such as (a, b)",
    dict: 'a dictionary such as {"inputs": 512, "targets": 114}',
}


def check_types(config) -> None:
    """Checks the types of all fields of a dataclass. Annotations may use simple types, dataclasses and protocols.

    Raises:
      UserError: for a value of another type, or one that is not set.
    """
    annotations = typing.get_type_hints(type(config))
    for field in (field.name for field in dataclasses.fields(config)):
        value, annotation = getattr(config, field), annotations[field]
        if value is gin.REQUIRED:
            name = f"{type(config).__name__}.{field}"
            raise NotSet(f"{name} is not set. Set it in a gin file or with --gin.{name}=VALUE, or with its macro.")
        if not _fits(value, annotation):
            raise UserError(
                f"{type(config).__name__}.{field} is {value!r}. It must be {_describe(annotation)}. "
                f"Set it with --gin.{type(config).__name__}.{field}=VALUE, or with its macro."
            )


def check_range(config, field: str, low: float, high: float) -> None:
    """Raises a `UserError` unless the field is None or low <= value < high."""
    value = getattr(config, field)
    if value is not None and not low <= value < high:
        raise UserError(f"{type(config).__name__}.{field} is {value}. It must be at least {low} and below {high}.")


def check_positive(config, *fields: str) -> None:
    """Raises a `UserError` unless each named field of `config` is greater than zero."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and value <= 0:
            raise UserError(f"{type(config).__name__}.{field} is {value}. It must be greater than zero.")


def check_pattern(setting: str, pattern: str) -> None:
    """Raises a `UserError` for an invalid regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f'{setting} is "{pattern}", which is not a valid regular expression: {error}.') from error


def implements(value, protocol: type) -> bool:
    """Returns whether a value is an instance, not a class, with all members that a protocol itself defines.

    Members may come from `__getattr__`, which `isinstance` ignores since Python 3.12. Raises the `UserError` with which
    `__getattr__` explains what is wrong with the value.
    """
    try:
        return not isinstance(value, type) and all(hasattr(value, name) for name in _members(protocol))
    except UserError:
        raise
    except Exception:  # of the value's own `__getattr__`
        return False


def _options(annotation) -> tuple:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _fits(value, annotation) -> bool:
    for option in _options(annotation):
        if option in (object, Any):
            return True  # checked by the class itself
        if _is_protocol(option):
            if implements(value, option):
                return True
            continue
        origin = typing.get_origin(option) or option
        if isinstance(origin, type) and dataclasses.is_dataclass(origin) and isinstance(value, origin):
            return True
        if origin is Callable and callable(value) and not isinstance(value, type):
            return True
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return True
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return True
        if origin is tuple and isinstance(value, tuple | list):
            return True
        if origin in (str, bool, dict, type(None)) and isinstance(value, origin):
            return True
    return False


def _is_protocol(option) -> bool:
    return getattr(option, "_is_protocol", False)


def _members(protocol: type) -> list[str]:
    names = {**vars(protocol), **typing.get_type_hints(protocol)}
    return sorted(name for name in names if not name.startswith("_") or name == "__call__")


def _describe(annotation) -> str:
    return " or ".join(_describe_one(typing.get_origin(option) or option) for option in _options(annotation))


def _describe_one(origin) -> str:
    if not _is_protocol(origin):
        return _NAMES.get(origin, f"@{origin.__name__}()")
    public = [name for name in _members(origin) if name != "__call__"]
    name = origin.__name__
    article = "an" if name[0] in "AEIOU" else "a"
    if not public:
        return f"{article} {name.lower()}, which is callable. Bind an instance with parentheses: @Name()"
    return f"{article} {name.lower()}, with {' and '.join(public)}. Bind an instance with parentheses: @Name()"
