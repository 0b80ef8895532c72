"""Training objectives.

objective.py          the base class, also of a user's objectives
language_modeling.py  full LM, prefix LM, masked LM
denoising.py          span corruption and its variants, UL2
named.py              the objectives by name, and `register_objective`
preprocessors.py      the SeqIO preprocessors that implement them
"""

from t5x_lab.data.objectives.named import register_objective

__all__ = ["register_objective"]
