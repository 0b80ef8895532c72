"""Runs a grid of trainings and evaluations. The same command with the same study directory continues an interrupted study."""

import argparse

from t5x_lab.cli.flags import add_gin_flags, gin_config
from t5x_lab.cli.main import FAILURE, STOPPED


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--study_dir", required=True, help="directory of the study")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time on this machine")
    parser.add_argument(
        "--devices",
        action="append",
        default=[],
        help="devices of one of the runs at a time, as in CUDA_VISIBLE_DEVICES, such as 0,1; repeatable (default: all devices)",
    )
    parser.add_argument("--measure", action="store_true", help="measure a step of each training, for the hours of the plan")
    parser.add_argument(
        "--topology", help="TPU slice of each run, such as v5e:4x4: compile the steps for it, for the hours of the plan"
    )
    parser.add_argument("--launch", help="write files that run the study elsewhere, and run nothing: commands, slurm or jobset")
    parser.add_argument("--report", action="store_true", help="write the report of the results at hand, and run nothing")
    add_gin_flags(parser)


def run(args: argparse.Namespace) -> int | None:
    import os

    from t5x_lab.partitioning.topologies import disable_accelerators

    if args.topology is not None:
        disable_accelerators()
    from t5x_lab.config.errors import UserError, check_choice
    from t5x_lab.config.gin_files import build
    from t5x_lab.config.log import log
    from t5x_lab.config.object_storage import check_local
    from t5x_lab.study.equality import check_equality
    from t5x_lab.study.execution import Execution
    from t5x_lab.study.launch import KINDS, write_launch_files
    from t5x_lab.study.plan import make_plan
    from t5x_lab.study.plan_table import plan_table
    from t5x_lab.study.quantities import compute_quantities
    from t5x_lab.study.report import write_report
    from t5x_lab.study.timing import compile_steps, measure_steps

    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}. It must be at least 1.")
    if args.launch is not None:
        check_choice("--launch", args.launch, KINDS)
    gin_config(args, "studies/defaults.gin")
    study = build("Study")  # as parsed: the text of a configuration sorts dictionaries, and tables have the order of the file
    check_local("--study_dir", args.study_dir)
    plan = make_plan(study, os.path.abspath(args.study_dir))
    quantities = compute_quantities(plan)
    equal = check_equality(plan, quantities)
    times = {}
    if args.topology and args.launch is None:
        times = compile_steps(plan, args.topology, log)
    elif args.measure:
        times = measure_steps(plan, log, args.jobs)
    print(plan_table(plan, quantities, times, args.jobs))
    print("\n".join(equal))
    if args.dry_run:
        return None
    if args.launch is not None:
        print(write_launch_files(plan, args.launch, args.topology))
        return None
    if args.report:
        print(write_report(plan, quantities, equal))
        return None
    flops = {name: run_quantities.flops for name, run_quantities in quantities.items()}
    execution = Execution(plan, args.jobs, tuple(args.devices), flops, log)
    is_finished = execution.run()
    print(write_report(plan, quantities, equal))
    if is_finished:
        return None
    return STOPPED if execution.was_stopped else FAILURE
