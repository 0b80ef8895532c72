"""Pre-trains a small language model on the included corpus, evaluates it, generates samples, and writes a report."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_dir", default="runs/demo", help="run directory")
    parser.add_argument("--steps", type=int, default=None, help="number of training steps; default: that of the recipe")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.runs.demo import demo

    demo(args.model_dir, args.steps)
