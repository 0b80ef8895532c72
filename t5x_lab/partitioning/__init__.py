"""Meshes, the two tables that map logical axis names to their axes, TPU topologies, several processes."""
