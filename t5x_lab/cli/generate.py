"""Completes prompts from the command line, a file, or standard input."""

import argparse
import sys

from t5x_lab.cli.flags import (
    SAMPLING,
    add_gin_flags,
    add_model_flags,
    add_process_flags,
    add_sampling_flags,
    connect_processes,
    load_model,
    model_config,
)
from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], help="prompt; repeatable")
    parser.add_argument("--input", help='.txt with one prompt per line, or .jsonl with "inputs"; also .gz, .zst')
    parser.add_argument("--num_samples", type=int, default=1, help="number of completions per prompt")
    add_sampling_flags(parser)
    add_gin_flags(parser, has_dry_run=False)
    add_process_flags(parser)


def run(args: argparse.Namespace) -> None:
    with connect_processes(args):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    import jax

    from t5x_lab.evaluation.inference.files import read_examples

    prompts = list(args.prompt)
    if args.input:
        prompts += [example.inputs for example in read_examples(args.input, "predict")]
    model = load_model(args, model_config(args))

    def complete(prompts):
        options = {name: getattr(args, name) for name in SAMPLING}
        options["num_samples"] = args.num_samples
        for prompt, samples in zip(prompts, model.generate(prompts, **options), strict=True):
            for text in samples if jax.process_index() == 0 else []:
                print(f"{prompt}  →  {text}" if sys.stdout.isatty() else f"{prompt}\t{text}", flush=True)

    if prompts:
        complete(prompts)
        return
    if jax.process_count() > 1:
        raise UserError("Several processes cannot read prompts from standard input. Pass --prompt or --input to all of them.")
    print("Enter a prompt. Ctrl-D exits.", file=sys.stderr)
    for line in sys.stdin:
        complete([line.rstrip("\n")])
