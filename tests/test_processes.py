"""Two real processes over loopback work like one, and end together."""

import os
import pathlib
import re
import signal

import commands
import numpy as np
import pytest
from etils import epath
from helpers import exhaustive
from runs_of_text import FULL_LM, flags, losses

from t5x_lab.checkpoints.layout import read_info
from t5x_lab.cli.main import main
from t5x_lab.partitioning.waiting import find_slow

pytestmark = pytest.mark.slow


def start_two_processes(model_dir, steps, *more):
    return commands.start_two(*flags("causal_decoder", FULL_LM, model_dir, steps, *more), log=model_dir)


def two_texts() -> list[str]:
    """Flags of two texts that are read as often as they have documents, which are counted."""
    for name, lines in (("one", 300), ("two", 150)):
        pathlib.Path(f"{name}.txt").write_text("".join(f"line {n} of {name} has {n * n} letters\n" for n in range(lines)))
    each = [
        f'--gin_bindings={name}/TextFiles.{split} = "{name}.txt"'
        for name in ("one", "two")
        for split in ("train", "validation")
    ]
    return [
        '--gin_bindings=TEXTS = {"one": @one/TextFiles(), "two": @two/TextFiles()}', *each, "--gin.MIXING=@Mixing()",
        "--gin.MIXTURE_OR_TASK_NAME=texts_full_lm", '--gin.TASK_FEATURE_LENGTHS={"targets": 64}',
    ]  # fmt: skip


def test_two_processes_work_like_one(capsys):
    """Training, evaluation, checkpoints from one process of eight devices to two of one and of four, and generation."""
    more = ["--gin.CHECKPOINT_PERIOD=2", "--gin.EVAL_PERIOD=2", "--gin.TextFiles.lines_per_document=1"]
    texts = two_texts()

    def train(model_dir, steps, mesh):
        return flags("causal_decoder", texts, model_dir, steps, f"--gin.MESH={mesh}", *more)

    def two(*argv, devices=1):
        processes = commands.start_two(*argv, devices=devices)
        assert [process.wait() for process in processes] == [0, 0], "".join(process.output() for process in processes)
        return [process.output() for process in processes]

    assert main(train("alone", 6, "fsdp=8")) == 0
    two(*train("mixed", 2, "tensor=2"))  # both processes hold every row
    assert main(train("mixed", 4, "fsdp=8")) == 0
    two(*train("mixed", 6, "fsdp=4,tensor=2"), devices=4)
    assert sorted(os.listdir("mixed/checkpoints")) == ["2", "4", "6"]
    counted = [read_info(epath.Path(f"{run}/checkpoints/6"))["documents"] for run in ("alone", "mixed")]
    assert counted[0] == counted[1] and sorted(counted[0].values()) == [150, 300]
    for split in ("train", "eval/one_full_lm", "eval/two_full_lm"):
        alone, mixed = losses("alone", split), losses("mixed", split)
        assert alone.keys() == mixed.keys() and alone
        np.testing.assert_allclose([v[0] for v in alone.values()], [v[0] for v in mixed.values()], rtol=1e-5)

    prompts = ["--prompt=The Congress of", "--prompt=We", "--max_tokens=12"]
    capsys.readouterr()
    assert main(["generate", "--model_dir=alone", *prompts]) == 0
    alone = capsys.readouterr().out
    first, second = two("generate", "--model_dir=mixed", *prompts, devices=4)
    assert alone.splitlines() == [line for line in first.splitlines() if "\t" in line] and alone.count("\n") == 2
    assert "\t" not in second


@pytest.mark.exhaustive
@pytest.mark.parametrize("signalled, number", [((1,), signal.SIGINT), ((0, 1), signal.SIGTERM)])
def test_a_signal_saves_and_stops_both_processes(signalled, number):
    """Ctrl-C becomes a SIGTERM, which JAX tells the other process. A cluster sends one to all at once."""
    processes = start_two_processes("two", 100_000, "--gin.CHECKPOINT_PERIOD=100000")
    processes[0].wait_until(lambda: len(losses("two")) >= 5)
    for process in signalled:
        processes[process].send_signal(number)
    assert [process.wait() for process in processes] == [3, 3], "".join(process.output() for process in processes)
    (saved,) = os.listdir("two/checkpoints")
    assert int(saved) == max(losses("two"))


@pytest.mark.exhaustive
def test_a_signal_before_the_first_step_of_a_continued_run_stops_it():
    assert [process.wait() for process in start_two_processes("two", 3)] == [0, 0]
    processes = commands.start_two(*flags("causal_decoder", FULL_LM, "two", 100_000), log="again")
    log = pathlib.Path(processes[0].log)
    processes[0].wait_until(lambda: log.exists() and "Reading the first batch" in log.read_text())
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [3, 3], "".join(process.output() for process in processes)
    assert max(losses("two")) < 50


@pytest.mark.exhaustive
def test_a_time_limit_saves_and_stops_both_of_two_processes():
    last = 0
    for _ in range(2):  # the second time they go on
        processes = start_two_processes("two", 100_000, "--gin.MAX_MINUTES=0.01", "--gin.CHECKPOINT_PERIOD=100000")
        assert [process.wait() for process in processes] == [3, 3], "".join(process.output() for process in processes)
        assert "stopped by MAX_MINUTES" in processes[0].output()
        saved = max(map(int, os.listdir("two/checkpoints")))
        assert saved == max(losses("two")) > last
        last = saved


@pytest.mark.parametrize("killed", [0, exhaustive(1)])
def test_a_process_that_dies_ends_the_other_with_a_message(killed):
    """Process 0 leads, process 1 follows; neither waits for the other's ghost."""
    processes = start_two_processes("two", 100_000, "--gin.CHECKPOINT_PERIOD=5")
    processes[0].wait_until(lambda: len(losses("two")) >= 8)
    processes[killed].kill()
    assert processes[1 - killed].wait(timeout=60) not in (0, 2, 3)
    log = pathlib.Path(f"two{1 - killed}.log").read_text()
    assert "lost the connection to another process" in log or "coordination service" in log.lower(), log


@pytest.mark.exhaustive
def test_a_process_that_waits_for_long_says_for_what_and_ends():
    """The other one lives, and does something else."""
    pathlib.Path("sleeping.py").write_text(
        "import time\nimport gin\nimport jax\n\n\n@gin.configurable\nclass Sleep:\n    every_process = True\n\n    def on_step(self, step, metrics):\n"
        "        if step == 3 and jax.process_index() == 1:\n            time.sleep(1000)\n"
    )
    pathlib.Path("sleeping.gin").write_text("import sleeping\nHOOKS = (@Sleep(), @Console(), @JsonLines())\n")
    processes = start_two_processes("two", 100_000, "--gin_file=sleeping.gin", "--gin.WAIT_MINUTES=0.4")
    assert processes[0].wait() == 1
    assert "minutes for step " in processes[0].output() and "WAIT_MINUTES" in processes[0].output()
    assert re.search(r"Process 1 is in on_step of .*sleeping.py, line 12\.", processes[0].output()), processes[0].output()
    assert processes[1].wait() != 0  # JAX finds that the first one is gone


@pytest.mark.exhaustive
def test_a_slow_process_is_named_by_the_first():
    pathlib.Path("slow.py").write_text(
        "import time\nimport gin\nimport jax\nfrom t5x_lab.partitioning import waiting\n\nwaiting._COMPARED_SECONDS = 1e9\n\n\n"
        "@gin.configurable\nclass Slow:\n    every_process = True\n\n    def on_step(self, step, metrics):\n"
        "        if step == 30:\n            waiting._COMPARED_SECONDS = 10.0  # the start does not count\n"
        "        if jax.process_index() == 1:\n            time.sleep(0.5)\n"
    )
    pathlib.Path("slow.gin").write_text("import slow\nHOOKS = (@Slow(), @Console(), @JsonLines())\n")
    processes = start_two_processes("two", 100_000, "--gin_file=slow.gin")
    processes[0].wait_until(lambda: len(losses("two")) > 1 and "slows the others" in processes[0].output())
    for process in processes:
        process.kill()
    says = r"Process 1 slows the others: .* Most often it was in on_step of .*slow.py, line 17\."
    assert re.search(says, processes[0].output()), processes[0].output()


@pytest.mark.parametrize(
    "waited, slow",
    [
        ({}, []),
        ({0: 50.0, 1: 2.0}, [1]),
        ({0: 50.0, 1: 45.0}, []),
        ({0: 2.0, 1: 50.0, 2: 55.0, 3: 1.0}, [0, 3]),
        ({0: 2.0, 1: 50.0, 2: 3.0}, []),  # one that waits more than most, for its own reasons
    ],
)
def test_a_slow_process_waits_less_than_the_others(waited, slow):
    assert find_slow(waited, 60.0) == slow


@pytest.mark.exhaustive
def test_a_frozen_process_is_named_by_the_other():
    processes = start_two_processes("two", 100_000, "--gin.CHECKPOINT_PERIOD=5")
    processes[0].wait_until(lambda: len(losses("two")) >= 8)
    processes[1].send_signal(signal.SIGSTOP)
    try:
        assert processes[0].wait(timeout=120) not in (0, 2, 3)
        assert "Process 1 has sent no report for" in processes[0].output(), processes[0].output()
    finally:
        processes[1].kill()
