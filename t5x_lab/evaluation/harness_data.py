"""Data of lm-eval's tasks from the user's files, in place of those of the hub."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from t5x_lab.config.errors import UserError, nearest

OWN_TASKS = str(pathlib.Path(__file__).parent / "eai_eval")
_START = "eai_"  # of the names of our own tasks, which may be left out
_KINDS = {".jsonl": ("json", {}), ".json": ("json", {}), ".csv": ("csv", {}), ".tsv": ("csv", {"delimiter": "\t"})}


def write_task_files(folder: str, index: Mapping[str, Any], tasks: Sequence[str], data: Sequence[str]) -> None:
    """Writes task files that say the same as those of `tasks` but where the data lie.

    Args:
      folder: for them; lm-eval takes them in place of tasks of the same name if it comes last.
      index: lm-eval's, by name.
      tasks: names, of groups too.
      data: "rte=path/to/file.jsonl", or a rule for all, "records/{task}.jsonl"; "eai_" is left out of names. Files are .jsonl,
        .json, .csv, .tsv or .parquet, the first three also gzipped.

    Raises:
      UserError: for a file that is not there, a kind that is not read, a task that is not asked for.
    """
    unnamed = next((task for task in tasks if task not in index), None)
    if unnamed:
        raise UserError(f'--data goes with names of tasks; "{unnamed}" is none that lm-eval lists. Use --include_path.')
    single = {name.removeprefix(_START): name for task in tasks for name in _single_tasks(index, task)}
    rules = [entry for entry in data if "{task}" in entry]
    named = [entry.partition("=") for entry in data if entry not in rules]
    said = {name: path for name, _, path in named}
    for name, _, path in named:
        if not path:
            raise UserError(f'--data is "{name}"; give TASK=PATH, or a rule for all tasks such as "records/{{task}}.jsonl".')
        if name.removeprefix(_START) not in single:
            raise UserError(f'--data says where the data of "{name}" are, which is none of --tasks.{nearest(name, single)}')
    files = {name: rule.replace("{task}", name) for name in single for rule in rules[-1:]}
    files |= {name.removeprefix(_START): path for name, path in said.items()}
    missing = sorted(name for name, path in files.items() if not pathlib.Path(path).exists())
    if missing:
        there = ",".join(single[name] for name in single if name not in missing)
        instead = f" To go on without: --tasks={there}" if there else ""
        raise UserError(f"--data: there is no {files[missing[0]]}; {len(missing)} of {len(files)} tasks have no file.{instead}")
    for name, path in files.items():
        (pathlib.Path(folder) / f"{name}.yaml").write_text(json.dumps(_task_file(index[single[name]], path)))  # which is YAML


def _single_tasks(index: Mapping[str, Any], name: str) -> Iterable[str]:
    """The tasks that a name stands for."""
    parts = index[name].cfg.get("task") if name in index else None
    if isinstance(parts, list):
        return [single for part in parts if isinstance(part, str) for single in _single_tasks(index, part)]
    return [name]


def _task_file(entry: Any, path: str) -> dict[str, Any]:
    splits = [entry.cfg[key] for key in ("test_split", "validation_split") if entry.cfg.get(key)]
    kind, options = _KINDS.get(pathlib.Path(path.removesuffix(".gz")).suffix, ("", {}))
    if path.endswith(".parquet"):
        kind = "parquet"
    if not kind:
        raise UserError(f"--data: {path} is of no kind that is read: .jsonl, .json, .csv, .tsv (or .gz of these), .parquet.")
    of_data = {"data_files": {splits[0]: str(pathlib.Path(path).resolve())}, **options}
    return {
        "include": str(entry.yaml_path),
        "task": entry.name,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": of_data,
    }
