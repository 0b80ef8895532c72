"""Tasks that the library registers with SeqIO. Importing this package registers them; data are read when a task is used.

c4.py        C4, under T5's names
sotu.py      the embedded corpus
files.py     the user's text files
t5_suite.py  the T5 suite, for SeqIO's own tools

It also registers the collections and task names of papers with `t5x_lab.prompts`.
"""

from t5x_lab.papers import t0
from t5x_lab.papers.flan import collections as flan
from t5x_lab.papers.gpt1 import classification
from t5x_lab.papers.t5 import suite
from t5x_lab.tasks import c4, files, sotu

__all__ = ["c4", "classification", "files", "flan", "sotu", "suite", "t0"]
