"""Trains a SentencePiece vocabulary with T5's special ids on text files, or on the text of a task or mixture."""

import argparse

from t5x_lab.config.errors import UserError
from t5x_lab.config.object_storage import check_local


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", help="pattern of text files, such as corpus/*.txt; also .jsonl and .tfrecord")
    parser.add_argument(
        "--task",
        help="task or mixture whose training text is used, instead of --input; mixtures are sampled by their rates",
    )
    parser.add_argument("--output", required=True, help="model file to write")
    parser.add_argument("--size", type=int, default=32_000, help="number of pieces without sentinels")
    parser.add_argument(
        "--model_type", default="unigram", choices=("unigram", "bpe"), help="unigram as in T5, or byte pairs as in GPT-1"
    )
    parser.add_argument("--max_documents", type=int, default=100_000, help="number of documents to sample")
    parser.add_argument("--text_key", default="text", help="text field of .jsonl and TFRecord files")
    parser.add_argument(
        "--standardize", action="store_true", help="standardize text as GPT-1 does (recipes/gpt1_pretraining.gin)"
    )
    parser.add_argument("--module", action="append", default=[], help="Python module that registers the task; repeatable")


def run(args: argparse.Namespace) -> None:
    if bool(args.input) == bool(args.task):
        raise UserError("Pass either --input FILES or --task NAME.")
    import importlib
    import os
    import sys

    from t5x_lab.runs.data_layer import load_data_layer

    load_data_layer()
    import tensorflow as tf

    from t5x_lab.data.config import DataConfig, TextFiles
    from t5x_lab.data.pipeline.failures import describe_cause
    from t5x_lab.data.sources.file_types import RECORD_KINDS, common_file_type
    from t5x_lab.data.sources.text_files import match_files
    from t5x_lab.data.tasks.names import sample_documents
    from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary
    from t5x_lab.data.vocabularies.sentencepiece import read_sentencepiece, train_sentencepiece
    from t5x_lab.papers.gpt1.standardize import standardize

    sys.path.insert(0, os.getcwd())
    for module in args.module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"--module={module} cannot be imported: {error}. The working directory is on Python's path."
            ) from error
    if args.size < 1 or args.max_documents < 1:
        raise UserError("--size and --max_documents must be at least 1.")
    files = TextFiles(train=args.input or "", text_key=args.text_key, clean=standardize if args.standardize else None)
    if args.input:
        common_file_type(match_files(args.input, "--input"), ("txt", *RECORD_KINDS), "--input")
    check_local("--output", args.output)
    config = DataConfig(args.task or "files", {"targets": 512}, 1, ByteVocabulary(), files=files, shards=1)
    texts = sample_documents(config, args.max_documents)
    if args.task and args.standardize:
        texts = map(standardize, texts)
    try:
        train_sentencepiece(texts, args.output, args.size, args.model_type)
    except (UserError, tf.errors.OpError) as error:
        sentence = error.sentence if isinstance(error, UserError) else describe_cause(error)
        raise UserError(sentence.replace("--gin.TextFiles.text_key=", "--text_key=")) from error
    extra_ids, pieces = SentencePieceVocabulary(path=args.output).extra_ids, read_sentencepiece(args.output).GetPieceSize()
    print(
        f"{args.output}: {pieces:,} pieces. Use it with --gin.SentencePieceVocabulary.path={args.output}, and with its "
        f"{extra_ids} sentinels --gin.TransformerConfig.vocab_size={-(-(pieces + extra_ids) // 128) * 128} or more (a multiple "
        "of 128 can be sharded)."
    )
