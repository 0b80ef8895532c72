"""T5 suite for SeqIO's own tools: --module_import=t5x_lab.tasks.t5_suite

Records come from TensorFlow Datasets, and the vocabulary is bytes until another one is set. A run needs no import of this
module.
"""

from t5x_lab.papers.t5.suite import names, register_suite_task
from t5x_lab.prompts.prompts import Prompts

for _name in names():
    register_suite_task(_name, Prompts())
