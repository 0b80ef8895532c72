"""Converts a checkpoint: from T5X or Hugging Face to t5x_lab, or from t5x_lab or T5X to Hugging Face."""

import argparse

from t5x_lab.cli.flags import add_gin_flags, add_trust_flag, chosen_step, gin_config
from t5x_lab.config.errors import UserError

WRITTEN = ("t5x_lab", "hf")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="run directory, or checkpoint of any format")
    parser.add_argument("--target", required=True, help="new directory; in t5x_lab's format a run directory")
    parser.add_argument(
        "--from",
        dest="origin",
        help="expected format of the source: t5x_lab, t5x, mesh_tensorflow or hf; default: detected",
    )
    parser.add_argument("--to", required=True, help=f"format of the target: {', '.join(WRITTEN)}")
    parser.add_argument("--step", default="latest", help="step of the checkpoint, or latest")
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the weights in Hugging Face's format: float32, bfloat16 or float16"
    )
    parser.add_argument("--average", type=int, default=1, help="number of checkpoints up to --step, whose mean is written")
    add_trust_flag(parser)
    add_gin_flags(parser)


def run(args: argparse.Namespace) -> None:
    if args.to not in WRITTEN:
        raise UserError(f'--to is "{args.to}". Use one of {", ".join(WRITTEN)}.')
    if args.dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f'--dtype is "{args.dtype}". Use float32, bfloat16 or float16.')
    if args.average < 1:
        raise UserError(f"--average is {args.average}. It must be at least 1.")
    from t5x_lab.checkpoints.formats.location import FORMATS, find
    from t5x_lab.runs.config.checkpoint_config import read_config
    from t5x_lab.runs.convert.convert import convert

    if args.origin is not None and args.origin not in FORMATS:
        raise UserError(f'--from is "{args.origin}". Use one of {", ".join(FORMATS)}.')
    location = find(args.source, chosen_step(args.step))
    if args.origin not in (None, location.format):
        raise UserError(f"--from is {args.origin}, but {args.source} has the format {location.format}. Remove --from.")
    has_config = args.gin_file or args.gin or args.gin_bindings
    config = gin_config(args) if has_config else read_config(location, args.trust)
    if args.dry_run:
        print(config.text)
        return
    print(convert(location, args.target, args.to, config=config, dtype=args.dtype, average=args.average))
