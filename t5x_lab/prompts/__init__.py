"""Prompted datasets: records of labelled data sets, rendered by templates (T0, FLAN), and classification tasks.

config.py         settings that gin binds: records, few-shot, collections
data_sets.py      registry of labelled data sets
templates/        prompt templates in promptsource's format
records/          record sources: files, TFDS, Hugging Face
tasks/            SeqIO tasks of one data set
classification/   tasks for a classification head
collections.py    mixtures of data sets
names.py          from a name in gin to a task or mixture
prompts.py        `Prompts`, what gin binds

The data sets and collections of papers are in `t5x_lab.papers`.
"""
