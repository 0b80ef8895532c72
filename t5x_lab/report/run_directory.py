"""What the files of a run directory say of a run; what an older version did not write is left out."""

import dataclasses
import re
from typing import Any

import numpy as np
from etils import epath

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_json
from t5x_lab.evaluation.results import FOLDER
from t5x_lab.observe.curves import NO_LINES, TRAIN, Columns, read_columns, read_references
from t5x_lab.observe.end import is_alive, read_end

FACTS = "run.json"
Numbers = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that an evaluation kept: what it was written behind, by which evaluation and task, after which step."""

    step: int
    evaluation: str
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """A run, as its files have it.

    Attributes:
      path: of its directory.
      state: "finished", "training", "diverged", "stopped" or "new".
      facts: what training wrote of it in run.json: version, model, data, FLOPs, devices.
      columns: metrics.jsonl, by split.
      evaluations: numbers by split, "<name>/<task>", and step.
      tables: by evaluation and step, what it wrote beside its numbers, as text.
      samples: in the order of steps.
      references: by metric, what else has which value, for a dashed line.
      settings: what config.gin binds, as text by name.
      config: config.gin itself.
      checkpoints: their steps.
    """

    path: str
    state: str
    facts: dict[str, Any]
    columns: dict[str, Columns]
    evaluations: dict[str, dict[int, Numbers]]
    tables: dict[str, dict[int, str]]
    samples: list[Sample]
    references: dict[str, dict[str, float]]
    settings: dict[str, str]
    config: str
    checkpoints: list[int]

    @property
    def train(self) -> Columns:
        return self.columns.get(TRAIN, NO_LINES)

    @property
    def first_step(self) -> int:
        """The step that it began with, which is another than 0 where it went on from another run's."""
        return int(self.train.steps[0]) - 1 if len(self.train.steps) else 0

    @property
    def last_step(self) -> int:
        return int(self.train.steps[-1]) if len(self.train.steps) else max(self.checkpoints, default=0)


def read_run(path: str, is_over: bool = False) -> RunFiles:
    """Reads a run directory.

    Args:
      path: of the directory, here or wherever `etils.epath` reaches.
      is_over: whether its training is known to have ended, though it still owns the directory.

    Raises:
      UserError: where there is no run.
    """
    directory = epath.Path(path)
    config = directory / "config.gin"
    columns = read_columns(directory)
    evaluations, tables, samples = _evaluations(directory / FOLDER)
    if not (columns or evaluations or config.exists()):
        what = "holds no run: it has neither config.gin nor metrics.jsonl" if directory.exists() else "is not there"
        raise UserError(f"{path} {what}. Give the MODEL_DIR of a run.")
    for split, of in columns.items():
        if split != TRAIN:
            evaluations[split] = {**_by_step(of), **evaluations.get(split, {})}
    text = config.read_text() if config.exists() else ""
    return RunFiles(
        path=str(path),
        state=_state(directory, columns.get(TRAIN, NO_LINES), is_over),
        facts=_dictionary(directory / FACTS),
        columns=columns,
        evaluations={split: dict(sorted(of.items())) for split, of in sorted(evaluations.items())},
        tables=tables,
        samples=samples,
        references=read_references(directory),
        settings=settings_of(text),
        config=text,
        checkpoints=finished_steps(directory),
    )


def _dictionary(path: epath.Path) -> dict:
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _state(directory: epath.Path, train: Columns, is_over: bool) -> str:
    if read_end(directory) is not None:
        return "finished"
    if not is_over and is_alive(directory):
        return "training"
    if not len(train.steps):
        return "new"
    return "stopped" if np.isfinite(train["loss"][-1]) else "diverged"


def _by_step(columns: Columns) -> dict[int, Numbers]:
    rows = zip(*columns.values.values()) if columns.values else ([] for _ in columns.steps)
    return {
        int(step): {name: float(value) for name, value in zip(columns.values, row) if np.isfinite(value)}
        for step, row in zip(columns.steps, rows)
    }


def _evaluations(folder: epath.Path) -> tuple[dict[str, dict[int, Numbers]], dict[str, dict[int, str]], list[Sample]]:
    numbers: dict[str, dict[int, Numbers]] = {}
    tables: dict[str, dict[int, str]] = {}
    samples: list[Sample] = []
    for of in sorted(folder.iterdir()) if folder.exists() else []:
        files = sorted((file for file in of.glob("*.json") if file.stem.isdigit()), key=lambda file: int(file.stem))
        for step, found in ((int(file.stem), _dictionary(file)) for file in files):
            for task, metrics in found.get("results", {}).items():
                numbers.setdefault(f"{of.name}/{task}", {})[step] = metrics
            if (table := of / f"{step}.txt").exists():
                tables.setdefault(of.name, {})[step] = table.read_text()
            for texts in found.get("texts", {}).values():
                samples += [Sample(step, of.name, name, text) for name, text in texts.items()]
    return numbers, tables, sorted(samples, key=lambda sample: sample.step)


def settings_of(config: str) -> dict[str, str]:
    """What the text of a config.gin binds, by name, as gin writes it; a value on several lines in one."""
    joined = re.sub(r"\\?\n[ \t]+", " ", config)
    bindings = re.findall(r"^([\w./]+) = (.*)$", joined, re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in bindings}
