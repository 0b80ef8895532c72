"""JSON in files that other processes read while they are written: whole or not at all, wherever `etils.epath` reaches."""

import json
import uuid
from typing import Any

from etils import epath


def read_json(path: epath.Path) -> Any:
    """What a file holds; None where it is not there, or not whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_dictionary(path: epath.Path) -> dict[str, Any]:
    """The same, where a file is to hold a dictionary; an empty one where it holds none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def write_json(path: epath.Path, value: Any, indent: int | None = None) -> None:
    """Writes a value; see `write_whole`."""
    write_whole(path, json.dumps(value, indent=indent, ensure_ascii=False))


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file under a name of its own, and gives it its name when it is whole; several processes may do so at once."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(text)
    unfinished.replace(path)
