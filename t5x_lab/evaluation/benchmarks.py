"""Averages over the tasks of a benchmark such as GLUE, and the best step of each of its parts.

A task counts by its attributes: `benchmark`, a name; `part`, whose tasks are one in the average; `parts`, all of the benchmark;
and `counted`, the names of the metrics that count, () for all. Tasks of `t5x_lab.prompts.t5_suite` have them, and a user's may.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

AVERAGES = "averages"  # among the metrics of tasks, that best_metric and EARLY_STOPPING may name: infer/averages/glue


def report(tasks: Iterable[Any], metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict]:
    """What tasks of benchmarks amount to: {benchmark: {"average", "parts": {part: {"score", task: its metrics}}, "missing"}}.

    A part's score is the mean of its metrics, and the average that of the parts' scores, as Raffel et al. have them; None while
    parts are missing. A metric that is no number, as the correlation with a constant, counts as 0.

    Args:
      tasks: SeqIO tasks.
      metrics: by task, then by name.
    """
    found: dict[str, dict] = {}
    for task in tasks:
        if getattr(task, "benchmark", "") and metrics.get(task.name):
            of = found.setdefault(task.benchmark, {"average": None, "parts": {}, "missing": list(task.parts)})
            counted = {key: metrics[task.name][key] for key in task.counted or metrics[task.name]}
            of["parts"].setdefault(task.part, {})[task.name] = counted
    for of in found.values():
        for part in of["parts"].values():
            values = [_number(value) for counted in part.values() for value in counted.values()]
            part["score"] = sum(values) / len(values)
        _average(of)
    return found


def best(reports: Mapping[int, Mapping[str, dict]]) -> dict[str, dict]:
    """The same as `report`, with each part at the step, of these, at which its score is highest, the first of equals."""
    found: dict[str, dict] = {}
    for step, by_benchmark in sorted(reports.items()):
        for name, of in by_benchmark.items():
            here = found.setdefault(name, {"average": None, "parts": {}, "missing": [*of["missing"], *of["parts"]]})
            for part, counted in of["parts"].items():
                if part not in here["parts"] or counted["score"] > here["parts"][part]["score"]:
                    here["parts"][part] = {"step": step, **counted}
    for of in found.values():
        _average(of)
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


def _average(of: dict) -> None:
    scores = {part: counted["score"] for part, counted in of["parts"].items()}
    of["missing"] = [part for part in dict.fromkeys(of["missing"]) if part not in scores]
    of["average"] = None if of["missing"] else sum(scores.values()) / len(scores)


def _number(value: float | None) -> float:
    return 0.0 if value is None or not math.isfinite(value) else value
