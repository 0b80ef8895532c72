"""Launch files for 1, 4 and 64 hosts and for two slices, started with processes of this machine in the place of hosts.

`t5x_lab launch` writes the files. In the place of srun and of GKE's JobSet controller are functions that set the variables that
these set. In the place of `t5x_lab` is this program, which joins the other processes as `t5x_lab train --distributed` does; the
first one compares numbers and arguments of all. Nothing is trained: tests/test_launch.py trains with two processes.

    python benchmarks/launch_dry_runs.py [--hosts=1 --hosts=4 --hosts=64]
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

RUN = [
    "train", "--gin_file=models/decoder/tiny.gin", "--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", "--gin.DATA_SHARDS=64",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}', "--gin.VOCABULARY=@ByteVocabulary()", "--gin.BATCH_SIZE=512",
    "--gin.TRAIN_STEPS=1", "--gin.MODEL_DIR=gs://bucket/run",
]  # fmt: skip
SLICES = {1: "v5e:2x2", 4: "v5e:4x4", 64: "v5p:4x8x8"}  # of this number of hosts
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
LIMIT = 600  # seconds until hosts that have not found each other count as lost
SRUN = """
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=0 "${@:2}" & done
status=0
for process in $(jobs -p); do wait $process || status=$?; done
exit $status
"""


def join(argv: Sequence[str]) -> None:
    """Joins the other hosts in the place of `t5x_lab`. The first prints how many there are, and how many commands they have."""
    own = {name: value for name, _, value in (flag.partition("=") for flag in argv)}
    common = [flag for flag in argv if not flag.startswith("--process_id")]
    if not own.keys() & {"--distributed", "--coordinator_address"}:
        print(json.dumps({"hosts": 1, "numbers": [0], "commands": 1}))
        return
    from jax._src import clusters
    from jax._src.distributed import global_state

    from t5x_lab.partitioning.distributed import initialize

    if "TPU_WORKER_HOSTNAMES" in os.environ:  # on a machine without TPUs
        clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm = True
    numbers = [own.get(name) for name in ("--num_processes", "--process_id")]
    initialize(own.get("--coordinator_address"), *(None if number is None else int(number) for number in numbers))
    client = global_state.client
    client.key_value_set(f"hosts/{global_state.process_id}", json.dumps(common))
    client.wait_at_barrier("all", LIMIT * 1000)
    if global_state.process_id == 0:
        commands = dict(client.key_value_dir_get("hosts/"))
        joined = sorted(int(name.rpartition("/")[2]) for name in commands)
        print(json.dumps({"hosts": global_state.num_processes, "numbers": joined, "commands": len({*commands.values()})}))
    client.wait_at_barrier("compared", LIMIT * 1000)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start_slurm(file: str, hosts: int) -> list[subprocess.Popen]:
    """Starts a batch script as Slurm does on its first node. Its srun starts one task for each node."""
    directives = [line.removeprefix("#SBATCH --").strip() for line in open(file) if line.startswith("#SBATCH")]
    assert f"nodes={hosts}" in directives and "ntasks-per-node=1" in directives
    nodes = {"SLURM_NTASKS": str(hosts), "SLURM_STEP_NODELIST": "localhost"}
    return [start(["bash", file], {**nodes, "SLURM_JOB_ID": str(random.randrange(10**6))})]  # JAX derives a port from the job


def start_hosts(file: str, hosts: int) -> list[subprocess.Popen]:
    """Starts the script of a cluster without a scheduler with the number of each host."""
    return [start(["bash", file, str(number)], {}) for number in range(hosts)]


def start_jobset(file: str, hosts: int) -> list[subprocess.Popen]:
    """Starts the pods of a JobSet with the variables that GKE sets in pods with TPUs."""
    import yaml

    (job,) = yaml.safe_load(pathlib.Path(file).read_text())["spec"]["replicatedJobs"]
    spec, slices = job["template"]["spec"], job["replicas"]
    (container,) = spec["template"]["spec"]["containers"]
    own = {variable["name"]: variable["value"] for variable in container.get("env", ())}
    pods = []
    for number in range(slices):
        values = ("localhost", str(slices), str(number)) if slices > 1 else ("", "", "")  # or JAX asks Google's metadata server
        of_slice = dict(
            zip(("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"), values, strict=True)
        )
        names = ",".join(["localhost"] * spec["parallelism"])
        for index in range(spec["completions"]):
            of_pod = {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": names}
            pods.append(start(container["command"], {**own, **of_slice, **of_pod}))
    assert len(pods) == hosts
    return pods


def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen:
    output = open(f"{time.monotonic_ns()}.log", "w")
    return subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, action="append", choices=sorted(SLICES))
    numbers = parser.parse_args().hosts or sorted(SLICES)
    settings = [("slurm", n, 1, ["--gpus_per_host=0", f"--hosts={n}"], start_slurm) for n in numbers]
    settings += [
        ("hosts", n, 1, [f"--hosts={n}", f"--coordinator_address=localhost:{free_port()}"], start_hosts) for n in numbers
    ]
    settings += [("jobset", n, 1, [f"--topology={SLICES[n]}"], start_jobset) for n in numbers]
    settings.append(("jobset", 8, 2, ["--topology=v5e:4x4", "--num_slices=2"], start_jobset))
    path = os.environ["PATH"]
    print(f"{'files':8}{'hosts':>6}{'slices':>7}{'joined':>7}  numbers        commands   seconds")
    for kind, hosts, slices, flags, start_all in settings:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            programs = {"t5x_lab": f'exec {sys.executable} {__file__} --join "$@"', "srun": SRUN, "scontrol": ""}
            os.mkdir("bin")
            for name, code in programs.items():
                pathlib.Path("bin", name).write_text(f"#!/bin/bash\n{code}\n")
                pathlib.Path("bin", name).chmod(0o755)
            launch = [sys.executable, "-m", "t5x_lab", "launch", f"--kind={kind}", "--output=job", *flags, "--", *RUN]
            subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)
            os.environ["PATH"] = f"{folder}/bin:{path}"
            began = time.monotonic()
            processes = start_all("job", hosts)
            statuses = [process.wait(LIMIT) for process in processes]
            seconds = time.monotonic() - began
            logs = [path.read_text() for path in pathlib.Path().glob("*.log")]
            printed = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"hosts"')]
            if any(statuses) or len(printed) != 1:
                sys.exit(f"{kind}, {hosts} hosts: statuses {statuses}\n" + "\n".join(logs)[-4000:])
            (result,) = printed
            as_expected = result["numbers"] == list(range(hosts)) and result["hosts"] == hosts and result["commands"] == 1
            if not as_expected:
                sys.exit(f"{kind}, {hosts} hosts: {result}")
            joined = f"{len(result['numbers']):>7}  0 to {hosts - 1:<10}{'one':10}"
            print(f"{kind:8}{hosts:>6}{slices:>7}{joined}{seconds:>8.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--join"]:
        join(sys.argv[2:])
    else:
        main()
