"""Compiles a run's step for a TPU slice that need not be there, or the local devices, and reports the bytes it takes."""

import argparse
import dataclasses
import json
import sys

from t5x_lab.cli.flags import add_gin_flags, gin_config


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", help="a TPU slice, such as v5e:16x16; without it, the local devices")
    parser.add_argument("--num_slices", type=int, default=1, help="how many such slices")
    parser.add_argument("--mode", default="train", help="train, eval or predict")
    parser.add_argument(
        "--search", action="store_true", help="try batch sizes, microbatches and remat policies for the best fit"
    )
    add_gin_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.config.errors import UserError
    from t5x_lab.partitioning.topologies import disable_accelerators, topology_devices

    if args.topology is not None:
        disable_accelerators()
    elif args.num_slices != 1:
        raise UserError("--num_slices counts slices of a --topology; give that too.")
    if args.num_slices < 1:
        raise UserError(f"--num_slices is {args.num_slices}; it must be at least 1.")
    # What a program does not depend on need not be given.
    config = gin_config(args, fixed=("TRAIN_STEPS = 1", "TRAIN_TOKENS = None", "MODEL_DIR = 'unused'"))
    if args.dry_run:
        print(config.text)
        return
    from t5x_lab.runs import compile as compiling

    run_config = config.run()
    devices = topology_devices(args.topology, args.num_slices) if args.topology is not None else None
    name = args.topology and (args.topology if args.num_slices == 1 else f"{args.num_slices} slices {args.topology}")
    if not args.search:
        report = compiling.compile_step(run_config, args.mode, devices, name)
    else:
        if args.mode != "train":
            raise UserError("--search is for the training step; leave --mode out.")
        reports = []
        for candidate in compiling.search(run_config, devices, name):
            print(_line(candidate), file=sys.stderr, flush=True)
            reports.append(candidate)
        report = compiling.find_best(reports) or reports[-1]
    print(json.dumps(dataclasses.asdict(report)) if args.json else compiling.to_text(report))


def _line(report) -> str:
    from t5x_lab.runs.compile import settings

    peak = report.bytes_per_device["peak"] / 2**30
    return f"{settings(report)}: {peak:.2f} GiB on each device, {'fits' if report.fits else 'does not fit'}"
