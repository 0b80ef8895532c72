"""Fields that a macro of gin feeds: who knows T5X sets BATCH_SIZE, not DataConfig.batch_size."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any


def macro(name: str) -> dict[str, str]:
    """Metadata of a dataclass's field that the macro feeds; its default is the macro's."""
    return {"macro": name}


def lines_of(classes: Iterable[type]) -> list[str]:
    """What gin reads before every file: the macros' defaults, and which parameters they feed."""
    of_gin = filter(dataclasses.is_dataclass, classes)
    fields = [(cls.__name__, field) for cls in of_gin for field in dataclasses.fields(cls) if "macro" in field.metadata]
    defaults = {field.metadata["macro"]: _default(field) for _, field in fields}
    return [
        *(f"{macro} = {value!r}" for macro, value in defaults.items() if value is not dataclasses.MISSING),
        *(f"{cls}.{field.name} = %{field.metadata['macro']}" for cls, field in fields),
    ]


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def defined_in(text: str) -> list[str]:
    """The macros that gin's text gives a value."""
    return re.findall(r"^([A-Z][A-Z0-9_]*) *=", text, re.MULTILINE)
