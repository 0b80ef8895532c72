"""Result files of evaluations: evals/<name>/<step>.json in the run directory, and tables of rankings and benchmarks.

Results of different settings never share a folder. If evals/<name> holds results of other settings, <name>_2 is used, and so
on.
"""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_lab.config.json_files import read_dictionary, read_json, write_json
from t5x_lab.config.object_storage import retry
from t5x_lab.config.steps import parse_step
from t5x_lab.evaluation.evaluation import EvaluationResult
from t5x_lab.evaluation.metrics import benchmarks
from t5x_lab.evaluation.ranking.accuracy import table

FOLDER = "evals"
PROMPTS = "prompts"  # sample texts are stored under this name, like the results of a task
_SETTINGS = "settings.json"
_RENAMED_SETTINGS = {"beginning": "decoder_prefix"}  # old name: new name, in files of earlier versions


class ResultFiles:
    """Result files of one evaluation of a run.

    Args:
      model_dir: the run directory.
      name: name of the evaluation.
      settings: everything its numbers depend on, except the step.
    """

    def __init__(self, model_dir: str, name: str, settings: Mapping[str, Any]):
        self._settings = json.loads(json.dumps(dict(settings), default=str))
        self._root, self._name = epath.Path(model_dir) / FOLDER, name

    @property
    def folder(self) -> epath.Path:
        """The result folder. Looked up on each access, since another process may have created one."""
        return retry(self._find_folder, self._root)

    def _find_folder(self) -> epath.Path:
        for number in itertools.count(1):
            folder = self._root / _numbered(self._name, number)
            if _read_settings(folder) in (None, self._settings):
                return folder
        raise AssertionError("unreachable: itertools.count has no end")

    @property
    def changed_settings(self) -> str:
        """Differences to the settings of the folder <name> if it holds results of other settings, else ""."""
        if self.folder.name == self._name or not (stored := _read_settings(self._root / self._name)):
            return ""
        keys = [key for key in {**stored, **self._settings} if stored.get(key) != self._settings.get(key)]
        return ", ".join(f"{key} was {stored.get(key)}, is {self._settings.get(key)}" for key in keys)

    def write(self, step: int, result: EvaluationResult) -> None:
        """Writes the result of a step atomically.

        Raises:
          OSError: if it cannot be written.
        """
        content = {"step": step, "results": {task: finite_json(metrics) for task, metrics in result.metrics.items()}}
        texts = {
            task: {name: text for name, m in media.items() if (text := media_text(m)) is not None}
            for task, media in result.media.items()
        }
        content |= {"texts": texts} if any(texts.values()) else {}
        content |= {"report": finite_json(result.report)} if result.report else {}
        content |= {"failures": dict(result.failures)} if result.failures else {}
        folder = self._find_folder()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _SETTINGS).exists():
            write_json(folder / _SETTINGS, self._settings, indent=1)
        if "datasets" in result.report:
            (folder / f"{step}.txt").write_text(table(result.report) + "\n")
        write_json(folder / f"{step}.json", content, indent=1)
        if "benchmarks" in result.report:
            self._write_best(folder)

    def _write_best(self, folder: epath.Path) -> None:
        """Writes the best step of each benchmark part: best.json, and a table of it."""
        reports = {step: read_dictionary(folder / f"{step}.json").get("report", {}) for step in self.steps()}
        best = benchmarks.best({step: report["benchmarks"] for step, report in reports.items() if "benchmarks" in report})
        write_json(folder / "best.json", finite_json(best), indent=1)
        (folder / "best.txt").write_text(benchmarks.table(best) + "\n")

    def has(self, step: int) -> bool:
        """Returns whether a step has results. A file that holds nothing but failures does not count."""
        content = self._read(step)
        return bool(content) and bool(content.get("results") or not content.get("failures"))

    def steps(self) -> list[int]:
        """Returns the steps that have results."""
        files = retry(lambda: _list(self._find_folder()), self._root)
        steps = [parse_step(path.stem) for path in files if path.suffix == ".json"]
        return sorted(step for step in steps if step is not None)

    def metric(self, step: int, name: str) -> float:
        """Returns the value of "<task>/<metric>" at a step, NaN if there is none."""
        value = self.computed_metric(step, name)
        return math.nan if value is None else value

    def computed_metric(self, step: int, name: str) -> float | None:
        """Returns the value of "<task>/<metric>" at a step, NaN if it is not finite, None if it was not computed."""
        task, _, metric = name.partition("/")
        metrics = self._read(step).get("results", {}).get(task, {})
        if metric not in metrics:
            return None
        return math.nan if metrics[metric] is None else metrics[metric]

    def _read(self, step: int) -> dict[str, Any]:
        return retry(lambda: read_dictionary(self._find_folder() / f"{step}.json"), self._root)


def _list(folder: epath.Path) -> list[epath.Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _read_settings(folder: epath.Path) -> dict[str, Any] | None:
    settings = read_json(folder / _SETTINGS)
    return settings and {_RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def finite_json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {str(key): finite_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def media_text(media: Any) -> str | None:
    """Returns the text of a `seqio.metrics.Text`, None for any other value."""
    text = getattr(media, "textdata", None)
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return text if isinstance(text, str) else None


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"
