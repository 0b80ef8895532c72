"""Evaluation results of a report: tables of metrics by step or run, and generated texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lab.evaluation.results import PROMPTS
from t5x_lab.report.charts import COUNTS
from t5x_lab.report.run_directory import Numbers, RunFiles, Sample

MAX_STEPS, MAX_SAMPLES = 8, 200  # columns of a table, texts of a page
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}  # control characters


def evaluation_tables(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns for each evaluation a table with a row per task and metric, its own text tables, and failures.

    The columns are steps for one run, or the last results of each run. In these, a task without results at that step has its
    last results, with their step.
    """
    evaluation_results: dict[str, dict[str, Any]] = {}
    for evaluation in dict.fromkeys(name for run in runs for name in run.evaluated):
        splits = [s for s in dict.fromkeys(s for run in runs for s in run.evaluations) if s.partition("/")[0] == evaluation]
        measured = [sorted({step for split in splits for step in run.evaluations.get(split, {})}) for run in runs]
        if len(runs) == 1:
            columns = [(f"step {step:,}", runs[0], step) for step in select_evenly(measured[0], MAX_STEPS)]
        else:
            last = [(f", step {steps[-1]:,}", steps[-1]) if steps else ("", 0) for steps in measured]
            columns = [(name + note, run, step) for name, run, (note, step) in zip(names, runs, last)]
        rows = []
        for split in splits:
            results = [
                _results(run.evaluations.get(split, {}), step, or_last=len(runs) > 1 or number == len(columns))
                for number, (_, run, step) in enumerate(columns, 1)
            ]
            for metric in dict.fromkeys(name for numbers, _ in results for name in numbers if name not in COUNTS):
                cells = [_number(numbers.get(metric)) + (other if metric in numbers else "") for numbers, other in results]
                rows.append({"task": split.partition("/")[2], "metric": metric, "cells": cells})
        written = [(name, run.tables.get(evaluation, {})) for name, run in zip(names, runs)]
        failures = [(f"{name}, " * (len(runs) > 1), run.failures.get(evaluation, {})) for name, run in zip(names, runs)]
        evaluation_results[evaluation] = {
            "columns": [name for name, _, _ in columns],
            "rows": rows,
            "steps_left_out": len(measured[0]) - len(columns) if len(runs) == 1 else 0,
            "written": [
                {"name": f"{name}, step {max(by_step):,}", "text": by_step[max(by_step)]}
                for name, by_step in written
                if by_step
            ],
            "failures": [
                f"{name}step {max(by_step):,}: {why}" for name, by_step in failures if by_step for why in by_step[max(by_step)]
            ],
            "has_samples": any(sample.evaluation == evaluation for run in runs for sample in run.samples),
        }
    return evaluation_results


def _results(by_step: Mapping[int, Numbers], step: int, or_last: bool) -> tuple[Numbers, str]:
    """Returns the results of a step, or the last ones with a note on their step."""
    if step in by_step or not by_step or not or_last:
        return by_step.get(step, {}), ""
    return by_step[max(by_step)], f" (step {max(by_step):,})"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"


def select_evenly(values: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def collect_samples(runs: Sequence[RunFiles], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the generated texts of each run, latest steps first, with a limit per evaluation and step."""
    collected = []
    for name, run in zip(names, runs):
        all_steps = sorted({sample.step for sample in run.samples})
        steps = select_evenly(all_steps, MAX_STEPS)[::-1]
        evaluations = list(dict.fromkeys(sample.evaluation for sample in run.samples))
        most = max(2, MAX_SAMPLES // max(1, len(steps) * len(evaluations) * len(runs)))
        shown = []
        for step in steps:
            groups = [[s for s in run.samples if (s.step, s.evaluation) == (step, name)] for name in evaluations]
            texts = [_shown(sample, run) for group in groups for sample in group[:most]]
            shown.append((step, texts, sum(max(0, len(group) - most) for group in groups)))
        if shown:
            collected.append({"name": name, "steps": shown, "steps_left_out": len(all_steps) - len(steps)})
    return collected


def _shown(sample: Sample, run: RunFiles) -> dict[str, str]:
    """Returns a text for the page. A decoder's continuation follows its prompt directly, other texts start on a new line."""
    is_continuation = sample.task == PROMPTS and run.facts.get("architecture") in ("causal_decoder", "prefix_decoder")
    text = sample.text.translate(_CONTROLS)
    return {"name": sample.name, "gap": "" if is_continuation else "\n", "text": text, "evaluation": sample.evaluation}
