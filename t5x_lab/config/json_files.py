"""JSON files that are written atomically, on local and remote storage."""

import json
import uuid
from typing import Any

from etils import epath

from t5x_lab.config.object_storage import is_object_storage
from t5x_lab.config.regular_files import is_regular_file

MAX_DEPTH = 100  # levels of lists and objects


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Returns the value of a JSON text of any origin. Options are those of `json.loads`.

    Raises:
      ValueError: if the text is not valid JSON, or nested more than `MAX_DEPTH` levels deep. Functions that call themselves
        for each level would exceed Python's recursion limit.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        entries = [entry for x in level for entry in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
        level = [entry for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def read_json(path: epath.Path) -> Any:
    """Returns the content of a file; None if it does not exist or is not valid JSON. Errors of object storage are raised."""
    try:
        return parse_json(path.read_text()) if is_regular_file(path) else None
    except (FileNotFoundError, ValueError):
        return None
    except OSError:
        if is_object_storage(path):
            raise
        return None


def read_dictionary(path: epath.Path) -> dict[str, Any]:
    """Returns the dictionary in a file; an empty one if it has none."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def write_json(path: epath.Path, value: Any, indent: int | None = None) -> None:
    """Writes a value atomically. See `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False))


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a whole file or nothing. Several processes may do so at the same time."""
    if is_object_storage(path):  # an object is visible when all of it is there, and renaming would copy it
        path.write_text(text)
        return
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    unfinished.write_text(text)
    unfinished.replace(path)
