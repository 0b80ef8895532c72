"""Trains a SentencePiece vocabulary, with T5's special ids, on text files or on the text of a task."""

import argparse

from t5x_lab.config.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", help="text files, as a pattern such as corpus/*.txt; .jsonl and .tfrecord too")
    parser.add_argument("--task", help="a task whose training text to use instead, such as sotu")
    parser.add_argument("--output", required=True, help="the model file to write")
    parser.add_argument("--size", type=int, default=32_000, help="pieces, sentinels not counted")
    parser.add_argument("--model_type", default="unigram", choices=("unigram", "bpe"), help="T5's, or byte pairs as GPT-1's")
    parser.add_argument("--max_documents", type=int, default=100_000, help="documents to read at most")
    parser.add_argument("--text_key", default="text", help="the field with the text, in .jsonl and TFRecord files")
    parser.add_argument(
        "--standardize", action="store_true", help="as recipes/gpt1_pretraining.gin reads its text, see TextFiles.clean"
    )
    parser.add_argument("--module", action="append", default=[], help="a Python module to import that registers the task")


def run(args: argparse.Namespace) -> None:
    if bool(args.input) == bool(args.task):
        raise UserError("Give either --input FILES or --task NAME: the text to train on.")
    import importlib
    import os
    import sys

    from t5x_lab.data.environment import check_environment

    check_environment()
    from t5x_lab.data.config import DataConfig, TextFiles
    from t5x_lab.data.tasks.names import documents
    from t5x_lab.data.vocabularies.config import ByteVocabulary
    from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece
    from t5x_lab.papers.gpt1.standardize import standardize

    sys.path.insert(0, os.getcwd())
    for module in args.module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"--module={module} cannot be imported: {error}. The working directory is searched too.") from error
    if args.size < 1 or args.max_documents < 1:
        raise UserError("--size and --max_documents must be at least 1.")
    files = TextFiles(train=args.input or "", text_key=args.text_key, clean=standardize if args.standardize else None)
    config = DataConfig(args.task or "files", {"targets": 512}, 1, ByteVocabulary(), files=files, shards=1)
    texts = documents(config, args.max_documents)
    if args.task and args.standardize:
        texts = map(standardize, texts)
    train_sentencepiece(texts, args.output, args.size, args.model_type)
    print(f"{args.output}: {args.size} pieces. Use it with --gin.SentencePieceVocabulary.path={args.output}")
