"""Turning logits into tokens, over any `step(state, token) -> (logits, state)`."""
