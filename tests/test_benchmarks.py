"""Benchmarks: their imports exist, and they run at a small size and print what they measure."""

import ast
import importlib
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
# Flags of a small run, and a pattern that its output must match.
SMALL_RUNS = {
    "cache": ("--lines=2000 --files=2 --rounds=1", r"seqio_cache_tasks +-?\d"),
    "checkpoints": ("--model=models/t5_1_1/tiny.gin --only=saving", r"restore with verification \d+ MiB/s"),
    "decode": ("--rounds=1 --only=speed", r"(?s)(\b100\.0% of the tokens are the same.*){4}"),
    "kill_and_resume": ("--kills=1 --source=synthetic", r"\b0 of them different"),
    "kill_infer": ("--kills=1 --lines=200", "200 examples, each once, equal to the byte"),
    "objectives": ("--seconds=0.2 --rounds=1 --rows=8 --objectives=span_corruption", r"encoder_decoder .* [\d.]+x"),
    "step_time": ("--rounds=1", r"transformers +[\d.]+ s, 1\.00 of"),
    "ways_to_fine_tune": ("--rounds=1 --only=steps", r"a step of LoRA +[\d.]+ of the time"),
}


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_imports_exist(file):
    """Benchmarks import inside functions, so that a removed name would be found only after minutes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("t5x_lab"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_the_page_of_pod_scale_is_generated(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pod_scale = importlib.import_module("pod_scale")
    results = json.loads((ROOT / "benchmarks" / "pod_scale.json").read_text())
    assert pod_scale.page(results) == (ROOT / "docs" / "pod_scale.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMALL_RUNS)
def test_a_small_run_prints_results(name, tmp_path):
    flags, pattern = SMALL_RUNS[name]
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *flags.split()]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    assert re.search(pattern, process.stdout), process.stdout
