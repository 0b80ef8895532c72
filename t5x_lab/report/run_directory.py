"""What the files of a run directory say of a run; what an older version did not write is left out."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_json
from t5x_lab.evaluation.results import FOLDER
from t5x_lab.observe.curves import NO_LINES, TRAIN, Columns, is_number, read_columns, read_references
from t5x_lab.observe.end import PATIENCE_SECONDS, read_end, seconds_without_sign

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
      state: "finished", "training", "diverged", "stopped", "weights" (checkpoints without metrics) or "new".
      facts: what training wrote of it in run.json: version, model, data, FLOPs, devices.
      columns: metrics.jsonl, by split.
      evaluations: numbers by split, "<name>/<task>", and step.
      tables: by evaluation and step, what it wrote beside its numbers, as text.
      failures: by evaluation, why its last results lack something, in sentences.
      samples: in the order of steps.
      references: by metric, what else has which value, for a dashed line.
      settings: what config.gin binds, as text by name.
      config: config.gin itself.
      checkpoints: their steps.
      silent: seconds since whoever trains it gave a sign of life; None where nobody does.
      damaged: which of its files, and lines of them, cannot be read.
    """

    path: str
    state: str
    facts: dict[str, Any]
    columns: dict[str, Columns]
    evaluations: dict[str, dict[int, Numbers]]
    tables: dict[str, dict[int, str]]
    failures: dict[str, list[str]]
    samples: list[Sample]
    references: dict[str, dict[str, float]]
    settings: dict[str, str]
    config: str
    checkpoints: list[int]
    silent: float | None
    damaged: list[str]

    @property
    def train(self) -> Columns:
        return self.columns.get(TRAIN, NO_LINES)

    def setting(self, name: str) -> str | None:
        """What is bound to a name, with the values of macros in their places; None where nothing is."""
        value = self.settings.get(name)
        return value and re.sub(r"%([\w./]+)", lambda macro: self.settings.get(macro[1], macro[0]), value)

    def number(self, fact: str) -> float:
        """A number of run.json; not a number where it has none."""
        value: Any = self.facts.get(fact)
        return float(value) if is_number(value) else float("nan")

    @property
    def is_bad(self) -> np.ndarray:
        """Bool, for each line of training, whether the step's loss or gradient was not finite."""
        bad = np.zeros(len(self.train.steps), bool)
        for name in ("loss", "grad_norm"):
            if name in self.train.values:
                bad |= ~np.isfinite(self.train[name])
        return bad

    @property
    def first_step(self) -> int:
        """The step that it began with, which is another than 0 where it went on from another run's."""
        return int(self.train.steps[0]) - 1 if len(self.train.steps) else 0

    @property
    def tokens_before(self) -> float:
        """Tokens processed of the run that it went on from, which its totals go on from too."""
        first = {name: float(self.train[name][0]) for name in ("tokens_processed", "tokens_per_second", "seconds_per_step")}
        before = first["tokens_processed"] - round(first["tokens_per_second"] * first["seconds_per_step"])
        return max(0.0, before) if np.isfinite(before) else 0.0

    @property
    def evaluated(self) -> list[str]:
        """The names of its evaluations, with numbers or without."""
        names = [split.partition("/")[0] for split in self.evaluations]
        return list(dict.fromkeys([*names, *self.tables, *self.failures, *(sample.evaluation for sample in self.samples)]))

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
    damaged: list[str] = []
    columns = read_columns(directory, damaged)
    evaluations, tables, failures, samples = _evaluations(directory / FOLDER, damaged)
    in_files = {split.partition("/")[0] for split in evaluations}
    if not (columns or evaluations or config.exists()):
        what = "holds no run: it has neither config.gin nor metrics.jsonl" if directory.exists() else "is not there"
        raise UserError(f"{path} {what}. Give the MODEL_DIR of a run{_near(directory)}.")
    for split, of in columns.items():
        if split != TRAIN and split.partition("/")[0] not in in_files:  # files keep those of other settings apart
            evaluations[split] = _by_step(of)
    text = config.read_bytes().decode(errors="replace") if config.exists() else ""
    facts = _dictionary(directory / FACTS)
    if not facts and (directory / FACTS).exists():
        damaged.append(FACTS)
    silent = None if is_over else seconds_without_sign(directory)
    run = RunFiles(
        path=str(path),
        state="new",
        facts=facts,
        columns=columns,
        evaluations={split: dict(sorted(of.items())) for split, of in sorted(evaluations.items())},
        tables=tables,
        failures=failures,
        samples=samples,
        references=read_references(directory),
        settings=settings_of(text),
        config=text,
        checkpoints=finished_steps(directory),
        silent=silent,
        damaged=damaged,
    )
    return dataclasses.replace(run, state=_state(run, read_end(directory) is not None))


def _near(directory: epath.Path) -> str:
    """A run that a folder has in it, or that a file is of."""
    inside = sorted(found.parent for found in directory.glob("*/config.gin")) if directory.is_dir() else []
    around = [parent for parent in (directory.parent, directory.parent.parent) if (parent / "config.gin").exists()]
    return "".join(f", such as {run}" for run in [*inside, *around][:1])


def _dictionary(path: epath.Path) -> dict:
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _state(run: RunFiles, has_ended: bool) -> str:
    if has_ended:
        return "finished"
    if run.silent is not None and run.silent < PATIENCE_SECONDS:
        return "training"
    if not len(run.train.steps):
        return "weights" if run.checkpoints else "new"
    allowed = run.setting("BAD_STEPS") or "0"
    in_a_row = len(run.is_bad) if run.is_bad.all() else int(np.argmin(run.is_bad[::-1]))
    return "diverged" if in_a_row > (int(allowed) if allowed.isdigit() else 0) else "stopped"


def _mapping(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a file has under a name, where that is a dictionary."""
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def _by_step(columns: Columns) -> dict[int, Numbers]:
    rows = zip(*columns.values.values()) if columns.values else ([] for _ in columns.steps)
    return {
        int(step): {name: float(value) for name, value in zip(columns.values, row) if np.isfinite(value)}
        for step, row in zip(columns.steps, rows)
    }


def _evaluations(
    folder: epath.Path, damaged: list[str]
) -> tuple[dict[str, dict[int, Numbers]], dict[str, dict[int, str]], dict[str, list[str]], list[Sample]]:
    numbers: dict[str, dict[int, Numbers]] = {}
    tables: dict[str, dict[int, str]] = {}
    failures: dict[str, list[str]] = {}
    samples: list[Sample] = []
    for of in sorted(folder.iterdir()) if folder.exists() else []:
        files = sorted((file for file in of.glob("*.json") if file.stem.isdigit()), key=lambda file: int(file.stem))
        for step, found in ((int(file.stem), _dictionary(file)) for file in files):
            results = _mapping(found, "results")
            for task in results:
                measured = _mapping(results, task).items()
                of_step = {name: value for name, value in measured if value is None or is_number(value)}
                numbers.setdefault(f"{of.name}/{task}", {})[step] = of_step
            if not found:
                damaged.append(f"{FOLDER}/{of.name}/{step}.json")
            if (table := of / f"{step}.txt").exists():
                tables.setdefault(of.name, {})[step] = table.read_text()
            failures[of.name] = [f"{task}: {why}".removeprefix(": ") for task, why in _mapping(found, "failures").items()]
            texts = _mapping(found, "texts")
            for kind in texts:
                samples += [Sample(step, of.name, name, str(text)) for name, text in _mapping(texts, kind).items()]
    return numbers, tables, failures, sorted(samples, key=lambda sample: sample.step)


def settings_of(config: str) -> dict[str, str]:
    """What the text of a config.gin binds, by name, as gin writes it; a value on several lines in one."""
    joined = re.sub(r"\\?\n[ \t]+", " ", config)
    bindings = re.findall(r"^([\w./]+) = (.*)$", joined, re.MULTILINE)
    return {name: " ".join(value.split()) for name, value in bindings}
