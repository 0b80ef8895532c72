"""Training state, training step and loop, and hooks. Checkpoints, metrics and evaluation are passed to the loop."""
