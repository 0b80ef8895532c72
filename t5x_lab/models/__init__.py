"""A network with its loss: what training, evaluation and decoding call."""
