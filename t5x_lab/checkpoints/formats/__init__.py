"""Checkpoint formats: `location` finds and opens checkpoints, `source` has the protocol, the other modules are formats."""
