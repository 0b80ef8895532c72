"""Translates gin files and launch scripts of a T5X project, with the files that they name, and reports what became of them."""

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="gin file or shell script of a T5X project")
    parser.add_argument("--output", required=True, help="folder for the translations")
    parser.add_argument(
        "--gin_search_paths", default="", metavar="PATHS", help="folders with included files, separated by commas"
    )
    parser.add_argument("--dry_run", action="store_true", help="report what each statement becomes and write nothing")


def run(args: argparse.Namespace) -> None:
    from t5x_lab.migration.write import migrate, report, write
    from t5x_lab.runs.config.gin_config import known_macros

    search_paths = [path for path in args.gin_search_paths.split(",") if path]
    migrated = migrate(args.files, args.output, search_paths, known_macros())
    if not args.dry_run:
        write(migrated)
    print(report(migrated))
