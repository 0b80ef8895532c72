"""Trains the run that the gin files describe, and continues it when run again with the same MODEL_DIR."""

import argparse
import sys

from t5x_lab.cli.flags import add_gin_flags, gin_config
from t5x_lab.cli.main import FAILURE, STOPPED


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gin_flags(parser)
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes of this run; a TPU pod, Slurm, Open MPI and Kubernetes need nothing more",
    )
    group.add_argument("--coordinator_address", help="host:port of process 0, elsewhere; or JAX_COORDINATOR_ADDRESS")
    group.add_argument("--num_processes", type=int, help="or JAX_NUM_PROCESSES")
    group.add_argument("--process_id", type=int, help="from 0; or JAX_PROCESS_ID")


def run(args: argparse.Namespace) -> int | None:
    config = gin_config(args)
    place = (args.coordinator_address, args.num_processes, args.process_id)
    if (args.distributed or any(part is not None for part in place)) and not args.dry_run:
        from t5x_lab.partitioning.distributed import initialize

        initialize(*place)
    from t5x_lab.partitioning.distributed import ending_together
    from t5x_lab.runs import train as training
    from t5x_lab.training.loop import Diverged, Preempted

    if args.dry_run:
        print(training.dry_run(config))
        return None
    try:
        with ending_together(Preempted, Diverged):
            training.train(config)
    except Preempted as stopped:
        print(f"t5x_lab train: {stopped}", file=sys.stderr)
        return STOPPED
    except Diverged as stopped:
        print(f"t5x_lab train: {stopped}", file=sys.stderr)
        return FAILURE
    return None
