"""Meshes, and the table that maps logical axis names to them."""
