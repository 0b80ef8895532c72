"""Predictions, scores or ranked choices of every example of a task or a file, to JSONL. Continues after an interruption."""

import argparse
import json
import os

from t5x_lab.cli.flags import (
    SAMPLING,
    add_gin_flags,
    add_model_flags,
    add_process_flags,
    add_sampling_flags,
    chosen_step,
    gin_config,
    joined_processes,
    model_dirs,
    print_once,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--input",
        help='.txt, one input a line, or .jsonl with "inputs" and, to score, "targets", to rank, "choices"; or .gz, .zst',
    )
    parser.add_argument("--task", help="instead of --input: a text with its objective, a SeqIO task, or a mixture")
    parser.add_argument("--split", default="validation", help="of the task")
    parser.add_argument("--output", required=True, help="the .jsonl file to write; what it already holds is not done again")
    parser.add_argument(
        "--mode",
        choices=("predict", "score", "rank", "classify"),
        default="predict",
        help="generate, score the targets, rank choices, or classify",
    )
    parser.add_argument("--choice", action="append", default=[], help="to rank, where lines have no choices; repeat it")
    parser.add_argument("--eos", action="store_true", help="to score or rank a file: an end token behind targets and choices")
    parser.add_argument("--batch_size", type=int, default=32, help="texts at a time; fewer of long ones")
    parser.add_argument("--max_length", type=int, help="cut inputs from the left, to read no more tokens than this")
    parser.add_argument(
        "--whole_inputs", action="store_true", help="of a task: not cut to TASK_FEATURE_LENGTHS, as in training"
    )
    parser.add_argument("--shard_id", type=int, default=0, help="this process's share of the input")
    parser.add_argument("--num_shards", type=int, default=1, help="shares of the input")
    add_sampling_flags(parser)
    add_gin_flags(parser)
    add_process_flags(parser)


def run(args: argparse.Namespace) -> None:
    with joined_processes(args):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    import jax

    from t5x_lab.checkpoints.layout import absolute_path
    from t5x_lab.config.errors import UserError
    from t5x_lab.evaluation.examples import check_shard, read_examples
    from t5x_lab.evaluation.infer import infer, rank_report
    from t5x_lab.evaluation.results import as_json
    from t5x_lab.runs.load import load

    if bool(args.input) == bool(args.task):
        raise UserError("Give either --input, a file, or --task, a name.")
    if args.input and (args.gin_file or args.gin_bindings or args.gin):
        raise UserError("A file's examples depend on no configuration: leave the gin flags out, or give --task.")
    if args.dry_run:
        print_once(_config(args).text)
        return
    if args.input and os.path.realpath(args.input) == os.path.realpath(args.output):
        raise UserError("--input and --output name the same file; results would be written over the examples.")

    check_shard(args.shard_id, args.num_shards)
    shard = dict(shard_id=args.shard_id, num_shards=args.num_shards)
    of_file = lambda: read_examples(args.input, args.mode, args.choice, **shard)
    total = sum(1 for _ in of_file()) if args.input else None  # and what is wrong with a line is found before anything is done
    model = load(model_dirs(args.model_dir), step=chosen_step(args.step), weights=args.weights)
    infer(
        model,
        of_file() if args.input else _of_task(args, model, **shard),
        args.output,
        mode=args.mode,
        batch_size=args.batch_size,
        sampling={name: getattr(args, name) for name in SAMPLING},
        eos=args.eos,
        max_length=args.max_length,
        settings={
            "model_dir": ",".join(str(absolute_path(directory)) for directory in model_dirs(args.model_dir)),
            "step": model.step,
            "choices": args.choice,
            "gin": [*args.gin_bindings, *args.gin],
            "whole_inputs": args.whole_inputs,
            "weights": args.weights,
            "shard": f"{args.shard_id} of {args.num_shards}",
        },
        writes=jax.process_index() == 0,
        total=total,
    )
    if args.mode == "rank" and jax.process_index() == 0:
        print(json.dumps(as_json(rank_report(args.output, args.choice))))


def _config(args: argparse.Namespace):
    from t5x_lab.config.gin_files import binding
    from t5x_lab.runs.config import run_config_file

    task = (binding(f"MIXTURE_OR_TASK_NAME={args.task}"),) if args.task else ()
    return gin_config(args, run_config_file(model_dirs(args.model_dir)[0]), "runs/infer.gin", fixed=task)


def _of_task(args: argparse.Namespace, model, **shard: int):
    from t5x_lab.data.pipeline import resolve_tasks
    from t5x_lab.evaluation.examples import task_examples

    config = _config(args)
    network, data = model.network, config.data()
    tasks = resolve_tasks(data, network.architecture, network.vocab_size)
    options = dict(ends=model.end_ids, cut=not args.whole_inputs, **shard)
    return task_examples(tasks, args.split, args.mode, model.vocabulary, **options)
