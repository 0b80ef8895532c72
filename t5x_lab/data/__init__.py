"""Data pipeline from text to host batches, with SeqIO.

config.py       settings that gin binds
converter.py    the `Converter` protocol
environment.py  check of the installed SeqIO and TensorFlow Datasets
vocabularies/   SentencePiece, bytes, Hugging Face tokenizers, sentinels
objectives/     full LM, prefix LM, masked LM, denoising
sources/        text files, and how they are divided among shards
cache/          SeqIO caches: writing and reading
tasks/          from names to SeqIO tasks, mixtures and rates
packing/        feature converter and packing
pipeline/       training and evaluation batches

`config`, `converter`, `objectives` and `vocabularies.config` are free of TensorFlow. All other modules import it.
"""
