"""Networks of Flax Linen in the style of T5X's projects: their arguments, their cache, their logical axes.

They use T5X's calling convention and none of this library's code. Sizes are gin's, as in T5X's `T5Config`.
"""

import dataclasses

import gin
import jax
import jax.numpy as jnp
from flax import linen
from flax.linen import partitioning


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 384
    emb_dim: int = 16
    num_heads: int = 2
    head_dim: int = 8
    num_layers: int = 2
    dropout_rate: float = 0.0


class Dense(linen.Module):
    features: int
    axes: tuple

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal(0.3)
        kernel = partitioning.param_with_axes("kernel", init, (x.shape[-1], self.features), axes=self.axes)
        return x @ kernel


class Attention(linen.Module):
    config: Config

    @linen.compact
    def __call__(self, queries, keys, mask, decode=False, prefill=False, prefill_lengths=None):
        c = self.config
        split = lambda x: x.reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        project = lambda name, x: split(Dense(c.num_heads * c.head_dim, ("embed", "joined_kv"), name=name)(x))
        query, key, value = project("query", queries), project("key", keys), project("value", keys)
        if decode or prefill:
            is_new = not self.has_variable("cache", "cached_key")
            shape = (*key.shape[:1], *key.shape[2:], key.shape[1])  # the length last, as in T5X
            cached_key = self.variable("cache", "cached_key", jnp.zeros, shape)
            cached_value = self.variable("cache", "cached_value", jnp.zeros, shape)
            index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
            to_cache = lambda x: jnp.moveaxis(x, 1, -1)
            if prefill and not is_new:
                cached_key.value, cached_value.value = to_cache(key), to_cache(value)
                index.value = prefill_lengths[0]
            elif not is_new:
                write = lambda cached, x: jax.lax.dynamic_update_slice(cached, to_cache(x), (0, 0, 0, index.value))
                cached_key.value, cached_value.value = write(cached_key.value, key), write(cached_value.value, value)
                key, value = (jnp.moveaxis(x, -1, 1) for x in (cached_key.value, cached_value.value))
                mask = (jnp.arange(key.shape[1]) <= index.value)[None, None, None]
                index.value = index.value + 1
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return Dense(c.emb_dim, ("joined_kv", "embed"), name="out")(out.reshape(*out.shape[:2], -1))


class Layer(linen.Module):
    config: Config

    @linen.compact
    def __call__(self, x, mask, encoded=None, cross_mask=None, enable_dropout=True, **cache):
        drop = linen.Dropout(self.config.dropout_rate, deterministic=not enable_dropout)
        scale = lambda name: partitioning.param_with_axes(name, linen.initializers.ones, x.shape[-1:], axes=("embed",))
        norm = lambda name, x: x * scale(name)[None, None]
        normed = norm("scale", x)
        x = x + drop(Attention(self.config, name="self_attention")(normed, normed, mask, **cache))
        if encoded is not None:
            x = x + drop(Attention(self.config, name="encoder_decoder_attention")(norm("scale_2", x), encoded, cross_mask))
        return x + drop(Dense(self.config.emb_dim, ("embed", "mlp"), name="mlp")(jnp.tanh(norm("scale_3", x))))


def embedder(config):
    init = linen.with_logical_partitioning(linen.initializers.normal(1.0), ("vocab", "embed"))
    return linen.Embed(config.vocab_size, config.emb_dim, embedding_init=init)


def position_signal(positions, size):
    rates = jnp.arange(size)[None, None]
    return jnp.sin(positions[..., None] / 3.0**rates + rates)


class Stack(linen.Module):
    """Decoder or encoder: embeds, adds positions, applies layers."""

    config: Config
    token_embedder: linen.Module

    @linen.compact
    def __call__(self, tokens, mask, positions=None, *, decode=False, prefill=False, prefill_lengths=None, **others):
        x = self.token_embedder(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if decode or prefill:
            is_new = not self.has_variable("cache", "position")
            place = self.variable("cache", "position", lambda: jnp.zeros((), jnp.int32))
            if decode and not is_new:
                positions = place.value + positions
                place.value = place.value + 1
            elif not is_new:
                place.value = prefill_lengths[0]
        x = x + position_signal(positions, x.shape[-1])
        cache = {"decode": decode, "prefill": prefill, "prefill_lengths": prefill_lengths} if decode or prefill else {}
        for i in range(self.config.num_layers):
            x = Layer(self.config, name=f"layers_{i}")(x, mask, **others, **cache)
        return x


def attention_mask(query_segments, key_segments, causal=False, prefix=None):
    same = (query_segments[:, :, None] == key_segments[:, None]) & (key_segments > 0)[:, None]
    if causal:
        allowed = jnp.arange(key_segments.shape[1])[None, :, None] >= jnp.arange(key_segments.shape[1])[None, None]
        if prefix is not None:
            allowed = allowed | ((prefix[:, :, None] > 0) & (prefix[:, None] > 0))
        same = same & allowed
    return same[:, None]


@gin.configurable
class Transformer(linen.Module):
    """An encoder-decoder with T5X's methods `encode` and `decode`."""

    config: Config

    def setup(self):
        c = self.config
        self.token_embedder = embedder(c)
        self.encoder = Stack(c, self.token_embedder)
        self.decoder = Stack(c, self.token_embedder)

    def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
        segments = (encoder_input_tokens > 0).astype(jnp.int32) if encoder_segment_ids is None else encoder_segment_ids
        return self.encoder(encoder_input_tokens, attention_mask(segments, segments), enable_dropout=enable_dropout)

    def decode(self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
               decoder_segment_ids=None, decoder_positions=None, *, enable_dropout=True, decode=False,
               max_decode_length=None):  # fmt: skip
        keys = (encoder_input_tokens > 0).astype(jnp.int32) if encoder_segment_ids is None else encoder_segment_ids
        queries = (decoder_target_tokens > 0).astype(jnp.int32) if decoder_segment_ids is None else decoder_segment_ids
        queries = jnp.ones_like(decoder_target_tokens) if decode else queries
        hidden = self.decoder(
            decoder_input_tokens, attention_mask(queries, queries, causal=True), decoder_positions, encoded=encoded,
            cross_mask=attention_mask(queries, keys), enable_dropout=enable_dropout, decode=decode,
        )  # fmt: skip
        return self.token_embedder.attend(hidden)

    def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
                 decoder_segment_ids=None, encoder_positions=None, decoder_positions=None, *, enable_dropout=True,
                 decode=False):  # fmt: skip
        segments = (encoder_input_tokens > 0).astype(jnp.int32) if encoder_segment_ids is None else encoder_segment_ids
        mask = attention_mask(segments, segments)
        encoded = self.encoder(encoder_input_tokens, mask, encoder_positions, enable_dropout=enable_dropout)
        return self.decode(
            encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, segments, decoder_segment_ids,
            decoder_positions, enable_dropout=enable_dropout, decode=decode,
        )  # fmt: skip


@gin.configurable
class DecoderOnly(linen.Module):
    """A decoder, with a prefix that is read in both directions if `decoder_causal_attention` marks one."""

    config: Config

    def setup(self):
        self.token_embedder = embedder(self.config)
        self.decoder = Stack(self.config, self.token_embedder)

    def __call__(self, decoder_input_tokens, decoder_target_tokens, decoder_segment_ids=None, decoder_positions=None,
                 decoder_causal_attention=None, *, enable_dropout=True, decode=False, max_decode_length=None, prefill=False,
                 prefill_lengths=None):  # fmt: skip
        segments = (decoder_target_tokens > 0).astype(jnp.int32) if decoder_segment_ids is None else decoder_segment_ids
        hidden = self.decoder(
            decoder_input_tokens, attention_mask(segments, segments, True, decoder_causal_attention), decoder_positions,
            enable_dropout=enable_dropout, decode=decode, prefill=prefill, prefill_lengths=prefill_lengths,
        )  # fmt: skip
        return self.token_embedder.attend(hidden)
