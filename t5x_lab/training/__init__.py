"""Train state, the step, and the loop that runs it. Checkpoints, metrics and evaluation reach the loop as hooks."""
