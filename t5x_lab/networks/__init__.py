"""Networks in Flax NNX: `transformer`, `lstm`, `ensemble`, PEFT modules and the `network` protocols. No gin, mesh or task."""
