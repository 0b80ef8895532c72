"""Saving and restoring runs with Orbax: parameters, optimizer, step, counters and the position in the data."""
