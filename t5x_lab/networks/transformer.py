"""The transformer, whole: embed, encode where there is an encoder, decode, logits.

Axis letters: B batch, T decoder length, S encoder length, D embed, V vocab.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.networks.attention import KeyValues
from t5x_lab.networks.config import DTYPES, TransformerConfig
from t5x_lab.networks.layers import Embedding, Projection, fan_in_truncated_normal
from t5x_lab.networks.stack import Stack
from t5x_lab.ops.attention import Mask

Batch = Mapping[str, jax.Array]


class Transformer(nnx.Module):
    """Encoder-decoder, causal decoder or prefix decoder, after Raffel et al. (2020) and T5X.

    Args:
      config: the shapes.
      constrain: f(array, logical axis names) -> array, called on activations; shards them where there is a mesh.
      rngs: with a `params` stream.
    """

    def __init__(self, config: TransformerConfig, *, constrain: Callable = lambda x, axes: x, rngs: nnx.Rngs):
        self.config, self.constrain = config, constrain
        self.token_embedder = Embedding(config.vocab_size, config.emb_dim, constrain, rngs=rngs)
        if config.has_encoder:
            self.encoder = Stack(
                config, config.num_encoder_layers, cross=False, bidirectional=True, constrain=constrain, rngs=rngs
            )
        self.decoder = Stack(
            config,
            config.num_decoder_layers,
            cross=config.has_encoder,
            bidirectional=config.bidirectional_bias,
            constrain=constrain,
            rngs=rngs,
        )
        if not config.logits_via_embedding:
            kernel = fan_in_truncated_normal(rngs.params(), (config.emb_dim, config.vocab_size), config.emb_dim)
            self.logits_dense = Projection(kernel, ("embed", "vocab"), "BTD,DV->BTV")

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Teacher-forced logits, float32 [B, T, V], of a batch in SeqIO's model features.

        `decoder_input_tokens` is required, `encoder_input_tokens` too for an encoder-decoder. Segment ids separate
        packed examples; without them, token 0 in `encoder_input_tokens` and `decoder_target_tokens` is padding.
        """
        encoder_key, decoder_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        encoded = self.encode(batch, encoder_key) if self.config.has_encoder else None
        mask, cross_mask = self.decoder_masks(batch)
        x, _ = self.decoder(
            self.embed(batch["decoder_input_tokens"]),
            mask=mask,
            cross_mask=cross_mask,
            encoded=encoded,
            dropout_key=decoder_key,
        )
        return self.logits(x)

    def encode(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Encoder outputs [B, S, D]."""
        segments = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
        mask = Mask(causal=False, query_segments=segments, key_segments=segments)
        x = self.embed(batch["encoder_input_tokens"])
        return self.encoder(x, mask=mask, dropout_key=dropout_key)[0]

    def decode(
        self, tokens: jax.Array, cache: KeyValues, mask: Mask, cross: KeyValues | None, cross_mask: Mask | None
    ) -> tuple[jax.Array, KeyValues]:
        """Hidden states [B, T, D] of new tokens [B, T] written into `cache` at `mask.query_offset`, and that cache."""
        x = self.embed(tokens)
        x, written = self.decoder(x, mask=mask, cross_mask=cross_mask, cross_keys_values=cross, cache=cache)
        assert written is not None
        return x, written

    def decoder_masks(self, batch: Batch) -> tuple[Mask, Mask | None]:
        segments = segments_of(batch, "decoder_segment_ids", "decoder_target_tokens")
        prefix = None
        if self.config.architecture == "prefix_decoder" and "decoder_causal_attention" in batch:
            prefix = batch["decoder_causal_attention"] > 0
        mask = Mask(True, segments, segments, query_prefix=prefix, key_prefix=prefix)
        if not self.config.has_encoder:
            return mask, None
        encoder_segments = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
        return mask, Mask(False, query_segments=segments, key_segments=encoder_segments)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.token_embedder(tokens, DTYPES[self.config.dtype])

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V] of the decoder's hidden states; tied ones divided by sqrt(D)."""
        if self.config.logits_via_embedding:
            logits = self.token_embedder.attend(x_BTD) / math.sqrt(self.config.emb_dim)
        else:
            logits = self.logits_dense(x_BTD.astype(jnp.float32))
        return self.constrain(logits, ("batch", "length", "vocab"))


def segments_of(batch: Batch, segment_ids: str, tokens: str) -> jax.Array | None:
    """Segment ids where the batch is packed, else 1 for tokens and 0 for padding, else None (all tokens are real)."""
    if segment_ids in batch:
        return batch[segment_ids]
    return (batch[tokens] > 0).astype(jnp.int32) if tokens in batch else None
