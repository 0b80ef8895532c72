"""Hosts that are killed, frozen or slow: what the others say, and how long until training goes on by itself.

Runs of two and of four processes, started by the scripts of `t5x_lab launch --kind=hosts`. In each, the last and the first
process are killed (SIGKILL), one is frozen (SIGSTOP) for two minutes, and one has a fifth of its time (SIGSTOP and SIGCONT).

    python benchmarks/lost_hosts.py [--hosts=2 --hosts=4]
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from t5x_lab.observe.metrics import read_metrics

RUN = [
    "train", "--gin_file=models/decoder/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "--gin.DATA_SHARDS=4",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}', "--gin.VOCABULARY=@ByteVocabulary()", "--gin.BATCH_SIZE=8",
    "--gin.TransformerConfig.vocab_size=384", "--gin.CHECKPOINT_PERIOD=50", "--gin.EVAL_PERIOD=1000000", "--gin.MODEL_DIR=run",
]  # fmt: skip
LIMIT = 600  # seconds until a run counts as hanging
FROZEN_SECONDS = 120
SLOW_SECONDS = 90
WORTH_SHOWING = re.compile(r"process|connection|coordination|heartbeat|exit|again|slow|report", re.IGNORECASE)


class Hosts:
    """The scripts of a run, in processes of this machine.

    Args:
      number: number of hosts.
      steps: steps of the run.
    """

    def __init__(self, number: int, steps: int):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        program = pathlib.Path("bin/t5x_lab")
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\nexec {sys.executable} -m t5x_lab "$@"\n')
        program.chmod(0o755)
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PATH": f"{program.parent.resolve()}:{os.environ['PATH']}"
        }  # fmt: skip
        launch = [
            "t5x_lab",
            "launch",
            "--kind=hosts",
            f"--hosts={number}",
            f"--coordinator_address={address}",
            "--output=job.sh",
        ]
        subprocess.run([*launch, "--", *RUN, f"--gin.TRAIN_STEPS={steps}"], env=environment, check=True, capture_output=True)
        self.logs = [pathlib.Path(f"host{n}.log") for n in range(number)]
        self._scripts = []
        for n, log in enumerate(self.logs):
            with open(log, "wb") as output:
                self._scripts.append(
                    subprocess.Popen(["bash", "job.sh", str(n)], env=environment, stdout=output, stderr=output)
                )

    def process(self, host: int) -> int:
        """Returns the id of the process that a host's script has started."""
        script = self._scripts[host].pid
        return int(pathlib.Path(f"/proc/{script}/task/{script}/children").read_text().split()[0])

    def wait_for(self, condition: Callable[[], bool]) -> float:
        """Returns the seconds until a condition holds."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > LIMIT or self._scripts[0].poll() not in (None, 0):
                sys.exit(f"The run does not go on.\n{self.logs[0].read_text()[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def wait(self) -> list[int]:
        return [script.wait(LIMIT) for script in self._scripts]

    def end(self) -> None:
        for host, script in enumerate(self._scripts):
            with contextlib.suppress(IndexError, OSError):
                os.kill(self.process(host), signal.SIGKILL)
            script.kill()


def last_step() -> int:
    lines = read_metrics("run") if pathlib.Path("run/metrics.jsonl").exists() else []
    return max((line["step"] for line in lines if line["split"] == "train"), default=0)


def show(title: str, hosts: Hosts, lost: int, before: list[int]) -> None:
    """Prints what the other hosts wrote since then, each sentence once."""
    print(f"\n{title}")
    for host, log in enumerate(hosts.logs):
        text = log.read_bytes()[before[host] :].decode(errors="replace")
        sentences = dict.fromkeys(line.strip()[:200] for line in text.splitlines() if WORTH_SHOWING.search(line))
        for line in [*sentences][:4] if host != lost else []:
            print(f"  host {host}: {line}")


def kill(hosts: Hosts, lost: int, begin: float) -> str:
    step = last_step()
    os.kill(hosts.process(lost), signal.SIGKILL)
    seconds = hosts.wait_for(lambda: last_step() > step + 10)  # of the last ones the metrics may just have been written
    return f"host {lost} killed at step {step}: ten new steps after {seconds:.0f} s, {seconds / begin:.1f} times a first start"


def freeze(hosts: Hosts, lost: int, begin: float) -> str:
    step, process = last_step(), hosts.process(lost)
    os.kill(process, signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    os.kill(process, signal.SIGCONT)
    seconds = hosts.wait_for(lambda: last_step() > step + 50)
    return (
        f"host {lost} frozen for {FROZEN_SECONDS} s at step {step}: 50 new steps {seconds:.0f} s after it woke, "
        f"{seconds / begin:.1f} times a first start"
    )


def slow(hosts: Hosts, lost: int, begin: float) -> str:
    step, process, until = last_step(), hosts.process(lost), time.monotonic() + SLOW_SECONDS
    while time.monotonic() < until:
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.2)
    return f"host {lost} slow for {SLOW_SECONDS} s at step {step}: {last_step() - step} steps meanwhile"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, action="append")
    args = parser.parse_args()
    for number in args.hosts or [2, 4]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "cache")
            hosts = Hosts(number, 10**6)
            try:
                begin = hosts.wait_for(lambda: last_step() > 100)
                print(f"\n# {number} hosts: step 100 after {begin:.0f} s")
                for event, lost in ((kill, number - 1), (kill, 0), (freeze, number - 1), (slow, number - 1)):
                    before = [log.stat().st_size for log in hosts.logs]
                    title = event(hosts, lost, begin)
                    show(title, hosts, lost, before)
                    step = last_step()
                    hosts.wait_for(lambda step=step: last_step() > step + 100)
            finally:
                hosts.end()
            steps = [line["step"] for line in read_metrics("run") if line["split"] == "train"]
            lost_steps, repeated = max(steps) - len({*steps}), len(steps) - len({*steps})
            print(f"\n{max(steps):,} steps, {lost_steps} without metrics, {repeated} with metrics of two trainings")
            os.chdir("/")


if __name__ == "__main__":
    main()
