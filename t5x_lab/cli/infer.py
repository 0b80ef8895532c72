"""Predictions or scores of every example of a .jsonl or .txt file, to JSONL. Continues after an interruption."""

import argparse
import os

from t5x_lab.cli.flags import SAMPLING, add_model_flags, add_sampling_flags, chosen_step


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--input", required=True, help='a .txt file (one input a line) or .jsonl with "inputs" and, to score, "targets"'
    )
    parser.add_argument("--output", required=True, help="the .jsonl file to write; what it already holds is not done again")
    parser.add_argument("--mode", choices=("predict", "score"), default="predict", help="generate, or score the targets")
    parser.add_argument("--batch_size", type=int, default=32, help="examples at a time")
    parser.add_argument("--shard_id", type=int, default=0, help="this process's share of the input")
    parser.add_argument("--num_shards", type=int, default=1, help="shares of the input")
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> None:
    import t5x_lab
    from t5x_lab.config.errors import UserError
    from t5x_lab.evaluation.infer import infer, read_examples, shard

    if os.path.realpath(args.input) == os.path.realpath(args.output):
        raise UserError("--input and --output name the same file; results would be written over the examples.")

    examples = shard(read_examples(args.input, args.mode), args.shard_id, args.num_shards)
    model = t5x_lab.load(args.model_dir, step=chosen_step(args.step))
    sampling = {name: getattr(args, name) for name in SAMPLING}
    infer(model, examples, args.output, mode=args.mode, batch_size=args.batch_size, sampling=sampling)
