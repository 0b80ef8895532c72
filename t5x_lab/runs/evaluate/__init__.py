"""Evaluations of a run (`evaluations`) and of its checkpoints (`checkpoints`)."""
