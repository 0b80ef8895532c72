"""Files that run a study elsewhere: a shell script of all commands, or a Slurm array for each stage.

A command that ends with status 0 moves the run's file from `pending/` to `finished/`, so that `t5x_lab study` with the same
directory knows what is finished, starts the rest, and writes the report.
"""

import pathlib
import shlex
from collections.abc import Sequence

from t5x_lab.config.json_files import write_atomically
from t5x_lab.study.execution import FINISHED, LOGS, PENDING, Execution, command
from t5x_lab.study.plan import Plan, PlannedRun

LAUNCH = "launch"  # folder of a study directory
KINDS = ("commands", "slurm")


def write_launch_files(plan: Plan, kind: str) -> pathlib.Path:
    """Writes the launch files of a kind for all runs that are not finished. Returns the file to run.

    Args:
      plan: the plan.
      kind: "commands" or "slurm".
    """
    execution = Execution(plan)
    execution.prepare()
    runs = [run for run in plan.runs.values() if not execution.is_finished(run)]
    folder = pathlib.Path(plan.study_dir) / LAUNCH
    folder.mkdir(parents=True, exist_ok=True)
    write = {"commands": _write_commands, "slurm": _write_slurm}[kind]
    return write(plan, runs, folder)


def _write_commands(plan: Plan, runs: Sequence[PlannedRun], folder: pathlib.Path) -> pathlib.Path:
    """Writes a script that runs one command after the other and skips those that continue a failed one."""
    script = folder / "commands.sh"
    lines = ["#!/bin/bash", "# All runs of the study, each after the run that it continues.", ""]
    for run in runs:
        line = f"t5x_lab {shlex.join(command(plan, run))} && {_mark(plan, run.name)}"
        lines.append(line if run.after is None else f"{_is_marked(plan, run.after)} && {line}")
    write_atomically(script, "\n".join(lines) + "\n")
    script.chmod(0o755)
    return script


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
    script = folder / "submit.sh"
    write_atomically(script, "\n".join(submit) + "\n")
    script.chmod(0o755)
    return script


def _mark(plan: Plan, name: str) -> str:
    """Returns the shell command that marks a run as finished."""
    pending, finished = (shlex.quote(f"{plan.study_dir}/{folder}/{name}.json") for folder in (PENDING, FINISHED))
    return f"mv {pending} {finished}"


def _is_marked(plan: Plan, name: str) -> str:
    return f"[ -e {shlex.quote(f'{plan.study_dir}/{FINISHED}/{name}.json')} ]"
