"""Averages over the tasks of a benchmark such as GLUE, and the best step of each of its parts.

A task belongs to a benchmark by its attributes:
  benchmark   name of the benchmark
  part        name of the part that the task belongs to. A part counts once in the average.
  parts       all parts of the benchmark: names, or a mapping from name to number of tasks
  counted     names of the metrics that count, () for all
Tasks of `t5x_lab.papers.t5.suite` have them, and a user's task may.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

AVERAGES = "averages"  # best_metric and EARLY_STOPPING may name an average like a task: infer/averages/glue


def report(tasks: Iterable[Any], metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict]:
    """Returns {benchmark: {"average", "parts": {part: {"score", task: metrics}}, "missing"}}.

    The score of a part is the mean of its metrics, and the average is the mean of the parts' scores, as in Raffel et al. It is
    None if parts or tasks are missing. An undefined metric, such as the correlation with a constant, counts as 0.

    Args:
      tasks: SeqIO tasks.
      metrics: numbers by task, then by metric name.
    """
    reports: dict[str, dict] = {}
    sizes: dict[str, Mapping[str, int]] = {}
    for task in tasks:
        if getattr(task, "benchmark", "") and metrics.get(task.name):
            benchmark = reports.setdefault(task.benchmark, {"parts": {}})
            sizes[task.benchmark] = task.parts if isinstance(task.parts, Mapping) else dict.fromkeys(task.parts, 1)
            counted = {key: metrics[task.name][key] for key in task.counted or metrics[task.name]}
            benchmark["parts"].setdefault(task.part, {})[task.name] = counted
    for name, benchmark in reports.items():
        parts = benchmark["parts"]
        missing = [part for part, size in sizes[name].items() if len(parts.get(part, {})) < size]
        for part in parts.values():
            values = [_to_number(value) for counted in part.values() for value in counted.values()]
            part["score"] = sum(values) / len(values)
        benchmark |= _average(parts, missing)
    return reports


def best(reports: Mapping[int, Mapping[str, dict]]) -> dict[str, dict]:
    """Returns the same as `report`, with each part at the step at which its score is highest.

    Steps at which all tasks of the part were evaluated are preferred. Of equal scores the first step is taken.

    Args:
      reports: results of `report` by step.
    """
    best_reports: dict[str, dict] = {}
    for name in dict.fromkeys(name for by_benchmark in reports.values() for name in by_benchmark):
        steps = {step: benchmarks[name] for step, benchmarks in sorted(reports.items()) if name in benchmarks}
        parts: dict[str, dict] = {}
        for part in dict.fromkeys(part for benchmark in steps.values() for part in benchmark["parts"]):
            evaluated = [step for step, benchmark in steps.items() if part in benchmark["parts"]]
            complete = [step for step in evaluated if part not in steps[step]["missing"]]
            step = max(complete or evaluated, key=lambda step: steps[step]["parts"][part]["score"])
            parts[part] = {"step": step, **steps[step]["parts"][part]}
        missing = [
            part
            for part in dict.fromkeys(part for benchmark in steps.values() for part in benchmark["missing"])
            if all(part in benchmark["missing"] for benchmark in steps.values())
        ]
        best_reports[name] = _average(parts, missing)
    return best_reports


def averages(benchmarks: Mapping[str, dict]) -> dict[str, float]:
    """Returns the averages of complete benchmarks."""
    return {name: benchmark["average"] for name, benchmark in benchmarks.items() if benchmark["average"] is not None}


def table(benchmarks: Mapping[str, dict]) -> str:
    """Returns scores as a text table, one line per part. Results of `best` have a step."""
    lines = []
    for name, benchmark in benchmarks.items():
        for part, counted in benchmark["parts"].items():
            step = f"  step {counted['step']}" if "step" in counted else ""
            lines.append(f"{name:<16}{part:<14}{counted['score']:>8.2f}{step}")
        missing = f"  missing: {', '.join(benchmark['missing'])}" if benchmark["missing"] else ""
        average = "" if benchmark["average"] is None else f"{benchmark['average']:>8.2f}"
        if len(benchmark["parts"]) > 1 or missing:
            lines.append(f"{name:<16}{'average':<14}{average}{missing}")
    return "\n".join(lines)


def _average(parts: dict[str, dict], missing: list[str]) -> dict[str, Any]:
    average = None if missing else sum(counted["score"] for counted in parts.values()) / len(parts)
    return {"average": average, "parts": parts, "missing": missing}


def _to_number(value: float | None) -> float:
    return 0.0 if value is None or not math.isfinite(value) else value
