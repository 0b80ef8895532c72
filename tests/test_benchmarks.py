"""Benchmarks: their imports exist, and they run at a small size and print what they measure."""

import ast
import importlib
import json
import os
import re
import shlex

import commands
import pytest
from conftest import ROOT, SHARED

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
# Flags of a small run, and a pattern that its output must match. {tmp} is an empty folder.
SMALL_RUNS = {
    "cache": ("--lines=2000 --files=2 --rounds=1", r"seqio_cache_tasks +-?\d"),
    "checkpoints": ("--model=models/t5_1_1/tiny.gin --only=saving", r"restore with verification \d+ MiB/s"),
    "corpus": (
        f"--data={SHARED} --pages=60 --rounds=1 --sizes=60",
        r"clean lines +[\d.]+ +TFDS(?s:.*)60 pages, .*TFDS .* times, peak \d+ MiB(?s:.*)by stage: read",
    ),
    "data_growth": ("--only=documents --most=1000 --out={tmp}/growth", r"documents +1,000: .*examples [\d.e+]+"),
    "decode": ("--rounds=1 --only=speed --layers=1 --model=decoder", r"(?s)(\b100\.0% of the tokens are the same.*){2}"),
    "evaluation_time": ("--rounds=1", r"first [\d.]+ s, later [\d.]+ s"),
    "full_disk": ("--sizes=2", r" bytes, 1 process\(es\): 0 wrong"),
    "fused_attention": ("--topologies v5e:2x2 --lengths 512", r"v5e +fused +512 .*\nv5e +blocks +512 "),
    "gpu": ("--parts check --cases=1", r"bfloat16 d_bias +\d"),
    "infer_corpus": ("--lines=3000 --kills=1", "3,000 lines, each once, in order, after 1 kills"),
    "kill_and_resume": ("--kills=1 --source=synthetic", r"\b0 of them different"),
    "kill_infer": ("--kills=1 --lines=200", "200 examples, each once, equal to the byte"),
    "kill_processes": ("--kills=1", "tokens differ in 0 of them"),
    "local_attention": ("--rounds=1 --window=256", r"causal, 256 +16,384 .*(?s:.*)local 524,288 bytes, global"),
    "object_storage": ("--kills=1 --longest=1", r"evaluation +\d+ (?s:.*)0 of them different(?s:.*) equal"),
    "objectives": ("--seconds=0.2 --rounds=1 --rows=8 --objectives=span_corruption", r"encoder_decoder .* [\d.]+x"),
    "prompts": (
        f"--data={SHARED} --mixture=small --scale=10000000 --draws=200 --only=cached --only='without single_device_functions'",
        r"cached:(?s:.*)without single_device_functions:(?s:.*)restore, s +[\d.]+",
    ),
    "properties": ("--scale=2 tests/test_ops.py", r"\d+ passed"),
    "rates": ("--draws=100 --only='unequal files' --shards=4", r"unequal files +4 +2 .* True"),
    "step_time": ("--rounds=1 --steps=2 --layers=1", r"transformers +[\d.]+ s, 1\.00 of"),
    "study_data": (
        f"--work={{tmp}} --data={SHARED} --texts=800",
        r"[\d,]+ texts near the tasks(?s:.*)tasks.gin: \d+ data sets",
    ),
    "t5_mixtures": ("--draws=200 --only='T = 2'", r"examples of \d+ tasks: chi-squared [\d.]+, p [\d.]+"),
    "ways_to_fine_tune": ("--rounds=1 --only=steps --layers=1", r"a step of LoRA +[\d.]+ of the time"),
}


FOR_TPUS = ("fused_attention",)  # libtpu does not know the flags of CPUs


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
    if str(SHARED) in flags and not SHARED.exists():
        pytest.skip("needs the shared test data, which are not here")
    if name == "full_disk" and os.geteuid():
        pytest.skip("needs root, to mount a small file system")
    # One device, as benchmarks have it. What they measure does not matter here: programs are not optimized.
    script = str(ROOT / "benchmarks" / f"{name}.py")
    environment = {"NPROC": None, **({"XLA_FLAGS": ""} if name in FOR_TPUS else {})}
    done = commands.run(script, *shlex.split(flags.format(tmp=tmp_path)), environment=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(pattern, done.stdout), done.stdout
