"""Cached decoding of a model: the prompt in one pass, then one token at a time, for all three architectures."""

import dataclasses

import jax
import jax.numpy as jnp

from t5x_lab.models.model import Model, Params
from t5x_lab.networks.attention import KeyValues, empty_cache
from t5x_lab.networks.config import DTYPES
from t5x_lab.networks.transformer import segments_of
from t5x_lab.ops.attention import Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """What a row remembers between tokens.

    Attributes:
      cache: the decoder's keys and values, [layers, B, slots, N, H].
      position: int [B], the slot the next token goes to.
      cross: keys and values of the encoder's outputs, or None.
      encoder_segments: int [B, S], 0 = padding, or None.
    """

    cache: KeyValues
    position: jax.Array
    cross: KeyValues | None
    encoder_segments: jax.Array | None


def prefill(model: Model, params: Params, prompt: jax.Array, max_tokens: int) -> tuple[jax.Array, DecodingState]:
    """Reads a prompt of token ids [B, P], 0 = padding on the right, in one pass.

    An encoder-decoder encodes it; a decoder reads it after the start token 0, a prefix decoder both ways.

    Returns:
      (logits of the first new token, float32 [B, V]; the state after the prompt)
    """
    network, c = model.network(params), model.config.network
    batch = prompt.shape[0]
    start = jnp.zeros((batch, 1), jnp.int32)
    cross = encoder_segments = prefix = key_prefix = None
    if c.has_encoder:
        encoder_batch = {"encoder_input_tokens": prompt}
        cross = network.decoder.cross_keys_values(network.encode(encoder_batch))
        encoder_segments = segments_of(encoder_batch, "encoder_segment_ids", "encoder_input_tokens")
        inputs, num_inputs = start, jnp.ones((batch,), jnp.int32)
    else:
        inputs = jnp.concatenate([start, prompt], axis=1)
        num_inputs = 1 + jnp.sum(prompt > 0, axis=1)
    slots = inputs.shape[1] + max_tokens
    if c.architecture == "prefix_decoder":
        prefix = jnp.arange(inputs.shape[1]) < num_inputs[:, None]
        key_prefix = jnp.arange(slots) < num_inputs[:, None]
    cache = empty_cache(c.num_decoder_layers, batch, slots, c.num_heads, c.head_dim, DTYPES[c.dtype])
    hidden, cache = network.decode(
        inputs,
        cache,
        Mask(True, query_prefix=prefix, key_prefix=key_prefix),
        cross,
        Mask(False, key_segments=encoder_segments) if c.has_encoder else None,
    )
    last = jnp.take_along_axis(hidden, (num_inputs - 1)[:, None, None], axis=1)
    return network.logits(last)[:, 0], DecodingState(cache, num_inputs, cross, encoder_segments)


def step(model: Model, params: Params, state: DecodingState, token: jax.Array) -> tuple[jax.Array, DecodingState]:
    """Feeds one token per row, int [B]; returns the next token's logits, float32 [B, V], and the new state."""
    network = model.network(params)
    cross_mask = None if state.cross is None else Mask(False, key_segments=state.encoder_segments)
    hidden, cache = network.decode(
        token[:, None], state.cache, Mask(True, query_offset=state.position), state.cross, cross_mask
    )
    return network.logits(hidden)[:, 0], dataclasses.replace(state, cache=cache, position=state.position + 1)
