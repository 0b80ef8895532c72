"""Writes a self-contained HTML report of a run, or a comparison of several. Works while a run is training."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory; several are compared")
    parser.add_argument(
        "--output",
        help="file or directory to write; default: report.html, or compared.html for several runs, in the first run directory",
    )


def run(args: argparse.Namespace) -> None:
    from t5x_lab.report.page import write_report

    print(write_report(args.runs, args.output))
