"""Device meshes, sharding rules for logical axes, TPU topologies, and multi-process runs."""
