"""Decoding: sampling, generation with continuous batching, beam search. Works with any step function."""
