"""t5x_lab's own tasks. Importing this package makes their names known; nothing is read until a run asks for one.

To use them inside a mixture of your own, import this package first: their names are then in SeqIO's registry, except for
those that belong to `t5.data.tasks`, which that module registers.
"""

from t5x_lab.tasks import c4, files, sotu

__all__ = ["c4", "files", "sotu"]
