"""Writes one page, with everything inside it, of a run or of several laid over each other; reads files only, also of a run that
is still training."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory; of several the curves are laid over each other"
    )
    parser.add_argument(
        "--output", help="a file, or a directory for report.html, of several runs compared.html; else the first run's"
    )


def run(args: argparse.Namespace) -> None:
    from t5x_lab.report.page import write_report

    print(write_report(args.runs, args.output))
