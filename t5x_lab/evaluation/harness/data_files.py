"""Local data files for lm-eval's tasks, in place of the hub's."""

import csv
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.data.sources.file_types import file_type, open_file

# Readers of `datasets` and their options. Quotes in .tsv files are text, as in all readers of t5x_lab.
_READERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "jsonl": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE}),
    "parquet": ("parquet", {}),
}


def write_task_files(
    folder: str, index: Mapping[str, Any], tasks: Sequence[str], data: Sequence[str], name_prefix: str = ""
) -> None:
    """Writes copies of the tasks' files that read local data.

    Args:
      folder: target folder. If it is the last include path, lm-eval prefers its files over tasks of the same name.
      index: lm-eval's task index, by name.
      tasks: names of tasks and groups.
      data: "rte=path/to/file.jsonl", or a pattern for all tasks, "records/{task}.jsonl". Files are .jsonl, .json, .csv, .tsv
        (also .gz or .zst) or .parquet.
      name_prefix: prefix of task names that `data` leaves out.

    Raises:
      UserError: for a missing file, an unsupported file type, or a task that is not in `tasks`.
    """
    unlisted = next((task for task in tasks if task not in index), None)
    if unlisted:
        raise UserError(f'--data needs names of tasks, and lm-eval has no task "{unlisted}". Use --include_path.')
    full_names = {name.removeprefix(name_prefix): name for task in tasks for name in _expand_group(index, task)}
    patterns = [entry for entry in data if "{task}" in entry]
    pairs = [entry.partition("=") for entry in data if entry not in patterns]
    for name, _, path in pairs:
        if not path:
            raise UserError(f'--data is "{name}". Write TASK=PATH, or a pattern such as "records/{{task}}.jsonl".')
        if name.removeprefix(name_prefix) not in full_names:
            raise UserError(f'--data has a file for "{name}", which is not in --tasks.{did_you_mean(name, full_names)}')
    files = {name: pattern.replace("{task}", name) for name in full_names for pattern in patterns[-1:]}
    files |= {name.removeprefix(name_prefix): path for name, _, path in pairs}
    missing = sorted(name for name, path in files.items() if not pathlib.Path(path).exists())
    if missing:
        available = ",".join(full_names[name] for name in full_names if name not in missing)
        hint = f" To run only the others, set --tasks={available}" if available else ""
        raise UserError(f"--data: there is no {files[missing[0]]}. {len(missing)} of {len(files)} tasks have no file.{hint}")
    for name, path in files.items():
        content = json.dumps(_task_file(index[full_names[name]], path, folder))  # JSON is valid YAML
        (pathlib.Path(folder) / f"{name}.yaml").write_text(content)


def _expand_group(index: Mapping[str, Any], name: str) -> Iterable[str]:
    """Returns the tasks of a group, or the task itself."""
    members = index[name].cfg.get("task") if name in index else None
    if isinstance(members, list):
        return [task for member in members if isinstance(member, str) for task in _expand_group(index, member)]
    return [name]


def _task_file(entry: Any, path: str, folder: str) -> dict[str, Any]:
    splits = [entry.cfg[key] for key in ("test_split", "validation_split") if entry.cfg.get(key)]
    kind, compression = dataclasses.astuple(file_type(path, tuple(_READERS)))
    if compression == "zstd":  # `datasets` needs another package for these
        with open_file(path, compression) as compressed, open(pathlib.Path(folder) / f"{entry.name}.{kind}", "wb") as plain:
            shutil.copyfileobj(compressed, plain)
        path = plain.name
    reader, options = _READERS[kind]
    dataset_kwargs = {"data_files": {splits[0]: str(pathlib.Path(path).resolve())}, **options}
    return {
        "include": str(entry.yaml_path),
        "task": entry.name,
        "dataset_path": reader,
        "dataset_name": None,
        "dataset_kwargs": dataset_kwargs,
    }
