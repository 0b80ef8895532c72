"""The results of evaluations as files of the run directory: evals/<name>/<step>.json, and tables of rankings and benchmarks.

Numbers of different settings are never in one folder: where evals/<name> holds those of others, <name>_2 is taken, and so on.
"""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.config.json_files import read_dictionary, read_json, write_json
from t5x_lab.evaluation import benchmarks
from t5x_lab.evaluation.accuracy import table
from t5x_lab.evaluation.config import Measured

FOLDER = "evals"
PROMPTS = "prompts"  # what texts behind prompts are kept under, as of a task
_SETTINGS = "settings.json"


class ResultFiles:
    """The results of one evaluation of a run.

    Args:
      model_dir: the run's directory.
      name: of the evaluation.
      settings: what its numbers depend on beside the step; texts by name.
    """

    def __init__(self, model_dir: str, name: str, settings: Mapping[str, Any]):
        self._settings = json.loads(json.dumps(dict(settings), default=str))
        self._root, self._name = epath.Path(model_dir) / FOLDER, name

    @property
    def folder(self) -> epath.Path:
        """Where they lie; looked up anew each time, since another process may have begun one."""
        for number in itertools.count(1):
            folder = self._root / _numbered(self._name, number)
            if read_json(folder / _SETTINGS) in (None, self._settings):
                return folder
        raise AssertionError("there is always another number")

    @property
    def moved_from(self) -> str:
        """What differs from the settings of the folder <name>, where that was taken; else ""."""
        if self.folder.name == self._name or not (there := read_json(self._root / self._name / _SETTINGS)):
            return ""
        differ = [key for key in {**there, **self._settings} if there.get(key) != self._settings.get(key)]
        return ", ".join(f"{key} {there.get(key)} there, {self._settings.get(key)} here" for key in differ)

    def write(self, step: int, measured: Measured) -> None:
        """Writes the results of a step, whole or not at all.

        Raises:
          OSError: when they cannot be written.
        """
        found = {"step": step, "results": {task: as_json(metrics) for task, metrics in measured.metrics.items()}}
        texts = {
            task: {name: text for name, m in media.items() if (text := text_of(m)) is not None}
            for task, media in measured.media.items()
        }
        found |= {"texts": texts} if any(texts.values()) else {}
        found |= {"report": as_json(measured.report)} if measured.report else {}
        found |= {"failures": dict(measured.failures)} if measured.failures else {}
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _SETTINGS).exists():
            write_json(folder / _SETTINGS, self._settings, indent=1)
        if "datasets" in measured.report:
            (folder / f"{step}.txt").write_text(table(measured.report) + "\n")
        write_json(folder / f"{step}.json", found, indent=1)
        if "benchmarks" in measured.report:
            self._write_best(folder)

    def _write_best(self, folder: epath.Path) -> None:
        """The best step of each part of benchmarks, of those that there are results of: best.json, and a table of it."""
        read = {step: read_dictionary(folder / f"{step}.json").get("report", {}) for step in self.steps()}
        found = benchmarks.best({step: report["benchmarks"] for step, report in read.items() if "benchmarks" in report})
        write_json(folder / "best.json", as_json(found), indent=1)
        (folder / "best.txt").write_text(benchmarks.table(found) + "\n")

    def has(self, step: int) -> bool:
        return (self.folder / f"{step}.json").exists()

    def steps(self) -> list[int]:
        """Steps that there are results of."""
        folder = self.folder
        if not folder.exists():
            return []
        return sorted(int(path.stem) for path in folder.iterdir() if path.suffix == ".json" and path.stem.isdigit())

    def metric(self, step: int, name: str) -> float:
        """The number "<task>/<metric>" of a step; not a number where it was not measured."""
        task, _, metric = name.partition("/")
        found = read_dictionary(self.folder / f"{step}.json").get("results", {}).get(task, {}).get(metric)
        return math.nan if found is None else found


def as_json(value: Any) -> Any:
    """The same without what JSON does not have: NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text_of(media: Any) -> str | None:
    """The text of a `seqio.metrics.Text`, which may be empty; None of anything else."""
    text = getattr(media, "textdata", None)
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return text if isinstance(text, str) else None


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"
