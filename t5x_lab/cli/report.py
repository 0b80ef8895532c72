"""Writes a self-contained HTML report of a run or a corpus, or a comparison of runs. Works while a run is training."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, or folder of a corpus; several runs are compared"
    )
    parser.add_argument(
        "--output",
        help="file or directory to write; default: report.html, or compared.html for several runs, in the first run directory",
    )


def run(args: argparse.Namespace) -> None:
    from t5x_lab.corpora import report as corpus_report
    from t5x_lab.report.page import write_report

    corpus = corpus_report.find_corpus(args.runs[0]) if len(args.runs) == 1 else None
    if corpus is not None:
        print(corpus_report.write_report(corpus, args.output))
        return
    print(write_report(args.runs, args.output))
