"""Kills a training run with SIGKILL at random moments and checks that nothing but time was lost.

A run on the embedded corpus (SeqIO, asynchronous saves every few steps) is started again and again and killed after a random
time, between saves and during them, until it has been killed `--kills` times; then it is left to finish. Every restart must
continue from a whole checkpoint, and loss, gradient norm and token counts of every step must equal those of a run that was
never killed.

    python benchmarks/kill_and_resume.py --kills=20
"""

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from t5x_lab.observe.metrics import read_metrics

CONFIGURATION = [
    "--gin_file=models/t5_1_1/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption",
    '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}', "--gin.VOCABULARY=@ByteVocabulary()",
    "--gin.TransformerConfig.vocab_size=384", '--gin.TransformerConfig.dtype="float32"', "--gin.DROPOUT_RATE=0.1",
    "--gin.BATCH_SIZE=8", "--gin.DataConfig.shuffle_buffer_size=50", "--gin.CHECKPOINT_PERIOD=5", "--gin.EVAL_PERIOD=1000000",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = (os.path.join(folder, name) for name in ("whole", "killed"))
        run(whole, args.steps, os.path.join(folder, "whole.log")).wait()
        logs, lost, during_save = [], [], 0
        while len(logs) < args.kills:
            logs.append(os.path.join(folder, f"{len(logs)}.log"))
            process = run(killed, args.steps, logs[-1])
            before = last_step(killed)
            while process.poll() is None and last_step(killed) <= before:
                time.sleep(0.02)
            time.sleep(rng.random() * 2.0)
            if process.poll() is not None:
                sys.exit(
                    f"The run ended before kill {len(logs)}: give more --steps. {pathlib.Path(logs[-1]).read_text()[-500:]}"
                )
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            during_save += any("tmp" in entry.name for entry in pathlib.Path(killed, "checkpoints").glob("*"))
            lost.append(last_step(killed) - latest_checkpoint(killed))
        logs.append(os.path.join(folder, "last.log"))
        if run(killed, args.steps, logs[-1]).wait():
            sys.exit(pathlib.Path(logs[-1]).read_text())
        a, b = lines(whole), lines(killed)
        different = [step for step in a if a[step] != b.get(step)]
        resumed = sum(bool(re.search("Continuing after step", pathlib.Path(log).read_text())) for log in logs[1:])
        print(
            f"{args.kills} kills, {during_save} of them during a save; {resumed} of {len(logs) - 1} restarts continued from a "
            f"whole checkpoint\nsteps done again after a kill: {sum(lost)}, at most {max(lost)} (a save every 5 steps)\n"
            f"{len(a)} steps, {len(b)} in the stitched run, {len(different)} of them different"
        )
        sys.exit(bool(different) or len(a) != len(b) or len(a) != args.steps)


def run(model_dir: str, steps: int, log: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "t5x_lab",
        "train",
        *CONFIGURATION,
        f"--gin.MODEL_DIR={model_dir}",
        f"--gin.TRAIN_STEPS={steps}",
    ]
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def lines(model_dir: str) -> dict[int, tuple]:
    names = ("loss", "grad_norm", "tokens_processed", "raw_tokens")
    return {line["step"]: tuple(line[name] for name in names) for line in read_metrics(model_dir) if line["split"] == "train"}


def last_step(model_dir: str) -> int:
    return max(lines(model_dir), default=0)


def latest_checkpoint(model_dir: str) -> int:
    folder = pathlib.Path(model_dir, "checkpoints")
    return max((int(entry.name) for entry in folder.glob("*") if entry.name.isdigit()), default=0)


if __name__ == "__main__":
    main()
