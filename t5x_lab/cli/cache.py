"""Prepares tasks ahead, as SeqIO's caches, on Apache Beam. Continues after an interruption."""

import argparse

from t5x_lab.cli.flags import add_gin_flags, gin_config


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", required=True, help="the folder of caches; CACHE_DIRS names it to a training")
    parser.add_argument(
        "--task", action="append", default=[], help="a task or mixture; repeat it; MIXTURE_OR_TASK_NAME unless given"
    )
    parser.add_argument(
        "--pipeline_options",
        default="",
        help="Beam's own flags, joined by commas, such as --runner=DataflowRunner,--project=mine; by default its local runner",
    )
    add_gin_flags(parser)


def run(args: argparse.Namespace) -> None:
    from t5x_lab.config.gin_files import binding
    from t5x_lab.data.environment import check_environment

    named = (binding(f"MIXTURE_OR_TASK_NAME={args.task[0]}"),) if args.task else ()
    config = gin_config(args, "runs/cache.gin", fixed=named)
    if args.dry_run:
        print(config.text)
        return
    check_environment()
    from t5x_lab.runs.cache import cache_tasks

    options = [flag.strip() for flag in args.pipeline_options.split(",") if flag.strip()]
    for task, splits in cache_tasks(config, args.task, args.output_dir, options).items():
        print(f"{task}: {', '.join(f'{count:,} examples of {split}' for split, count in splits.items())}")
