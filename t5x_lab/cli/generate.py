"""Completes prompts from the command line, a file, or typed in one by one."""

import argparse
import sys

from t5x_lab.cli.flags import (
    SAMPLING,
    add_model_flags,
    add_process_flags,
    add_sampling_flags,
    chosen_step,
    joined_processes,
    model_dirs,
)
from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; repeat it for more")
    parser.add_argument("--input", help="a file with one prompt a line")
    parser.add_argument("--num_samples", type=int, default=1, help="completions of each prompt")
    add_sampling_flags(parser)
    add_process_flags(parser)


def run(args: argparse.Namespace) -> None:
    with joined_processes(args):
        _run(args)


def _run(args: argparse.Namespace) -> None:
    import jax

    from t5x_lab.runs.model.load import load

    prompts = list(args.prompt)
    if args.input:
        try:
            with open(args.input, encoding="utf-8") as file:
                prompts += [line.rstrip("\n") for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The prompts in {args.input} cannot be read: {error}") from error
    model = load(model_dirs(args.model_dir), step=chosen_step(args.step), weights=args.weights)

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
        raise UserError("Several processes cannot take turns at the keyboard; give all of them the same --prompt or --input.")
    print("Type a prompt and Enter; Ctrl-D ends.", file=sys.stderr)
    for line in sys.stdin:
        complete([line.rstrip("\n")])
