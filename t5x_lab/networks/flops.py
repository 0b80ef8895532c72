"""Model FLOPs by hand: a multiply-add is two, the backward pass twice the forward, attention counted in full.

XLA's own count is wrong under scan and for kernels; 6 * parameters * tokens is wrong for encoder-decoders, where a token
crosses one of the two stacks. Recomputation (remat) is not counted.
"""

from t5x_lab.networks.config import TransformerConfig


def flops_per_example(config: TransformerConfig, encoder_length: int, decoder_length: int) -> int:
    """Forward and backward FLOPs of one sequence of these lengths (encoder_length is 0 for decoder-only models)."""
    c, S, T = config, encoder_length, decoder_length
    inner = c.num_heads * c.head_dim
    mlp = (len(c.mlp_activations) + 1) * c.emb_dim * c.mlp_dim
    projections = 4 * c.emb_dim * inner

    encoder_layer = 2 * S * (projections + mlp) + 4 * S * S * inner
    decoder_layer = 2 * T * (projections + mlp) + 4 * T * T * inner
    # Queries and outputs run over the decoder's length, keys and values over the encoder's.
    cross = 4 * (T + S) * c.emb_dim * inner + 4 * T * S * inner if c.has_encoder else 0
    logits = 2 * T * c.emb_dim * c.vocab_size
    forward = c.num_encoder_layers * encoder_layer + c.num_decoder_layers * (decoder_layer + cross) + logits
    return 3 * forward


def flops_per_token(config: TransformerConfig, encoder_length: int, decoder_length: int) -> float:
    """FLOPs of an example over its tokens, encoder and decoder together."""
    return flops_per_example(config, encoder_length, decoder_length) / (encoder_length + decoder_length)
