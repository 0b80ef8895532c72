"""Reads the files of a run directory, also of older versions."""

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
from t5x_lab.config.regular_files import is_regular_file
from t5x_lab.config.steps import parse_step
from t5x_lab.evaluation.results import FOLDER
from t5x_lab.observe.curves import NO_LINES, REFERENCES, TRAIN, Columns, is_number, read_columns, read_references
from t5x_lab.observe.end import read_end
from t5x_lab.observe.owner import PATIENCE_SECONDS, seconds_since_heartbeat

FACTS = "run.json"
MAX_MACROS = 8  # length of a chain of macros
MAX_SETTING = 10_000  # characters of a value with its macros replaced
Numbers = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A generated text of an evaluation."""

    step: int
    evaluation: str
    task: str
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The contents of a run directory.

    Attributes:
      path: path of the directory.
      state: "finished", "training", "diverged", "stopped", "weights" (checkpoints without metrics) or "new".
      facts: content of run.json: version, model, data, FLOPs, devices.
      columns: metrics.jsonl by split.
      evaluations: metrics by split, "<evaluation>/<task>", and step.
      tables: text tables by evaluation and step.
      failures: failure messages by evaluation and step.
      samples: generated texts in the order of steps.
      references: reference values by metric and name.
      settings: bindings of config.gin, as text by name.
      config: config.gin.
      checkpoints: steps of checkpoints.
      end: last step of a run that has ended, otherwise None.
      silent: seconds since the last heartbeat of the training process. None = no process.
      damaged: files and lines that are damaged, or belong to lost steps.
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
        """Returns the value bound to a name, with macros replaced by their values, or None."""
        value = self.settings.get(name)
        for _ in range(MAX_MACROS if value else 0):
            value = re.sub(r"%([\w./]+)", lambda macro: self.settings.get(macro[1], macro[0]), value or "")
            if len(value) > MAX_SETTING:
                break  # macros of macros grow exponentially
        return value

    def number(self, fact: str) -> float:
        """Returns a number of run.json, or the value of the macro of that name in config.gin; NaN if there is none."""
        value: Any = self.facts.get(fact)
        bound = self.setting(fact.upper()) or ""
        return float(value) if is_number(value) else float("nan") if (step := parse_step(bound)) is None else float(step)

    @property
    def has_total_flops(self) -> bool:
        """Whether the metrics have the FLOPs since the start. Runs of earlier versions do not, and their steps are equal."""
        return bool(np.isfinite(self.train["flops"]).any())

    @property
    def is_bad(self) -> np.ndarray:
        """Whether the loss or gradient of each training step was not finite, bool [N]."""
        bad = ~np.isfinite(self.train["loss"]) & ("loss" in self.train.values)
        if "grad_norm" in self.train.values:
            measured = np.isfinite(self.train["grad_norm"])
            first = int(np.argmax(measured)) if len(measured) else 0  # older versions did not write it
            bad[first:] |= ~measured[first:]
        return bad

    @property
    def first_step(self) -> int:
        """First step of the run; not 0 if it continues another run."""
        return int(self.train.steps[0]) - 1 if len(self.train.steps) else 0

    @property
    def tokens_before(self) -> float:
        """Tokens processed by the run that this one continues, which its totals include."""
        if not len(self.train.steps):
            return 0.0
        first = {name: float(self.train[name][0]) for name in ("tokens_processed", "tokens_per_second", "seconds_per_step")}
        step_tokens = first["tokens_per_second"] * first["seconds_per_step"]
        before = first["tokens_processed"] - step_tokens
        return max(0.0, round(before)) if np.isfinite(before) else 0.0

    @property
    def evaluated(self) -> list[str]:
        """Names of all evaluations, with metrics or without."""
        names = [split.partition("/")[0] for split in self.evaluations]
        return list(dict.fromkeys([*names, *self.tables, *self.failures, *(sample.evaluation for sample in self.samples)]))

    @property
    def last_step(self) -> int:
        last = int(self.train.steps[-1]) if len(self.train.steps) else max(self.checkpoints, default=0)
        return max(last, self.end or 0)


def read_run(path: str, is_over: bool = False) -> RunFiles:
    """Reads a run directory.

    Args:
      path: path of the directory, local or remote.
      is_over: training has ended, although the process still owns the directory.

    Raises:
      UserError: if it is not a run directory.
    """
    directory = epath.Path(path)
    config = directory / "config.gin"
    damaged: list[str] = []
    columns = read_columns(directory, damaged)
    evaluations, tables, failures, samples = _evaluations(directory / FOLDER, damaged)
    _add_from_metrics(evaluations, columns)
    if not (columns or evaluations or config.exists()):
        problem = (
            "is not a run directory: it has neither config.gin nor metrics.jsonl" if directory.exists() else "does not exist"
        )
        raise UserError(f"{path} {problem}. Use the MODEL_DIR of a run{_suggest_run(directory)}.")
    text = _text(config) if is_regular_file(config) else ""
    dictionaries = {file: read_dictionary(directory / file) for file in (FACTS, REFERENCES)}
    damaged += [file for file, values in dictionaries.items() if not values and (directory / file).exists()]
    silent = None if is_over else seconds_since_heartbeat(directory)
    run = RunFiles(
        path=str(path),
        state="new",
        facts=dictionaries[FACTS],
        columns=columns,
        evaluations={split: dict(sorted(by_step.items())) for split, by_step in sorted(evaluations.items())},
        tables=tables,
        failures=failures,
        samples=samples,
        references=read_references(directory),
        settings=parse_settings(text),
        config=text,
        checkpoints=finished_steps(directory),
        end=read_end(directory),
        silent=silent,
        damaged=damaged,
    )
    run = dataclasses.replace(run, state=_state(run))
    return run if run.state == "training" else _without_lost_steps(run)


def _without_lost_steps(run: RunFiles) -> RunFiles:
    """Removes evaluations of lost steps, which are later than the checkpoint that training continued from."""
    last = max(run.last_step, *run.checkpoints, 0) if len(run.train.steps) else math.inf
    select = lambda by_step: {step: value for step, value in by_step.items() if step <= last}
    selected = dataclasses.replace(
        run,
        evaluations={split: within for split, by_step in run.evaluations.items() if (within := select(by_step))},
        tables={name: within for name, by_step in run.tables.items() if (within := select(by_step))},
        failures={name: within for name, by_step in run.failures.items() if (within := select(by_step))},
        samples=[sample for sample in run.samples if sample.step <= last],
    )
    lost = (selected.evaluations, selected.tables, selected.samples) != (run.evaluations, run.tables, run.samples)
    return dataclasses.replace(selected, damaged=[*run.damaged, *[f"evaluations after step {last:,}"] * lost])


def _suggest_run(directory: epath.Path) -> str:
    """Returns ", such as <run>" for a run directory inside or around a path, or ""."""
    inside = sorted(candidate.parent for candidate in directory.glob("*/config.gin")) if directory.is_dir() else []
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
    return "diverged" if in_a_row > (parse_step(allowed) or 0) else "stopped"


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the dictionary under a name; an empty one if there is none."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _by_step(columns: Columns) -> dict[int, Numbers]:
    rows = zip(*columns.values.values()) if columns.values else ([] for _ in columns.steps)
    return {
        int(step): {name: float(value) for name, value in zip(columns.values, row) if np.isfinite(value)}
        for step, row in zip(columns.steps, rows)
    }


def _add_from_metrics(evaluations: dict[str, dict[int, Numbers]], columns: Mapping[str, Columns]) -> None:
    """Adds evaluations that only metrics.jsonl has, because files are missing, damaged or of an older version.

    Result files of other settings are in a separate folder such as "eval_2", which metrics.jsonl does not distinguish.
    """
    in_files = {(split, step) for split, by_step in evaluations.items() for step in by_step}
    folders = {split.partition("/")[0] for split in evaluations}
    for split, step in list(in_files):
        first = re.match(r"([^/]*)_\d+/", split)
        if first and first[1] in folders:
            in_files.add((first[1] + split[first.end() - 1 :], step))
    for split, by_step in columns.items():
        if split != TRAIN:
            missing = {step: numbers for step, numbers in _by_step(by_step).items() if (split, step) not in in_files}
            if missing:
                evaluations.setdefault(split, {}).update(missing)


def _evaluations(
    folder: epath.Path, damaged: list[str]
) -> tuple[dict[str, dict[int, Numbers]], dict[str, dict[int, str]], dict[str, dict[int, list[str]]], list[Sample]]:
    numbers: dict[str, dict[int, Numbers]] = {}
    tables: dict[str, dict[int, str]] = {}
    failures: dict[str, dict[int, list[str]]] = {}
    samples: list[Sample] = []
    for by_step in sorted(folder.iterdir()) if folder.is_dir() else []:
        files = {step: file for file in by_step.glob("*.json") if (step := parse_step(file.stem)) is not None}
        for step, content in ((step, read_dictionary(file)) for step, file in sorted(files.items())):
            if not content:
                damaged.append(f"{FOLDER}/{by_step.name}/{step}.json")
                continue
            results = _mapping(content, "results")
            for task in results:
                task_metrics = _mapping(results, task).items()
                values = {name: value for name, value in task_metrics if value is None or is_number(value)}
                numbers.setdefault(f"{by_step.name}/{task}", {})[step] = values
            if is_regular_file(table := by_step / f"{step}.txt"):
                tables.setdefault(by_step.name, {})[step] = _text(table)
            messages = [f"{task}: {message}".removeprefix(": ") for task, message in _mapping(content, "failures").items()]
            failures.setdefault(by_step.name, {})[step] = messages
            texts = _mapping(content, "texts")
            for task in texts:
                samples += [Sample(step, by_step.name, task, name, str(text)) for name, text in _mapping(texts, task).items()]
    return numbers, tables, failures, sorted(samples, key=lambda sample: sample.step)


def parse_settings(config: str) -> dict[str, str]:
    """Returns the bindings of a config.gin text by name, with multi-line values joined."""
    joined = re.sub(r"\\?\n[ \t]+", " ", config)
    bindings = re.findall(r"^([\w./]+) = (.*)$", joined, re.MULTILINE)
    return {name: value.strip() for name, value in bindings}
