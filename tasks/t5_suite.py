"""T5's suite for SeqIO's own tools, which know no run: --module_import=t5x_lab.tasks.t5_suite

Records come from TensorFlow Datasets, and tokens are bytes until a vocabulary is given; a run knows all names without this.
"""

from t5x_lab.prompts.config import Prompts
from t5x_lab.prompts.t5_suite import declare, names

for _name in names():
    declare(_name, Prompts())
