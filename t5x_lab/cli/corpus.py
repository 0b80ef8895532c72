"""Makes a clean corpus of web text from crawl files, with Apache Beam. The same command continues an interrupted one."""

import argparse

from t5x_lab.cli.flags import add_beam_flag, add_gin_flags, gin_settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        help="files, folders or patterns, separated by commas; repeatable: WARC, WET, ARC, HTML, .jsonl, .txt, .gz and .zst",
    )
    parser.add_argument("--output_dir", required=True, help="folder of the corpus; the TFDS_DATA_DIR of format tfds")
    parser.add_argument("--work_dir", help="folder of intermediate files; default: work in --output_dir")
    parser.add_argument("--workers", type=int, help="number of local processes; default: one per core, one for small inputs")
    add_beam_flag(parser)
    add_gin_flags(parser)


def run(args: argparse.Namespace) -> None:
    import os

    from t5x_lab.config.beam import split_options
    from t5x_lab.config.errors import UserError
    from t5x_lab.corpora.pipeline import make_corpus
    from t5x_lab.corpora.report import summary_table, write_report
    from t5x_lab.corpora.stages.context import parse_corpus
    from t5x_lab.corpora.writing import corpus_dir

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers is {args.workers}. It must be at least 1.")
    if not args.output_dir.strip():
        raise UserError("--output_dir is empty. Set a folder.")
    options = split_options(args.pipeline_options)
    wrong = next((flag for flag in options if not flag.startswith("--")), None)
    if wrong:
        raise UserError(f'--pipeline_options has "{wrong}", which is no flag of Beam. Flags begin with --.')
    corpus, text = parse_corpus(["corpora/c4.gin", *args.gin_file], *gin_settings(args))
    if args.dry_run:
        print(text)
        return
    output = os.path.abspath(args.output_dir) if "://" not in args.output_dir else args.output_dir.rstrip("/")
    work_dir = os.path.abspath(args.work_dir) if args.work_dir and "://" not in args.work_dir else args.work_dir
    summary = make_corpus(corpus, text, args.input, output, work_dir or f"{output}/work", options, args.workers)
    print(summary_table(summary))
    print(write_report(corpus_dir(output, corpus)))
    if not any(split["pages"] for split in summary["splits"].values()):
        raise UserError("The corpus has no page: the rules have dropped all.")
