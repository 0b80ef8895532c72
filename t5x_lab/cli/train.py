"""Trains a run. The same command with the same MODEL_DIR continues an interrupted run."""

import argparse
import sys

import absl.logging

from t5x_lab.cli.flags import add_gin_flags, add_process_flags, connect_processes, gin_config, print_once
from t5x_lab.cli.main import FAILURE, STOPPED
from t5x_lab.cli.t5x_flags import add_t5x_flags
from t5x_lab.training.clock import StartUp


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gin_flags(parser)
    add_t5x_flags(parser)
    add_process_flags(parser)


def run(args: argparse.Namespace) -> int | None:
    start_up = StartUp()
    config = gin_config(args)
    absl.logging.set_verbosity(absl.logging.FATAL)  # `Saver` reports failed saves itself
    from t5x_lab.runs.train.summary import dry_run
    from t5x_lab.runs.train.train import train
    from t5x_lab.training.loop import Diverged, Preempted

    try:
        with connect_processes(args, Preempted, Diverged):
            if args.dry_run:
                print_once(dry_run(config))
                return None
            start_up.finish("imports and configuration")
            train(config, start_up)
    except Preempted as stopped:
        print(f"t5x_lab train: {stopped}", file=sys.stderr)
        return STOPPED
    except Diverged as stopped:
        print(f"t5x_lab train: {stopped}", file=sys.stderr)
        return FAILURE
    return None
