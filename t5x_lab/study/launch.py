"""Files that run a study elsewhere: a shell script of all commands, a Slurm array or GKE JobSets for each stage.

A command that ends with status 0 moves the run's file from `pending/` to `finished/`, so that `t5x_lab study` with the same
directory knows what is finished, starts the rest, and writes the report.
"""

import hashlib
import math
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import write_atomically
from t5x_lab.study.execution import FINISHED, LOGS, PENDING, Execution, command
from t5x_lab.study.plan import Plan, PlannedRun

LAUNCH = "launch"  # folder of a study directory
KINDS = ("commands", "slurm", "jobset")
ACCELERATORS = {  # TPU generations as GKE names them
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
}  # fmt: skip
CHIPS_PER_HOST = 4
IMAGE, CLAIM = "my-registry/t5x_lab", "t5x-lab"  # container image and PersistentVolumeClaim, which users replace in the files


def write_launch_files(plan: Plan, kind: str, topology: str | None = None) -> pathlib.Path:
    """Writes the launch files of a kind for all runs that are not finished. Returns the file to run.

    Args:
      plan: the plan.
      kind: "commands", "slurm" or "jobset".
      topology: TPU slice of each run, such as "v5e:4x4", for "jobset".

    Raises:
      UserError: for a slice that GKE does not have.
    """
    slice_settings = _parse_slice(topology) if kind == "jobset" else {}
    execution = Execution(plan)
    execution.prepare()
    runs = [run for run in plan.runs.values() if not execution.is_finished(run)]
    folder = pathlib.Path(plan.study_dir) / LAUNCH
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "jobset":
        return _write_jobsets(plan, runs, folder, slice_settings)
    return {"commands": _write_commands, "slurm": _write_slurm}[kind](plan, runs, folder)


def _write_commands(plan: Plan, runs: Sequence[PlannedRun], folder: pathlib.Path) -> pathlib.Path:
    """Writes a script that runs one command after the other and skips those that continue a failed one."""
    lines = ["#!/bin/bash", "# All runs of the study, each after the run that it continues.", ""]
    for run in runs:
        line = f"t5x_lab {shlex.join(command(plan, run))} && {_mark(plan, run.name)}"
        lines.append(line if run.after is None else f"{_is_marked(plan, run.after)} && {line}")
    return _write_script(folder / "commands.sh", lines)


def _write_slurm(plan: Plan, runs: Sequence[PlannedRun], folder: pathlib.Path) -> pathlib.Path:
    """Writes an array of jobs for each stage, which starts after those of the stages before, and a script that submits all.

    A job ends at once if the run that it continues has failed. Partition, nodes and time are set by sbatch's variables, such
    as SBATCH_PARTITION, or in the files.
    """
    submit = ["#!/bin/bash", "# Submits an array of jobs for each stage of the study.", "set -e", ""]
    stages = [stage for stage in plan.study.stages if any(run.stage is stage for run in runs)]
    for stage in stages:
        of_stage = [run for run in runs if run.stage is stage]
        job = folder / f"{stage.name}.sbatch"
        distributed = " --distributed" if stage.command == "train" else ""
        cases = []
        for number, run in enumerate(of_stage):
            check = f"{_is_marked(plan, run.after)} || exit 1; " if run.after else ""
            line = f"srun t5x_lab {shlex.join(command(plan, run))}{distributed}"
            cases.append(f"  {number}) {check}{line} && {_mark(plan, run.name)} ;;")
        options = {
            "job-name": stage.name,
            "array": f"0-{len(of_stage) - 1}",
            "output": shlex.quote(f"{plan.study_dir}/{LOGS}/{stage.name}-%a.log"),
        }
        directives = [f"#SBATCH --{name}={value}" for name, value in options.items()]
        text = ["#!/bin/bash", *directives, "", "case $SLURM_ARRAY_TASK_ID in", *cases, "esac", ""]
        write_atomically(job, "\n".join(text))
        before = [name for name in stage.after if name in [other.name for other in stages]]
        dependency = f" --dependency=afterany:{':'.join(f'${name}' for name in before)}" if before else ""
        submit.append(f"{stage.name}=$(sbatch --parsable{dependency} {shlex.quote(str(job))})")
    return _write_script(folder / "submit.sh", submit)


def _write_script(path: pathlib.Path, lines: Sequence[str]) -> pathlib.Path:
    write_atomically(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def _parse_slice(topology: str | None) -> dict[str, Any]:
    """Returns the generation, the chips along each axis, and the hosts of a TPU slice."""
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", topology or "")
    if match is None or match[1] not in ACCELERATORS:
        raise UserError(
            f"--launch=jobset needs the TPU slice of each run, such as --topology=v5e:4x4. It is {topology}. Generations: "
            f"{', '.join(ACCELERATORS)}."
        )
    chips = math.prod(map(int, match[2].split("x")))
    return {
        "accelerator": ACCELERATORS[match[1]],
        "topology": match[2],
        "hosts": max(1, chips // CHIPS_PER_HOST),
        "chips": chips,
    }


def _write_jobsets(
    plan: Plan, runs: Sequence[PlannedRun], folder: pathlib.Path, slice_settings: dict[str, Any]
) -> pathlib.Path:
    """Writes a JobSet for each run, a file for each stage, and a script that submits a stage when the one before has ended.

    A job ends at once if the run that it continues has failed. The study directory is on a volume that all pods mount.
    """
    identifier = hashlib.sha256(plan.study_dir.encode()).hexdigest()[:6]
    submit = ["#!/bin/bash", "# Submits the JobSets of the study, one stage after the other.", "set -e", ""]
    for stage in (stage for stage in plan.study.stages if any(run.stage is stage for run in runs)):
        labels = {"study": identifier, "stage": stage.name}
        jobsets = []
        for number, run in enumerate(run for run in runs if run.stage is stage):
            name = f"t5x-lab-{identifier}-{stage.name.replace('_', '-').lower()[:20].strip('-')}-{number}"
            distributed = " --distributed" if slice_settings["hosts"] > 1 else ""
            check = f"{_is_marked(plan, run.after)} || exit 0; " if run.after else ""
            mark = f'if [ "${{JOB_COMPLETION_INDEX:-0}}" = 0 ]; then {_mark(plan, run.name)}; fi'
            code = f"{check}t5x_lab {shlex.join(command(plan, run))}{distributed} && {mark}"
            jobsets.append(_jobset(plan, name, {**labels, "run": run.name[:63].strip("-_")}, code, slice_settings))
        file = folder / f"{stage.name}.yaml"
        write_atomically(file, yaml.safe_dump_all(jobsets, sort_keys=False, width=1000))
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        submit += [
            f"kubectl apply -f {shlex.quote(str(file))}",
            f"kubectl wait --for=jsonpath='{{.status.terminalState}}' --timeout=-1s jobset -l {selector}",
        ]
    return _write_script(folder / "submit.sh", submit)


def _jobset(plan: Plan, name: str, labels: dict[str, str], code: str, slice_settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a JobSet with one job on one slice, as `kubectl apply` reads it."""
    hosts, chips = slice_settings["hosts"], slice_settings["chips"]
    container = {
        "name": "t5x-lab",
        "image": IMAGE,
        "command": ["bash", "-c", code],
        "resources": {"limits": {"google.com/tpu": min(chips, CHIPS_PER_HOST)}},
        "volumeMounts": [{"name": "study", "mountPath": plan.study_dir}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,  # time to save a checkpoint after SIGTERM
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": slice_settings["accelerator"],
            "cloud.google.com/gke-tpu-topology": slice_settings["topology"],
        },
        "containers": [container],
        "volumes": [{"name": "study", "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
    job = {"parallelism": hosts, "completions": hosts, "backoffLimit": 0, "template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "failurePolicy": {"maxRestarts": 3},  # a restarted run continues from its last checkpoint
            "replicatedJobs": [{"name": "run", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _mark(plan: Plan, name: str) -> str:
    """Returns the shell command that marks a run as finished."""
    pending, finished = (shlex.quote(f"{plan.study_dir}/{folder}/{name}.json") for folder in (PENDING, FINISHED))
    return f"mv {pending} {finished}"


def _is_marked(plan: Plan, name: str) -> str:
    return f"[ -e {shlex.quote(f'{plan.study_dir}/{FINISHED}/{name}.json')} ]"
