"""Compiles a step of a run for a TPU slice, without the hardware, or for the local devices. Reports memory and FLOPs."""

import argparse
import dataclasses
import json
import sys

from t5x_lab.cli.flags import add_gin_flags, gin_config


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", help="TPU slice, such as v5e:16x16; default: the local devices")
    parser.add_argument("--num_slices", type=int, default=1, help="number of slices")
    parser.add_argument("--mode", default="train", help="step to compile: train, eval or predict")
    parser.add_argument(
        "--search", action="store_true", help="search batch size, microbatches and remat policy with the fewest FLOPs that fit"
    )
    add_gin_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.config.errors import UserError
    from t5x_lab.partitioning.topologies import disable_accelerators, topology_devices

    if args.topology is not None:
        disable_accelerators()
    elif args.num_slices != 1:
        raise UserError("--num_slices needs a --topology.")
    if args.num_slices < 1:
        raise UserError(f"--num_slices is {args.num_slices}. It must be at least 1.")
    # Settings that do not affect the program have defaults.
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
            raise UserError("--search supports the training step only. Remove --mode.")
        reports = []
        for candidate in compiling.search(run_config, devices, name):
            print(_line(candidate), file=sys.stderr, flush=True)
            reports.append(candidate)
        report = compiling.find_best(reports) or reports[-1]
    print(json.dumps(dataclasses.asdict(report)) if args.json else compiling.to_text(report))


def _line(report) -> str:
    from t5x_lab.runs.compile import settings

    peak = report.bytes_per_device["peak"] / 2**30
    return f"{settings(report)}: {peak:.2f} GiB per device, {'fits' if report.fits else 'does not fit'}"
