"""Pre-trains a small language model on the embedded corpus, evaluates it, lets it write, and leaves a report with plots."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_dir", default="runs/demo", help="where the run is kept")
    parser.add_argument("--steps", type=int, default=None, help="training steps, instead of the recipe's")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.runs.demo import demo

    demo(args.model_dir, args.steps)
