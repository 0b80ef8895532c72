"""What the files of a run directory say of a run; what an older version did not write is left out."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x_lab.checkpoints.layout import finished_steps
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import read_dictionary
from t5x_lab.evaluation.results import FOLDER
from t5x_lab.observe.curves import NO_LINES, REFERENCES, TRAIN, Columns, is_number, read_columns, read_references
from t5x_lab.observe.end import read_end
from t5x_lab.observe.owner import PATIENCE_SECONDS, seconds_without_sign

FACTS = "run.json"
MOST_MACROS = 8  # that lead from one to the next
Numbers = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that an evaluation kept: after which step, of which evaluation and task, under which name."""

    step: int
    evaluation: str
    task: str
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
      failures: by evaluation and step, why results lack something, in sentences.
      samples: in the order of steps.
      references: by metric, what else has which value, for a dashed line.
      settings: what config.gin binds, as text by name.
      config: config.gin itself.
      checkpoints: their steps.
      end: the step that training ended with; None of one that goes on, or was interrupted.
      silent: seconds since whoever trains it gave a sign of life; None where nobody does.
      damaged: which of its files, and lines of them, cannot be read, or are of steps that were lost.
    """

    path: str
    state: str
    facts: dict[str, Any]
    columns: dict[str, Columns]
    evaluations: dict[str, dict[int, Numbers]]
    tables: dict[str, dict[int, str]]
    failures: dict[str, dict[int, list[str]]]
    samples: list[Sample]
    references: dict[str, dict[str, float]]
    settings: dict[str, str]
    config: str
    checkpoints: list[int]
    end: int | None
    silent: float | None
    damaged: list[str]

    @property
    def train(self) -> Columns:
        return self.columns.get(TRAIN, NO_LINES)

    def setting(self, name: str) -> str | None:
        """What is bound to a name, with the values of macros in their places; None where nothing is."""
        value = self.settings.get(name)
        for _ in range(MOST_MACROS if value else 0):
            value = re.sub(r"%([\w./]+)", lambda macro: self.settings.get(macro[1], macro[0]), value or "")
        return value

    def number(self, fact: str) -> float:
        """A number of run.json, or what config.gin binds the macro of that name to; not a number where there is none."""
        value: Any = self.facts.get(fact)
        bound = self.setting(fact.upper()) or ""
        return float(value) if is_number(value) else float(bound) if bound.isdigit() else float("nan")

    @property
    def is_bad(self) -> np.ndarray:
        """Bool, for each line of training, whether the step's loss or gradient was not finite."""
        bad = ~np.isfinite(self.train["loss"]) & ("loss" in self.train.values)
        if "grad_norm" in self.train.values:
            measured = np.isfinite(self.train["grad_norm"])
            first = int(np.argmax(measured)) if len(measured) else 0  # an older version did not measure it
            bad[first:] |= ~measured[first:]
        return bad

    @property
    def first_step(self) -> int:
        """The step that it began with, which is another than 0 where it went on from another run's."""
        return int(self.train.steps[0]) - 1 if len(self.train.steps) else 0

    @property
    def tokens_before(self) -> float:
        """Tokens processed of the run that it went on from, which its totals go on from too."""
        if not len(self.train.steps):
            return 0.0
        first = {name: float(self.train[name][0]) for name in ("tokens_processed", "tokens_per_second", "seconds_per_step")}
        of_step = first["tokens_per_second"] * first["seconds_per_step"]
        before = first["tokens_processed"] - of_step
        return max(0.0, round(before)) if np.isfinite(before) else 0.0

    @property
    def evaluated(self) -> list[str]:
        """The names of its evaluations, with numbers or without."""
        names = [split.partition("/")[0] for split in self.evaluations]
        return list(dict.fromkeys([*names, *self.tables, *self.failures, *(sample.evaluation for sample in self.samples)]))

    @property
    def last_step(self) -> int:
        last = int(self.train.steps[-1]) if len(self.train.steps) else max(self.checkpoints, default=0)
        return max(last, self.end or 0)


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
    _add_from_metrics(evaluations, columns)
    if not (columns or evaluations or config.exists()):
        what = "holds no run: it has neither config.gin nor metrics.jsonl" if directory.exists() else "is not there"
        raise UserError(f"{path} {what}. Give the MODEL_DIR of a run{_near(directory)}.")
    text = _text(config) if config.exists() else ""
    found = {file: read_dictionary(directory / file) for file in (FACTS, REFERENCES)}
    damaged += [file for file, values in found.items() if not values and (directory / file).exists()]
    silent = None if is_over else seconds_without_sign(directory)
    run = RunFiles(
        path=str(path),
        state="new",
        facts=found[FACTS],
        columns=columns,
        evaluations={split: dict(sorted(of.items())) for split, of in sorted(evaluations.items())},
        tables=tables,
        failures=failures,
        samples=samples,
        references=read_references(directory),
        settings=settings_of(text),
        config=text,
        checkpoints=finished_steps(directory),
        end=read_end(directory),
        silent=silent,
        damaged=damaged,
    )
    run = dataclasses.replace(run, state=_state(run))
    return run if run.state == "training" else _without_lost_steps(run)


def _without_lost_steps(run: RunFiles) -> RunFiles:
    """Without evaluations of steps that were lost, since training went on from a checkpoint before them."""
    last = max(run.last_step, *run.checkpoints, 0) if len(run.train.steps) else math.inf
    kept = lambda of: {step: value for step, value in of.items() if step <= last}
    some = dataclasses.replace(
        run,
        evaluations={split: within for split, of in run.evaluations.items() if (within := kept(of))},
        tables={name: within for name, of in run.tables.items() if (within := kept(of))},
        failures={name: within for name, of in run.failures.items() if (within := kept(of))},
        samples=[sample for sample in run.samples if sample.step <= last],
    )
    lost = (some.evaluations, some.tables, some.samples) != (run.evaluations, run.tables, run.samples)
    return dataclasses.replace(some, damaged=[*run.damaged, *[f"evaluations after step {last:,}"] * lost])


def _near(directory: epath.Path) -> str:
    """A run that a folder has in it, or that a file is of."""
    inside = sorted(found.parent for found in directory.glob("*/config.gin")) if directory.is_dir() else []
    around = [parent for parent in (directory.parent, directory.parent.parent) if (parent / "config.gin").exists()]
    return "".join(f", such as {run}" for run in [*inside, *around][:1])


def _text(path: epath.Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _state(run: RunFiles) -> str:
    if run.end is not None:
        return "finished"
    if run.silent is not None and run.silent < PATIENCE_SECONDS:
        return "training"
    if not len(run.train.steps):
        return "weights" if run.checkpoints else "new"
    allowed, bad = run.setting("BAD_STEPS") or "0", run.is_bad
    in_a_row = len(bad) if bad.all() else int(np.argmin(bad[::-1]))
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


def _add_from_metrics(evaluations: dict[str, dict[int, Numbers]], columns: Mapping[str, Columns]) -> None:
    """Adds what metrics.jsonl alone has: an older version wrote no files, and one may be lost or damaged.

    Files keep results of other settings apart, in a folder "eval_2" beside "eval", which metrics.jsonl does not.
    """
    in_files = {(split, step) for split, of in evaluations.items() for step in of}
    folders = {split.partition("/")[0] for split in evaluations}
    for split, step in list(in_files):
        first = re.match(r"([^/]*)_\d+/", split)
        if first and first[1] in folders:
            in_files.add((first[1] + split[first.end() - 1 :], step))
    for split, of in columns.items():
        if split != TRAIN:
            missing = {step: numbers for step, numbers in _by_step(of).items() if (split, step) not in in_files}
            if missing:
                evaluations.setdefault(split, {}).update(missing)


def _evaluations(
    folder: epath.Path, damaged: list[str]
) -> tuple[dict[str, dict[int, Numbers]], dict[str, dict[int, str]], dict[str, dict[int, list[str]]], list[Sample]]:
    numbers: dict[str, dict[int, Numbers]] = {}
    tables: dict[str, dict[int, str]] = {}
    failures: dict[str, dict[int, list[str]]] = {}
    samples: list[Sample] = []
    for of in sorted(folder.iterdir()) if folder.is_dir() else []:
        files = sorted((file for file in of.glob("*.json") if file.stem.isdigit()), key=lambda file: int(file.stem))
        for step, found in ((int(file.stem), read_dictionary(file)) for file in files):
            if not found:
                damaged.append(f"{FOLDER}/{of.name}/{step}.json")
                continue
            results = _mapping(found, "results")
            for task in results:
                measured = _mapping(results, task).items()
                of_step = {name: value for name, value in measured if value is None or is_number(value)}
                numbers.setdefault(f"{of.name}/{task}", {})[step] = of_step
            if (table := of / f"{step}.txt").exists():
                tables.setdefault(of.name, {})[step] = _text(table)
            why = [f"{task}: {why}".removeprefix(": ") for task, why in _mapping(found, "failures").items()]
            failures.setdefault(of.name, {})[step] = why
            texts = _mapping(found, "texts")
            for task in texts:
                samples += [Sample(step, of.name, task, name, str(text)) for name, text in _mapping(texts, task).items()]
    return numbers, tables, failures, sorted(samples, key=lambda sample: sample.step)


def settings_of(config: str) -> dict[str, str]:
    """What the text of a config.gin binds, by name, as gin writes it; a value on several lines in one."""
    joined = re.sub(r"\\?\n[ \t]+", " ", config)
    bindings = re.findall(r"^([\w./]+) = (.*)$", joined, re.MULTILINE)
    return {name: value.strip() for name, value in bindings}
