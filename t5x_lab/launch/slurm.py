"""Batch scripts of Slurm."""

import shlex
from collections.abc import Mapping, Sequence

GRACE_SECONDS = 120  # between SIGTERM and the time limit


def make_batch_script(
    name: str,
    command: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int,
    max_restarts: int,
    time: str | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Returns a script for `sbatch` that runs a command with one process per node.

    Two minutes before the time limit the processes are asked to save. The job is queued again after all exit statuses
    except 0, of a finished run, and 2, of a mistake of the user's, which a restart would repeat.

    Args:
      name: name of the job.
      command: words of the command.
      nodes, gpus_per_node: size of the job. Without GPUs: 0.
      max_restarts: number of times that the job is queued again after failures. After saving it always is.
      time: time limit, such as "24:00:00". None = the partition's.
      options: further options of sbatch, such as "partition=gpu".
      environment: additional environment variables.
    """
    gpus = [f"gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    limit = [f"time={time}"] if time else []
    directives = [
        f"job-name={name}", f"nodes={nodes}", "ntasks-per-node=1", *gpus, *limit, f"signal=TERM@{GRACE_SECONDS}", "requeue",
        "open-mode=append", *options,
    ]  # fmt: skip
    return "\n".join(
        (
            "#!/bin/bash",
            *(f"#SBATCH --{directive}" for directive in directives),
            *(f"export {variable}={shlex.quote(value)}" for variable, value in (environment or {}).items()),
            "",
            f"srun --kill-on-bad-exit=1 {shlex.join(command)}",
            "status=$?",
            "case $status in",
            "  0|2) exit $status ;;  # finished, or a mistake that a restart would repeat",
            '  3) scontrol requeue "$SLURM_JOB_ID" ;;  # stopped and saved',
            f'  *) [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ] && scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
            "exit $status",
            "",
        )
    )
