"""Lists batch shapes, the fraction of tokens with loss, parameters and FLOPs of every architecture with every objective."""

import argparse
import dataclasses
import json


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of Markdown")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.study.grid import compute_grid, to_markdown

    cells = compute_grid()
    print(json.dumps([dataclasses.asdict(cell) for cell in cells]) if args.json else to_markdown(cells), end="")
