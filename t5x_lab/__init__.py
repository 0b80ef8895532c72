"""t5x_lab."""
