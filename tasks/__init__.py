"""t5x_lab's own texts. Importing this package makes their tasks known, to SeqIO too; nothing is read until one is asked for.

Of c4, the tasks whose names T5 uses are left to `t5.data.tasks`; a run that names one reads C4 in the version that is there.
"""

from t5x_lab.tasks import c4, files, sotu

__all__ = ["c4", "files", "sotu"]
