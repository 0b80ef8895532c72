"""JSON files that are written atomically, on local and remote storage."""

import json
import uuid
from typing import Any

from etils import epath


def read_json(path: epath.Path) -> Any:
    """Returns the content of a file; None if it does not exist or is not valid JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_dictionary(path: epath.Path) -> dict[str, Any]:
    """Returns the dictionary in a file; an empty one if it has none."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def write_json(path: epath.Path, value: Any, indent: int | None = None) -> None:
    """Writes a value atomically. See `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False))


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a temporary file and renames it. Several processes may do so at the same time."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(text)
    unfinished.replace(path)
