"""The transformer, whole: embed, encode where there is an encoder, decode where there is a decoder, logits.

Axis letters: B batch, T decoder length, S encoder length, D embed, V vocab.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.networks.attention import Cache
from t5x_lab.networks.config import DTYPES, TransformerConfig
from t5x_lab.networks.layers import Embedding, Projection, output_matrix, truncated_normal
from t5x_lab.networks.positions import sinusoidal
from t5x_lab.networks.stack import Layer, Stack
from t5x_lab.ops.attention import Mask
from t5x_lab.ops.cross_entropy import logits_of

Batch = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """What rows remember between tokens; rows are the first axis of every array.

    Attributes:
      caches: the decoder's keys and values, one cache a layer.
      position: int [B], the slot the next token goes to.
      cross: keys and values of the encoder's outputs, one cache a layer, or None.
      encoder_segments: int [B, S], 0 = padding, or None.
    """

    caches: tuple[Cache, ...]
    position: jax.Array
    cross: tuple[Cache, ...] | None
    encoder_segments: jax.Array | None

    def take(self, rows: jax.Array) -> "DecodingState":
        """These rows, any number of them."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self)

    def exchange(self, rows: jax.Array) -> "DecodingState":
        """These rows, each in the place of one with the same prompt; what the encoder said is theirs already."""
        pick = lambda tree: jax.tree.map(lambda x: jnp.take(x, rows, axis=0), tree)
        return dataclasses.replace(self, caches=pick(self.caches), position=pick(self.position))

    def put(self, rows: jax.Array, other: "DecodingState") -> "DecodingState":
        """These rows replaced by those of `other`, whose prompts may be shorter; a row number too high replaces nothing."""

        def into(x, y):
            room = [(0, 0), *((0, a - b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True))]
            return x.at[rows].set(jnp.pad(y, room), mode="drop")

        return jax.tree.map(into, self, other)


class Transformer(nnx.Module):
    """Encoder-decoder, causal decoder, prefix decoder or encoder, after Raffel et al. (2020) and T5X.

    Args:
      config: the shapes.
      constrain: f(array, logical axis names) -> array, called on activations; shards them where there is a mesh.
      rngs: with a `params` stream.
    """

    def __init__(self, config: TransformerConfig, *, constrain: Callable = lambda x, axes: x, rngs: nnx.Rngs):
        c = config
        self.config, self.constrain = c, constrain
        self.token_embedder = Embedding(c.vocab_size, c.emb_dim, constrain, c.scaling, rngs=rngs)
        if c.positions == "learned":
            self.position_embedder = Embedding(c.max_positions, c.emb_dim, constrain, c.scaling, rngs=rngs)
            self.position_embedder.embedding.set_metadata(axes=("positions", "embed"))
        if c.has_encoder and not c.share_stacks:
            self.encoder = Stack(c, c.num_encoder_layers, cross=False, constrain=constrain, rngs=rngs)
        if c.has_decoder:
            self.decoder = Stack(c, c.num_decoder_layers, cross=c.has_encoder, constrain=constrain, rngs=rngs)
        if not c.logits_via_embedding:
            kernel = truncated_normal(rngs.params(), (c.emb_dim, c.vocab_size), c.scaling, c.emb_dim)
            self.logits_dense = Projection(kernel, ("embed", "vocab"), "BTD,DV->BTV")

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Teacher-forced hidden states [B, T, D], before the output matrix, of a batch in SeqIO's model features.

        `decoder_input_tokens` is required where there is a decoder, `encoder_input_tokens` where there is an encoder; the
        states of an encoder alone are [B, S, D]. Segment ids separate packed examples; without them, token 0 in
        `encoder_input_tokens` and `decoder_target_tokens` is padding.
        """
        encoder_key, decoder_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        encoded = self.encode(batch, encoder_key) if self.config.has_encoder else None
        if encoded is not None and not self.config.has_decoder:
            return encoded
        mask, cross_mask = self.decoder_masks(batch)
        tokens = batch["decoder_input_tokens"]
        x, turn = self.embed(tokens, batch.get("decoder_positions", jnp.arange(tokens.shape[1])[None]))
        return self.decoder(x, mask=mask, positions=turn, cross_mask=cross_mask, encoded=encoded, dropout_key=decoder_key)[0]

    def encode(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Encoder outputs [B, S, D]."""
        segments = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
        mask = Mask(causal=False, query_segments=segments, key_segments=segments)
        tokens = batch["encoder_input_tokens"]
        x, turn = self.embed(tokens, batch.get("encoder_positions", jnp.arange(tokens.shape[1])[None]))
        stack = self.decoder if self.config.share_stacks else self.encoder
        return stack(x, mask=mask, positions=turn, dropout_key=dropout_key)[0]

    def read(self, prompt: jax.Array, max_tokens: int) -> tuple[jax.Array, DecodingState]:
        """Reads a prompt of token ids [B, P], 0 = padding on the right, in one pass.

        An encoder-decoder encodes it; a decoder reads it after the start token 0, a prefix decoder both ways.

        Returns:
          (hidden states after the last token, [B, D]; the state after the prompt, with room for `max_tokens` more)
        """
        c, batch = self.config, prompt.shape[0]
        inputs = jnp.zeros((batch, 1), jnp.int32)
        num_inputs = jnp.ones((batch,), jnp.int32)
        cross = cross_mask = encoded = encoder_segments = prefix = None
        if c.has_encoder:
            encoder_batch = {"encoder_input_tokens": prompt}
            encoded = self.encode(encoder_batch)
            cross = self.decoder.cross_caches(encoded)
            encoder_segments = segments_of(encoder_batch, "encoder_segment_ids", "encoder_input_tokens")
            cross_mask = Mask(False, key_segments=encoder_segments)
        else:
            inputs = jnp.concatenate([inputs, prompt], axis=1)
            num_inputs += jnp.sum(prompt > 0, axis=1)
        slots = inputs.shape[1] + max_tokens
        c.check_length(slots - 1)  # the last token written is not read
        if c.architecture == "prefix_decoder":
            prefix = jnp.arange(inputs.shape[1]) < num_inputs[:, None]
        x, turn = self.embed(inputs, jnp.arange(inputs.shape[1])[None])
        mask = Mask(True, query_prefix=prefix, key_prefix=prefix)
        hidden, made = self.decoder(x, mask=mask, positions=turn, cross_mask=cross_mask, encoded=encoded, keep=True)
        assert made is not None
        last = jnp.take_along_axis(hidden, (num_inputs - 1)[:, None, None], axis=1)
        return last[:, 0], DecodingState(self.decoder.caches(made, slots), num_inputs, cross, encoder_segments)

    def apart(self) -> tuple[Layer, ...]:
        """The decoder's layers, for `extend`."""
        return self.decoder.apart()

    def extend(
        self, state: DecodingState, tokens: jax.Array, layers: tuple[Layer, ...] | None = None
    ) -> tuple[jax.Array, DecodingState]:
        """Feeds tokens [B, T] after those that were read; returns their hidden states [B, T, D] and the new state.

        A loop over tokens takes `layers = apart()` once, before it begins.
        """
        x, turn = self.embed(tokens, state.position[:, None] + jnp.arange(tokens.shape[1]))
        hidden, caches = self.decoder.extend(
            self.apart() if layers is None else layers,
            x,
            state.caches,
            mask=Mask(True, query_offset=state.position),
            positions=turn,
            cross_mask=None if state.cross is None else Mask(False, key_segments=state.encoder_segments),
            cross=state.cross,
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

    def embed(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Embeddings [B, T, D] with absolute positions [B or 1, T] added, and the positions that rotary attention turns by."""
        c, dtype = self.config, DTYPES[self.config.dtype]
        self.config.check_length(tokens.shape[1])
        x = self.token_embedder(tokens, dtype)
        if c.positions == "learned":
            x = x + self.position_embedder(positions, dtype)
        if c.positions == "sinusoidal":
            x = x + sinusoidal(positions, c.emb_dim).astype(dtype)
        return x, positions if c.positions == "rotary" else None

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V] of hidden states."""
        return self.constrain(logits_of(x_BTD, *output_matrix(self)), ("batch", "whole_length", "vocab"))


def segments_of(batch: Batch, segment_ids: str, tokens: str) -> jax.Array | None:
    """Segment ids where the batch is packed, else 1 for tokens and 0 for padding, else None (all tokens are real)."""
    if segment_ids in batch:
        return batch[segment_ids]
    return (batch[tokens] > 0).astype(jnp.int32) if tokens in batch else None
