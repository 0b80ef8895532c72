"""The transformer: embedding, encoder, decoder and logits.

Axis letters: B batch, T decoder length, S encoder length, D embed, V vocab.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.networks.cache import Cache
from t5x_lab.networks.config import DTYPES, REMAT_POLICIES, TransformerShape
from t5x_lab.networks.flops import transformer_flops, transformer_recomputed_flops
from t5x_lab.networks.layers import Embedding, Projection, kernel, output_matrix
from t5x_lab.networks.network import Batch, Constrain, check_length, segments_of
from t5x_lab.networks.positions import sinusoidal
from t5x_lab.networks.stack import Layer, Stack
from t5x_lab.ops.attention import has_kernels
from t5x_lab.ops.cross_entropy import compute_logits
from t5x_lab.ops.masks import Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """Decoding state. Rows are the first axis of every array.

    Attributes:
      caches: key-value cache of each decoder layer.
      position: slot of the next token, int [B].
      cross_caches: keys and values of the encoder output for each layer, or None.
      encoder_segments: 1 = token, 0 = padding, int [B, S], or None.
    """

    caches: tuple[Cache, ...]
    position: jax.Array
    cross_caches: tuple[Cache, ...] | None
    encoder_segments: jax.Array | None

    def reorder(self, rows: jax.Array) -> "DecodingState":
        """Returns the state of these rows. Each replaces a row of the same prompt, so the encoder output is not moved."""
        pick = lambda tree: jax.tree.map(lambda x: jnp.take(x, rows, axis=0), tree)
        return dataclasses.replace(self, caches=pick(self.caches), position=pick(self.position))


@dataclasses.dataclass(frozen=True)
class TransformerConfig(TransformerShape):
    """A transformer `Network`. See `TransformerShape` for its fields."""

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence. See `Network.flops`."""
        return transformer_flops(self, encoder_length, decoder_length)

    def recomputed_flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence that the backward pass recomputes on the current target, see `tracing_for`."""
        saved, in_kernels = REMAT_POLICIES[self.remat_policy], has_kernels(DTYPES[self.dtype], self.head_dim)
        return transformer_recomputed_flops(self, encoder_length, decoder_length, saved, in_kernels)

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Transformer":
        return Transformer(self, constrain=constrain, rngs=rngs)


class Transformer(nnx.Module):
    """Encoder-decoder, causal decoder, prefix decoder or encoder, as in Raffel et al. (2020) and T5X.

    Args:
      config: sizes and variants.
      constrain: function (array, logical axes) -> array that shards activations over the mesh.
      rngs: random number generators with a `params` stream.
    """

    def __init__(self, config: TransformerConfig, *, constrain: Callable = lambda x, axes: x, rngs: nnx.Rngs):
        c = config
        self.config, self.constrain, self.logit_cap = c, constrain, c.logit_cap
        self.token_embedder = Embedding(c.vocab_size, c.emb_dim, constrain, c.scaling, rngs=rngs)
        if c.positions == "learned":
            self.position_embedder = Embedding(c.max_positions or 0, c.emb_dim, constrain, c.scaling, rngs=rngs)
            self.position_embedder.embedding.set_metadata(axes=("positions", "embed"))
        e = c.encoder_shape
        if not c.share_embeddings:
            self.encoder_token_embedder = Embedding(c.vocab_size, e.emb_dim, constrain, c.scaling, rngs=rngs)
        if c.has_encoder and not c.share_stacks:
            self.encoder = Stack(e, c.num_encoder_layers, cross=False, constrain=constrain, rngs=rngs)
        if c.has_decoder:
            self.decoder = Stack(c.decoder_shape, c.num_decoder_layers, cross=c.has_encoder, constrain=constrain, rngs=rngs)
        if not c.logits_via_embedding:
            matrix = kernel(c, rngs, (c.emb_dim, c.vocab_size), c.emb_dim)
            self.logits_dense = Projection(matrix, ("embed", "vocab"), "BTD,DV->BTV")

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns teacher-forced hidden states [B, T, D]; [B, S, D] for an encoder-only network.

        Args:
          batch: SeqIO's model features. Segment ids separate packed examples. Without them, 0 in `encoder_input_tokens` and
            `decoder_target_tokens` is padding.
          dropout_key: None = no dropout.
        """
        encoder_key, decoder_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        encoded = self.encode(batch, encoder_key) if self.config.has_encoder else None
        if encoded is not None and not self.config.has_decoder:
            return encoded
        mask, cross_mask = self.decoder_masks(batch)
        tokens = batch["decoder_input_tokens"]
        x, rotations = self.embed(tokens, batch.get("decoder_positions", jnp.arange(tokens.shape[1])[None]))
        hidden, _ = self.decoder(
            x, mask=mask, positions=rotations, cross_mask=cross_mask, encoded=encoded, dropout_key=decoder_key
        )
        return hidden

    def encode(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns encoder outputs [B, S, D]."""
        segments = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
        mask = Mask(causal=False, query_segments=segments, key_segments=segments)
        tokens = batch["encoder_input_tokens"]
        embedder = self.token_embedder if self.config.share_embeddings else self.encoder_token_embedder
        x, rotations = self.embed(tokens, batch.get("encoder_positions", jnp.arange(tokens.shape[1])[None]), embedder)
        stack = self.decoder if self.config.share_stacks else self.encoder
        return stack(x, mask=mask, positions=rotations, dropout_key=dropout_key)[0]

    def prefill(
        self, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, DecodingState]:
        """Processes prompts [B, P], padded on the right, in one pass.

        Args:
          prompt: token ids, read by the encoder if there is one, otherwise by the decoder. A prefix decoder attends to them
            bidirectionally.
          max_tokens: capacity of the state for further tokens.
          start: start token of the decoder. None = the prompts of a decoder-only network start with it.
          padding: padding id.

        Returns:
          Hidden state of each prompt's last token [B, D], and the decoding state.
        """
        c, batch = self.config, prompt.shape[0]
        inputs = jnp.full((batch, 0 if start is None else 1), start or 0, jnp.int32)
        num_inputs = jnp.full((batch,), inputs.shape[1], jnp.int32)
        is_token = prompt != padding
        prompt = jnp.where(is_token, prompt, 0)
        cross_caches = cross_mask = encoded = encoder_segments = prefix = None
        if c.has_encoder:
            encoder_segments = is_token.astype(jnp.int32)
            cross_mask = Mask(False, key_segments=encoder_segments)
            encoded = self.encode({"encoder_input_tokens": prompt, "encoder_segment_ids": encoder_segments})
            cross_caches = self.decoder.make_cross_caches(encoded, cross_mask)
        else:
            inputs = jnp.concatenate([inputs, prompt], axis=1)
            num_inputs += jnp.sum(is_token, axis=1)
        slots = inputs.shape[1] + max_tokens
        check_length(c, slots - 1)  # the last generated token is not processed
        if c.architecture == "prefix_decoder":
            prefix = jnp.arange(inputs.shape[1])[None] < num_inputs[:, None]
        x, rotations = self.embed(inputs, jnp.arange(inputs.shape[1])[None])
        mask = Mask(True, query_prefix=prefix, key_prefix=prefix)
        hidden, keys_values = self.decoder(
            x, mask=mask, positions=rotations, cross_mask=cross_mask, encoded=encoded, keep_keys_values=True
        )
        assert keys_values is not None
        last = jnp.take_along_axis(hidden, (num_inputs - 1)[:, None, None], axis=1)
        caches = self.decoder.make_caches(keys_values, slots, num_inputs)
        return last[:, 0], DecodingState(caches, num_inputs, cross_caches, encoder_segments)

    def unstack(self) -> tuple[Layer, ...]:
        """Returns the decoder's layers for `decode`."""
        return self.decoder.unstack()

    def decode(
        self, state: DecodingState, tokens: jax.Array, layers: tuple[Layer, ...] | None = None
    ) -> tuple[jax.Array, DecodingState]:
        """Processes the next tokens [B, T]. Returns their hidden states [B, T, D] and the new state.

        A loop over tokens calls `unstack()` once before the loop and passes the layers.
        """
        x, rotations = self.embed(tokens, state.position[:, None] + jnp.arange(tokens.shape[1])[None])
        hidden, caches = self.decoder.decode(
            self.unstack() if layers is None else layers,
            x,
            state.caches,
            mask=Mask(True, query_offset=state.position),
            positions=rotations,
            cross_mask=None if state.cross_caches is None else Mask(False, key_segments=state.encoder_segments),
            cross_caches=state.cross_caches,
        )
        return hidden, dataclasses.replace(state, caches=caches, position=state.position + tokens.shape[1])

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

    def embed(
        self, tokens: jax.Array, positions: jax.Array, embedder: Embedding | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns embeddings [B, T, D], by the decoder's table or another one, and positions for rotary attention or None."""
        c, dtype = self.config, DTYPES[self.config.dtype]
        check_length(self.config, tokens.shape[1])
        x = (embedder or self.token_embedder)(tokens, dtype)
        width = x.shape[-1]
        if c.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(width), dtype)
        if c.positions == "learned":
            x = x + self.position_embedder(positions, dtype)
        if c.positions == "sinusoidal":
            x = x + sinusoidal(positions, width).astype(dtype)
        return x, positions if c.positions == "rotary" else None

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits of hidden states, float32 [B, T, V]."""
        return self.constrain(compute_logits(x_BTD, *self.output_matrix(), self.logit_cap), ("batch", None, "vocab"))

    def output_matrix(self) -> tuple[jax.Array, float]:
        """Returns the output matrix [D, V] and the scale of the logits."""
        return output_matrix(self)
