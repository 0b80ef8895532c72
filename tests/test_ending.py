"""Processes end: after Ctrl-C, after errors that nobody foresaw, and when the reader of their output has ended."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import exhaustive
from synthetic_records import write_lines

COMMAND = [sys.executable, "-m", "t5x_lab"]
FLAGS = [
    "--gin_file=models/t5_1_1/tiny.gin", "--gin_file=objectives/span_corruption.gin", "--gin.MIXTURE_OR_TASK_NAME=files_span_corruption",
    "--gin.TextFiles.train=text.jsonl", "--gin.TextFiles.validation=text.jsonl", "--gin.VOCABULARY=@ByteVocabulary()",
    "--gin.TransformerConfig.vocab_size=384", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64}', "--gin.BATCH_SIZE=8",
]  # fmt: skip
LAST_LINE = "RuntimeError: nobody foresaw this"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 1.0, exhaustive(3.0), exhaustive(12.0)])
def test_an_interrupt_ends_a_command_from_its_first_moment_on(seconds):
    write_lines(pathlib.Path("text.jsonl"), [{"text": f"Line {n} of a text."} for n in range(1_000)])
    pathlib.Path("own_module.py").write_text("import tensorflow\n")
    run = [*FLAGS, "--gin.TRAIN_STEPS=100000", "--gin.MODEL_DIR=run", "--gin_bindings=import own_module"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    process = subprocess.Popen(
        [*COMMAND, "train", *run], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode in (130, 3) and not re.search("Traceback|oneDNN|cuda", errors), errors  # TensorFlow is quiet
    assert process.returncode == 3 or errors.splitlines()[-1] == "t5x_lab train: interrupted", errors


FAILING_THREAD = """
import logging, os, signal, threading
from t5x_lab.cli.interrupts import interrupts
interrupts.install("t5x_lab corpus")
def work():
    while not interrupts.received:
        pass
    logging.error("the connection has ended")
    raise RuntimeError("the connection has ended")
thread = threading.Thread(target=work)
thread.start()
try:
    os.kill(os.getpid(), signal.SIGINT)
    thread.join()
except KeyboardInterrupt:
    thread.join()
    raise SystemExit(interrupts.report())
"""


def test_threads_and_libraries_that_fail_after_an_interrupt_say_nothing():
    done = subprocess.run([sys.executable, "-c", FAILING_THREAD], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "t5x_lab corpus: interrupted\n")


PROGRAMS = {
    "Python": """
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.data_layer import load_data_layer
load_data_layer()
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
data = GinConfig(FILES, [*BINDINGS, "TRAIN_STEPS = 1", "MODEL_DIR = 'run'"]).data()
batches = SeqioBatches(resolve_tasks(data, "encoder_decoder", 384), data, 0)
next(batches)
raise RuntimeError("nobody foresaw this")
""",
    "training": """
from t5x_lab.runs.train.recording import Recorder
def fail(*args, **options):
    raise RuntimeError("nobody foresaw this")
Recorder.step = fail
run("train", "--gin.TRAIN_STEPS=4", "--gin.MODEL_DIR=run")
""",
    "evaluation": """
from t5x_lab.evaluation.inference import task_examples
def fail(*args, **options):
    raise RuntimeError("nobody foresaw this")
run("train", "--gin.TRAIN_STEPS=1", "--gin.MODEL_DIR=run", "--gin.EVALS=()")
task_examples.Example = fail
run_flags("infer", "--model_dir=run", "--task=files_span_corruption", "--mode=score", "--output=out.jsonl")
""",
    "caching": """
from t5x_lab.data.cache import writing
check = writing._check_examples  # reads examples in this process; the files are written by others
def fail(*args, **options):
    check(*args, **options)
    raise RuntimeError("nobody foresaw this")
writing._check_examples = fail
run_flags("cache", "--task=files_full_lm", "--output_dir=caches", *FLAGS[3:6])
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["Python", exhaustive("training"), exhaustive("evaluation"), exhaustive("caching")])
def test_an_unknown_error_ends_a_process_that_reads_data_with_python_steps(program, tmp_path):
    write_lines(
        pathlib.Path("text.jsonl"), [{"text": f"Line {n} of a text that goes on for some words."} for n in range(20_000)]
    )
    files = [flag.partition("=")[2] for flag in FLAGS if flag.startswith("--gin_file")]
    bindings = [
        "MIXTURE_OR_TASK_NAME = 'files_span_corruption'", "TextFiles.train = 'text.jsonl'", "VOCABULARY = @ByteVocabulary()",
        "TransformerConfig.vocab_size = 384", "TASK_FEATURE_LENGTHS = {'inputs': 64}", "BATCH_SIZE = 8",
    ]  # fmt: skip
    start = f"""
import sys
FILES, BINDINGS, FLAGS = {files!r}, {bindings!r}, {FLAGS!r}
def run_flags(command, *flags):
    from t5x_lab.cli.main import main
    assert main([command, *flags]) == 0
def run(command, *flags):
    run_flags(command, *FLAGS, *flags)
"""
    (tmp_path / "program.py").write_text(start + PROGRAMS[program])
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and re.search(f"^{LAST_LINE}", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(
    "command", ["t5x_lab --help", "t5x_lab table --help", "t5x_lab inspect --gin_file=models/t5_1_1/small.gin"]
)
def test_a_reader_that_has_ended_is_no_error(command):
    command = command.replace("t5x_lab", f"{sys.executable} -m t5x_lab")
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, text=True)
    assert done.returncode in (0, 141) and not done.stderr, done.stderr
