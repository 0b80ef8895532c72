"""Files of `t5x_lab launch`, run on this machine with processes in the place of hosts and stubs of the schedulers."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml
from runs_of_text import FULL_LM, flags, losses

from t5x_lab.cli.main import main

ONE_CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
SLURM = ("--kind=slurm", "--gpus_per_host=0", "--hosts=2", "--output=job.sh")


def launch(*argv) -> int:
    return main(["launch", *argv])


def train(model_dir="run", steps=6, *more) -> list[str]:
    return ["--", *flags("causal_decoder", FULL_LM, model_dir, steps, "--gin.DATA_SHARDS=2", *more)]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes programs on the path from shell code."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(**codes):
        for name, code in {"t5x_lab": f'exec {sys.executable} -m t5x_lab "$@"', **codes}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return make


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.parametrize(
    "status, restarts, is_queued", [(0, 0, False), (2, 0, False), (3, 500, True), (1, 0, True), (1, 7, False)]
)
def test_a_slurm_job_is_queued_again_after_what_a_restart_may_mend(programs, status, restarts, is_queued):
    programs(srun=f"exit {status}", scontrol='echo "$@" >> queued')
    assert launch(*SLURM, "--max_restarts=7", "--time=1:00:00", "--sbatch=partition=p", *train()) == 0
    environment = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash", "job.sh"], env=environment).returncode == status
    queued = pathlib.Path("queued")
    assert (queued.read_text() if queued.exists() else "") == ("requeue 17\n" if is_queued else "")
    text = pathlib.Path("job.sh").read_text()
    assert all(f"#SBATCH --{x}\n" in text for x in ("nodes=2", "time=1:00:00", "partition=p", "signal=TERM@120", "requeue"))


@pytest.mark.exhaustive
def test_a_slurm_job_trains_with_a_process_per_node(programs):
    """The stub of srun starts two tasks with the variables that Slurm sets."""
    start = 'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=0 "${@:2}" > task$i.log 2>&1 & done'
    tasks = f"{start}; wait %1; status=$?; wait %2; exit $((status | $?))"
    programs(srun=tasks)
    assert launch(*SLURM, *train()) == 0
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    done = subprocess.run(["bash", "job.sh"], env={**os.environ, **slurm, **ONE_CPU})
    assert done.returncode == 0, pathlib.Path("task0.log").read_text()
    assert "2 process(es)" in pathlib.Path("task0.log").read_text() and max(losses("run")) == 6


def test_a_jobset_has_a_pod_on_every_host_of_every_slice(capsys):
    bucket = train("gs://bucket/run")
    jobset = (
        "--kind=jobset",
        "--topology=v5p:4x4x4",
        "--num_slices=2",
        "--env=TFDS_DATA_DIR=gs://bucket/data",
        "--output=job.yaml",
    )
    assert launch(*jobset, *bucket) == 0
    printed = capsys.readouterr()
    assert "32 hosts" in printed.out and "--gin.DATA_SHARDS=32" in printed.err
    jobset = yaml.safe_load(pathlib.Path("job.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (jobset["kind"], job["replicas"], spec["parallelism"], spec["completions"]) == ("JobSet", 2, 16, 16)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["env"] == [{"name": "TFDS_DATA_DIR", "value": "gs://bucket/data"}]
    code = container["command"][2].replace("t5x_lab", "printf '%s\\n'", 1)
    program = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert program.stdout.splitlines() == [*bucket[1:], "--distributed"]
    # Kubernetes' own schema of jobs, where it is installed.
    validate = pytest.importorskip("kubernetes_validate").validate
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, "spec": spec}, "1.30", strict=True)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--kind=jobset", "--topology=v5e:4x4", *train()], "ends with its pod"),
        (["--kind=jobset", "--topology=v5x:4x4", *train()], "--topology=v5e:4x4"),
        (["--kind=jobset", "--topology=v5e:4x4", "--name=My Run", *train("gs://b/r")], "lower case letters"),
        (["--kind=jobset", "--topology=v5e:4x4", *train("gs://b/r", 6, "--gin.MESH=data=3")], "MESH"),
        (["--kind=slurm", *train("run", 6, "--gin.BATCH_SZE=8")], "BATCH_SZE"),
        (["--kind=slurm", "--env=HOME", *train()], "--env is HOME. It must be NAME=VALUE."),
        (["--kind=slurm", "--hosts=0", *train()], "--hosts is 0"),
        (["--kind=hosts", *train()], "--coordinator_address=host0:1234"),
        (["--kind=slurm"], "Write the command after `--`"),
        (["--kind=slurm", "--", "demo"], "one of train, eval"),
    ],
)
def test_mistakes_are_found_before_a_job_waits_in_a_queue(argv, says, capsys):
    assert launch("--output=job", *argv) == 2
    assert says in capsys.readouterr().err and not pathlib.Path("job").exists()


@pytest.mark.exhaustive
def test_hosts_that_lose_a_process_start_again_by_themselves(programs):
    programs()
    address = f"localhost:{free_port()}"
    assert (
        launch(
            "--kind=hosts",
            "--hosts=2",
            f"--coordinator_address={address}",
            "--output=job.sh",
            *train("run", 400, "--gin.CHECKPOINT_PERIOD=20"),
        )
        == 0
    )
    environment = {**os.environ, **ONE_CPU}
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(f"host{n}.log", "wb")) for n in range(2)]
        scripts = [
            subprocess.Popen(["bash", "job.sh", str(n)], env=environment, stdout=log, stderr=log) for n, log in enumerate(logs)
        ]
        for script in scripts:
            stack.callback(script.terminate)
        while not os.path.exists("run/metrics.jsonl") or max(losses("run"), default=0) < 60:
            assert scripts[0].poll() is None, pathlib.Path("host0.log").read_text()
            time.sleep(0.2)
        children = pathlib.Path(f"/proc/{scripts[1].pid}/task/{scripts[1].pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert [script.wait(timeout=300) for script in scripts] == [0, 0], pathlib.Path("host0.log").read_text()
    assert sorted(losses("run")) == list(range(1, 401))
