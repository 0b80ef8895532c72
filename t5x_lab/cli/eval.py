"""Runs the evaluations of a run (EVALS) on its checkpoints: loss, SeqIO metrics, ranking, and your own."""

import argparse
import json
import sys

from t5x_lab.cli.flags import (
    add_gin_flags,
    add_model_flags,
    add_process_flags,
    chosen_step,
    connect_processes,
    gin_config,
    model_dirs,
    print_once,
)
from t5x_lab.cli.t5x_flags import add_t5x_flags, take_t5x_bindings


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, several_steps=True, is_required=False)
    parser.add_argument("--output", help="directory for the results; default: the run directory")
    add_gin_flags(parser)
    add_t5x_flags(parser)
    add_process_flags(parser)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="evaluate each new checkpoint until the run ends, skipping evaluations that have results",
    )
    parser.add_argument(
        "--wait_minutes", type=float, default=60.0, help="with --follow: stop if there is no new checkpoint for this time"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object to stdout and everything else to stderr")


def run(args: argparse.Namespace) -> None:
    import jax

    from t5x_lab.config.errors import UserError
    from t5x_lab.evaluation.results import finite_json
    from t5x_lab.observe.console import describe
    from t5x_lab.runs.config.checkpoint_config import config_files
    from t5x_lab.runs.config.gin_config import is_run_directory
    from t5x_lab.runs.evaluate.checkpoints import evaluate_checkpoints, evaluate_model, wait_for_run
    from t5x_lab.runs.model.sharded_model import ShardedModel
    from t5x_lab.runs.train.summary import with_model_info

    take_t5x_bindings(args, output="EVAL_OUTPUT_DIR")
    if args.model_dir is None:
        raise UserError("Pass --model_dir with a run directory or a checkpoint.")
    directories = model_dirs(args.model_dir)
    if len(directories) > 1 and (args.follow or args.dry_run):
        raise UserError("--follow and --dry_run support one run only. Pass a single directory to --model_dir.")
    if args.follow:
        if args.step not in ("latest", "all"):
            raise UserError(f"--follow evaluates every checkpoint without results. Remove --step={args.step}.")
        wait_for_run(args.model_dir, args.wait_minutes)
    is_run = is_run_directory(directories[0])
    files = config_files(directories[0], args.trust)
    if not is_run:
        if args.output is None and not args.dry_run:
            raise UserError(f"{directories[0]} is not a run directory. Set --output to a directory for the results.")
        if args.step == "all" or "," in args.step:
            raise UserError(
                f'--step is "{args.step}", but {directories[0]} is not a run directory. Evaluate one step at a time.'
            )
    config = gin_config(args, *files)
    results = {}
    with connect_processes(args):
        if args.dry_run:
            print_once(with_model_info(config, ShardedModel(config.model(), config.mesh(), rules=config.sharding())))
            return
        if len(directories) > 1 or not is_run:
            options = dict(weights=args.weights or "last", trust=args.trust, parameter_dtype=args.parameter_dtype)
            options["output"] = args.output or directories[0]
            evaluations = evaluate_model(config, directories, chosen_step(args.step), **options)
        else:
            options = dict(wait_minutes=args.wait_minutes, weights=args.weights, follow=args.follow)
            options |= dict(parameter_dtype=args.parameter_dtype, output=args.output)
            evaluations = evaluate_checkpoints(config, args.model_dir, args.step, **options)
        try:
            for step, splits in evaluations:
                results[step] = splits
                if jax.process_index() > 0:
                    continue  # only the first process prints
                for split, metrics in splits.items():
                    print(f"step {step}  {split}  {describe(metrics)}", file=sys.stderr if args.json else sys.stdout)
        finally:
            if args.json and results:
                print_once(json.dumps(finite_json(results)))
