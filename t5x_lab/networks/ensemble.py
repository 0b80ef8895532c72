"""Several networks as one, whose logits are the mean of theirs (Raffel et al. 2020, section 3.6).

Axis letters: B batch, T decoder length, S encoder length, V vocab.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.errors import UserError
from t5x_lab.networks.network import Batch, Constrain, Network, has_encoder, max_length, more_ids, prefill, segments_of


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Networks of one vocabulary, of whatever architectures, as a `Network`; it is asked, and not trained.

    Attributes:
      networks: the members. Batches are those of an encoder-decoder where one of them is that, and else those of a prefix
        decoder, which any decoder reads.
    """

    networks: tuple[Network, ...]

    def __post_init__(self):
        sizes = {network.vocab_size for network in self.networks}
        if len(sizes) != 1:
            raise UserError(f"Members of an ensemble have one vocabulary; these have {sorted(sizes)} ids.")
        if len({network.architecture == "encoder" for network in self.networks}) != 1:
            raise UserError("An encoder alone gives no logits of a next token; make an ensemble of encoders, or without one.")

    @property
    def architecture(self) -> str:
        found = [network.architecture for network in self.networks]
        for architecture in ("encoder", "encoder_decoder", "prefix_decoder"):
            if architecture in found:
                return architecture
        return "causal_decoder"

    def reads_as_one(self, network: Network) -> bool:
        """Whether a member is a decoder among encoder-decoders."""
        return self.architecture == "encoder_decoder" and not has_encoder(network)

    @property
    def vocab_size(self) -> int:
        return self.networks[0].vocab_size

    @property
    def max_length(self) -> int | None:
        return min(filter(None, map(max_length, self.networks)), default=None)

    @property
    def more_ids(self) -> frozenset[int]:
        """Ids beyond the vocabulary that all members embed, each as its own."""
        return frozenset.intersection(*map(more_ids, self.networks))

    @property
    def dropout_rate(self) -> float:
        return 0.0

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """As `Network.flops`; a decoder among encoder-decoders reads both."""

        def of(network: Network) -> int:
            together = self.reads_as_one(network)
            lengths = (0, encoder_length + decoder_length) if together else (encoder_length, decoder_length)
            return network.flops(*lengths)

        return sum(map(of, self.networks))

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Members":
        return Members([network.make(rngs, constrain) for network in self.networks], self)


class Members(nnx.Module):
    """The modules of an ensemble. What stands for its hidden states are logits already, float32 [B, T, V]."""

    def __init__(self, members: list, config: Ensemble):
        self.members, self.config = nnx.List(members), config

    def __call__(self, batch: Batch) -> jax.Array:
        return self._mean([self._logits(*each, batch) for each in zip(self.members, self.config.networks, strict=True)])

    def _logits(self, member: Any, network: Network, batch: Batch) -> jax.Array:
        if not self.config.reads_as_one(network):
            return member.logits(member(batch))
        together, places = as_one_sequence(batch)
        return jnp.take_along_axis(member.logits(member(together)), places[..., None], axis=1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def prefill(
        self, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, "EnsembleState"]:
        """As `Decoder.prefill`."""
        found = [prefill(member, prompt, max_tokens, start, padding) for member in self.members]
        logits = [member.logits(hidden[:, None]) for member, (hidden, _) in zip(self.members, found, strict=True)]
        return self._mean(logits)[:, 0], EnsembleState(tuple(state for _, state in found))

    def unstack(self) -> tuple:
        return tuple(member.unstack() if hasattr(member, "unstack") else None for member in self.members)

    def decode(self, state: "EnsembleState", tokens: jax.Array, layers: Any = None) -> tuple[jax.Array, "EnsembleState"]:
        """As `Decoder.decode`."""
        each = zip(self.members, state.states, layers or self.unstack(), strict=True)
        found = [(member, *member.decode(of_member, tokens, own)) for member, of_member, own in each]
        logits = [member.logits(hidden) for member, hidden, _ in found]
        return self._mean(logits), EnsembleState(tuple(new for *_, new in found))

    def _mean(self, logits: list[jax.Array]) -> jax.Array:
        return jnp.mean(jnp.stack([x.astype(jnp.float32) for x in logits]), axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleState:
    """The members' states."""

    states: tuple

    def reorder(self, rows: jax.Array) -> "EnsembleState":
        """See `Decoder`."""
        pick = lambda state: jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)
        return EnsembleState(tuple(x.reorder(rows) if hasattr(x, "reorder") else pick(x) for x in self.states))


def as_one_sequence(batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
    """A batch of an encoder-decoder as a decoder's, packed or not: what it reads first, then inputs, then targets.

    Returns:
      (the batch, [B, S + T]; where in it each of the decoder's own tokens [B, T] is predicted)
    """
    inputs, decoder = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    of_inputs = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
    of_decoder = segments_of(batch, "decoder_segment_ids", "decoder_target_tokens")
    of_decoder = jnp.ones_like(decoder) if of_decoder is None else of_decoder
    assert of_inputs is not None
    is_first = of_decoder != jnp.pad(of_decoder, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    segments = jnp.concatenate([of_inputs, of_decoder], axis=1)
    kind = jnp.concatenate([jnp.ones_like(inputs), jnp.where(is_first, 0, 2)], axis=1)
    order = jnp.argsort(jnp.where(segments > 0, 3 * segments + kind, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
    sort = lambda x: jnp.take_along_axis(x, order, axis=1)

    places = jnp.argsort(order, axis=1)[:, inputs.shape[1] :]
    num_inputs = jnp.sum(of_decoder[:, :, None] == of_inputs[:, None, :], axis=2)  # of each token's own segment
    segments, column = sort(segments), jnp.arange(order.shape[1])[None]
    begins = segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    together = {
        "decoder_input_tokens": sort(jnp.concatenate([inputs, decoder], axis=1)),
        "decoder_segment_ids": segments,
        "decoder_positions": column - jax.lax.cummax(jnp.where(begins, column, 0), axis=1),
        "decoder_causal_attention": (sort(kind) < 2).astype(jnp.int32),
    }
    return together, places + jnp.where(is_first & (of_decoder > 0), num_inputs, 0)
