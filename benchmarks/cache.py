"""Examples a second that `t5x_lab cache` and `seqio_cache_tasks` prepare, side by side, with what both take to start taken off.

    python benchmarks/cache.py [--lines=200000] [--files=8] [--rounds=2]

One task over text files: parsing and tokenising into bytes. Each tool writes a small task first and then a large one; of the
seconds and the CPU-seconds of the second those of the first are taken away. Both with Beam's local runner, as many processes.
"""

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

MODULE = """
import seqio, tensorflow as tf

vocabulary = seqio.ByteVocabulary(100)
for name in ("small", "large"):
    files = sorted(tf.io.gfile.glob(f"{name}_*.txt"))
    seqio.TaskRegistry.add(
        name,
        seqio.TextLineDataSource({"train": files}),
        preprocessors=[
            lambda data: data.map(lambda line: {"inputs": line, "targets": line}),
            seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos,
        ],
        output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
    )
"""
WORKERS = ["--runner=DirectRunner", "--direct_running_mode=multi_processing", f"--direct_num_workers={os.cpu_count()}"]


def argv(tool: str, task: str, folder: str) -> list[str]:
    options = f"--pipeline_options={','.join(WORKERS)}"
    if tool == "t5x_lab cache":
        gin = ["--gin_bindings=import timed_tasks", "--gin.VOCABULARY=@ByteVocabulary()"]
        return [sys.executable, "-m", "t5x_lab", "cache", f"--task={task}", f"--output_dir={folder}", options, *gin]
    program = str(pathlib.Path(sys.executable).with_name(tool))
    return [program, "--module_import=timed_tasks", f"--tasks={task}", f"--output_cache_dir={folder}", options]


def took(tool: str, task: str) -> tuple[float, float]:
    """(seconds, CPU-seconds) of a process and those that it began."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(argv(tool, task, folder), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.monotonic() - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.chdir(tempfile.mkdtemp())
    pathlib.Path("timed_tasks.py").write_text(MODULE)
    for name, lines in {"small": args.files, "large": args.lines}.items():
        for number in range(args.files):
            text = (f"{name} {number} {line} {'a few words ' * (line % 8)}\n" for line in range(lines // args.files))
            pathlib.Path(f"{name}_{number}.txt").write_text("".join(text))
    speeds: dict[str, list[tuple[float, float]]] = {"t5x_lab cache": [], "seqio_cache_tasks": []}
    for _ in range(args.rounds):
        for tool, tool_speeds in speeds.items():
            small, large = took(tool, "small"), took(tool, "large")
            tool_speeds.append((args.lines / (large[0] - small[0]), args.lines / (large[1] - small[1])))
    for tool, tool_speeds in speeds.items():
        wall, cpu = (statistics.median(each[i] for each in tool_speeds) for i in (0, 1))
        print(f"{tool:18} {wall:10,.0f} examples a second, {cpu:8,.0f} a CPU-second")


if __name__ == "__main__":
    main()
