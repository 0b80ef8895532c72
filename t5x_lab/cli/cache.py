"""Preprocesses tasks offline into SeqIO caches, with Apache Beam. Resumes after an interruption."""

import argparse

from t5x_lab.cli.flags import add_beam_flag, add_gin_flags, gin_config


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", required=True, help="folder of caches; set CACHE_DIRS to it for training")
    parser.add_argument(
        "--task", action="append", default=[], help="a task or mixture; repeatable; default: MIXTURE_OR_TASK_NAME"
    )
    add_beam_flag(parser)
    add_gin_flags(parser)


def run(args: argparse.Namespace) -> None:
    from t5x_lab.config.beam import split_options
    from t5x_lab.config.gin_files import binding
    from t5x_lab.runs.data_layer import load_data_layer

    task_binding = (binding(f"MIXTURE_OR_TASK_NAME={args.task[0]}"),) if args.task else ()
    config = gin_config(args, "runs/cache.gin", fixed=task_binding)
    if args.dry_run:
        print(config.text)
        return
    load_data_layer()
    from t5x_lab.runs.cache import cache_tasks

    options = split_options(args.pipeline_options)
    for task, splits in cache_tasks(config, args.task, args.output_dir, options).items():
        print(f"{task}: {', '.join(f'{count:,} examples of {split}' for split, count in splits.items())}")
