"""The transformer in Flax NNX: configuration, layers, positions, blocks. Knows no gin, no mesh, no task."""
