"""Comparisons of architectures and objectives: shapes, loss fractions and FLOPs (`grid`)."""
