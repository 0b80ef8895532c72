"""Averages over the tasks of a benchmark such as GLUE, and the best step of each of its parts.

A task counts by its attributes: `benchmark`, a name; `part`, whose tasks are one in the average; `parts`, all of the benchmark,
with how many tasks each has, one unless said; and `counted`, the names of the metrics that count, () for all. Tasks of
`t5x_lab.prompts.t5_suite` have them, and a user's may.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

AVERAGES = "averages"  # among the metrics of tasks, that best_metric and EARLY_STOPPING may name: infer/averages/glue


def report(tasks: Iterable[Any], metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict]:
    """What tasks of benchmarks amount to: {benchmark: {"average", "parts": {part: {"score", task: its metrics}}, "missing"}}.

    A part's score is the mean of its metrics, and the average that of the parts' scores, as Raffel et al. have them; None while
    parts, or tasks of theirs, are missing. A metric that is no number, as the correlation with a constant, counts as 0.

    Args:
      tasks: SeqIO tasks.
      metrics: by task, then by name.
    """
    found: dict[str, dict] = {}
    sizes: dict[str, Mapping[str, int]] = {}
    for task in tasks:
        if getattr(task, "benchmark", "") and metrics.get(task.name):
            of = found.setdefault(task.benchmark, {"parts": {}})
            sizes[task.benchmark] = task.parts if isinstance(task.parts, Mapping) else dict.fromkeys(task.parts, 1)
            counted = {key: metrics[task.name][key] for key in task.counted or metrics[task.name]}
            of["parts"].setdefault(task.part, {})[task.name] = counted
    for name, of in found.items():
        parts = of["parts"]
        missing = [part for part, size in sizes[name].items() if len(parts.get(part, {})) < size]
        for part in parts.values():
            values = [_number(value) for counted in part.values() for value in counted.values()]
            part["score"] = sum(values) / len(values)
        of |= _averaged(parts, missing)
    return found


def best(reports: Mapping[int, Mapping[str, dict]]) -> dict[str, dict]:
    """The same as `report`, with each part at the step, of these, at which its score is highest, the first of equals; of steps
    at which all of its tasks were measured, where there are some."""
    found: dict[str, dict] = {}
    for name in dict.fromkeys(name for by_benchmark in reports.values() for name in by_benchmark):
        steps = {step: of[name] for step, of in sorted(reports.items()) if name in of}
        parts: dict[str, dict] = {}
        for part in dict.fromkeys(part for of in steps.values() for part in of["parts"]):
            there = [step for step, of in steps.items() if part in of["parts"]]
            whole = [step for step in there if part not in steps[step]["missing"]]
            step = max(whole or there, key=lambda step: steps[step]["parts"][part]["score"])
            parts[part] = {"step": step, **steps[step]["parts"][part]}
        missing = [
            part
            for part in dict.fromkeys(part for of in steps.values() for part in of["missing"])
            if all(part in of["missing"] for of in steps.values())
        ]
        found[name] = _averaged(parts, missing)
    return found


def averages(reported: Mapping[str, dict]) -> dict[str, float]:
    """Of benchmarks that nothing is missing of."""
    return {name: of["average"] for name, of in reported.items() if of["average"] is not None}


def table(found: Mapping[str, dict]) -> str:
    """Scores as text, a line for each part, with the step where they are of several."""
    lines = []
    for name, of in found.items():
        for part, counted in of["parts"].items():
            step = f"  step {counted['step']}" if "step" in counted else ""
            lines.append(f"{name:<16}{part:<14}{counted['score']:>8.2f}{step}")
        missing = f"  missing: {', '.join(of['missing'])}" if of["missing"] else ""
        average = "" if of["average"] is None else f"{of['average']:>8.2f}"
        if len(of["parts"]) > 1 or missing:
            lines.append(f"{name:<16}{'average':<14}{average}{missing}")
    return "\n".join(lines)


def _averaged(parts: dict[str, dict], missing: list[str]) -> dict[str, Any]:
    average = None if missing else sum(counted["score"] for counted in parts.values()) / len(parts)
    return {"average": average, "parts": parts, "missing": missing}


def _number(value: float | None) -> float:
    return 0.0 if value is None or not math.isfinite(value) else value
