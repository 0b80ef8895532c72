"""A script for every host of a cluster without a scheduler."""

import shlex
from collections.abc import Mapping, Sequence

PAUSE_SECONDS = 10  # before a restart


def make_host_script(
    command: Sequence[str], *, hosts: int, coordinator: str, max_restarts: int, environment: Mapping[str, str] | None = None
) -> str:
    """Returns a script that runs a command on the host of a number, its argument.

    If one process fails, the others end too, and the scripts of all hosts start their processes again. A finished run (exit
    status 0) and a mistake of the user's (2) end the script. So does SIGTERM, after the process has saved (3).

    Args:
      command: words of the command.
      hosts: number of hosts.
      coordinator: address of host 0 with a free port, such as "host0:1234".
      max_restarts: number of restarts.
      environment: additional environment variables.
    """
    flags = [f"--coordinator_address={coordinator}", f"--num_processes={hosts}"]
    return "\n".join(
        (
            "#!/bin/bash",
            f"# Run this on each of {hosts} hosts with its number from 0 on. Host 0 is {coordinator.rpartition(':')[0]}.",
            *(f"export {variable}={shlex.quote(value)}" for variable, value in (environment or {}).items()),
            "",
            "trap 'stop=1; kill -TERM $process 2>/dev/null' TERM INT",
            f"for restart in $(seq 0 {max_restarts}); do",
            f'  {shlex.join([*command, *flags])} --process_id="$1" &',
            "  process=$!",
            "  wait $process; status=$?",
            "  while kill -0 $process 2>/dev/null; do wait $process; status=$?; done  # a signal interrupts `wait`",
            "  case $status in 0|2) break ;; esac",
            '  [ -n "$stop" ] && break',
            f"  sleep {PAUSE_SECONDS}",
            "done",
            "exit $status",
            "",
        )
    )
