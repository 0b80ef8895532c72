"""Zero-shot probes: `probe` is the base class that turns records into questions, `probing` runs probes on a model."""
