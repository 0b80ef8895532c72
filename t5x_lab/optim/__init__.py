"""Optimizers as optax transformations, learning-rate schedules, and the dataclasses that describe them."""
