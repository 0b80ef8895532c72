"""Gin macros for dataclass fields: users of T5X set BATCH_SIZE, not DataConfig.batch_size."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any


def macro(name: str) -> dict[str, str]:
    """Returns metadata for a dataclass field that is bound to a macro. The field's default is the macro's default."""
    return {"macro": name}


def macro_bindings(classes: Iterable[type]) -> list[str]:
    """Returns gin bindings: defaults of the macros, and parameters bound to them."""
    dataclass_types = filter(dataclasses.is_dataclass, classes)
    fields = [
        (cls.__name__, field) for cls in dataclass_types for field in dataclasses.fields(cls) if "macro" in field.metadata
    ]
    defaults = {field.metadata["macro"]: _default(field) for _, field in fields}
    return [
        *(f"{macro} = {value!r}" for macro, value in defaults.items() if value is not dataclasses.MISSING),
        *(f"{cls}.{field.name} = %{field.metadata['macro']}" for cls, field in fields),
    ]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defined_macros(text: str) -> list[str]:
    """Returns the macros that a gin text defines."""
    return re.findall(r"^([A-Z][A-Z0-9_]*) *=", text, re.MULTILINE)
