"""Ensembles: a network whose logits are the mean of its members' logits (Raffel et al. 2020, section 3.6).

Axis letters: B batch, T decoder length, S encoder length, V vocab.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.errors import UserError
from t5x_lab.networks.network import (
    Batch,
    Constrain,
    Network,
    additional_ids,
    has_encoder,
    max_length,
    prefill,
    segments_of,
    wide_logits,
)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Networks with one vocabulary, of any architectures, as a `Network` for inference.

    Attributes:
      networks: the members. The batch is that of an encoder-decoder if there is one among them, otherwise that of a prefix
        decoder, which every decoder can read.
    """

    networks: tuple[Network, ...]

    def __post_init__(self):
        sizes = {network.vocab_size for network in self.networks}
        if len(sizes) != 1:
            raise UserError(f"The members of an ensemble must have the same vocabulary size. These have {sorted(sizes)}.")
        if len({network.architecture == "encoder" for network in self.networks}) != 1:
            raise UserError(
                "An encoder-only network has no next-token logits. Use encoder-only networks for all members or for none."
            )

    @property
    def architecture(self) -> str:
        architectures = [network.architecture for network in self.networks]
        for architecture in ("encoder", "encoder_decoder", "prefix_decoder"):
            if architecture in architectures:
                return architecture
        return "causal_decoder"

    def needs_concatenation(self, network: Network) -> bool:
        """Returns whether a member is a decoder among encoder-decoders, so that it reads inputs and targets concatenated."""
        return self.architecture == "encoder_decoder" and not has_encoder(network)

    @property
    def vocab_size(self) -> int:
        return self.networks[0].vocab_size

    @property
    def max_length(self) -> int | None:
        return min(filter(None, map(max_length, self.networks)), default=None)

    @property
    def additional_ids(self) -> frozenset[int]:
        """Ids beyond the vocabulary that all members embed."""
        return frozenset.intersection(*map(additional_ids, self.networks))

    @property
    def dropout_rate(self) -> float:
        return 0.0

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence in all members. See `Network.flops`."""

        def member_flops(network: Network) -> int:
            is_joined = self.needs_concatenation(network)
            lengths = (0, encoder_length + decoder_length) if is_joined else (encoder_length, decoder_length)
            return network.flops(*lengths)

        return sum(map(member_flops, self.networks))

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Members":
        return Members([network.make(rngs, constrain) for network in self.networks], self)


class Members(nnx.Module):
    """The modules of an ensemble. Its hidden states are the mean logits, float32 [B, T, V]."""

    def __init__(self, members: list, config: Ensemble):
        self.members, self.config = nnx.List(members), config

    def __call__(self, batch: Batch) -> jax.Array:
        return self._mean([self._logits(*pair, batch) for pair in zip(self.members, self.config.networks, strict=True)])

    def _logits(self, member: Any, network: Network, batch: Batch) -> jax.Array:
        if not self.config.needs_concatenation(network):
            return wide_logits(member, member(batch))
        joined, columns = join_inputs_and_targets(batch)
        return jnp.take_along_axis(wide_logits(member, member(joined)), columns[..., None], axis=1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def prefill(
        self, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, "EnsembleState"]:
        """Processes prompts with all members. See `Decoder.prefill`."""
        results = [prefill(member, prompt, max_tokens, start, padding) for member in self.members]
        logits = [wide_logits(member, hidden[:, None]) for member, (hidden, _) in zip(self.members, results, strict=True)]
        return self._mean(logits)[:, 0], EnsembleState(tuple(state for _, state in results))

    def unstack(self) -> tuple:
        return tuple(member.unstack() if hasattr(member, "unstack") else None for member in self.members)

    def decode(self, state: "EnsembleState", tokens: jax.Array, layers: Any = None) -> tuple[jax.Array, "EnsembleState"]:
        """Processes the next tokens with all members. See `Decoder.decode`."""
        members = zip(self.members, state.states, layers or self.unstack(), strict=True)
        results = [(member, *member.decode(member_state, tokens, own)) for member, member_state, own in members]
        logits = [wide_logits(member, hidden) for member, hidden, _ in results]
        return self._mean(logits), EnsembleState(tuple(new_state for *_, new_state in results))

    def _mean(self, logits: list[jax.Array]) -> jax.Array:
        return jnp.mean(jnp.stack([x.astype(jnp.float32) for x in logits]), axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleState:
    """Decoding states of the members."""

    states: tuple

    def reorder(self, rows: jax.Array) -> "EnsembleState":
        """Returns the state of these rows. See `Decoder`."""
        pick = lambda state: jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)
        return EnsembleState(tuple(x.reorder(rows) if hasattr(x, "reorder") else pick(x) for x in self.states))


def join_inputs_and_targets(batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
    """Converts an encoder-decoder's batch, packed or not, to a decoder's: start token, inputs, targets.

    Returns:
      The batch [B, S + T], and for each of the decoder's tokens the column in which it is predicted [B, T].
    """
    inputs, decoder = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    input_segments = segments_of(batch, "encoder_segment_ids", "encoder_input_tokens")
    target_segments = segments_of(batch, "decoder_segment_ids", "decoder_target_tokens")
    target_segments = jnp.ones_like(decoder) if target_segments is None else target_segments
    assert input_segments is not None
    is_first = target_segments != jnp.pad(target_segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    segments = jnp.concatenate([input_segments, target_segments], axis=1)
    kind = jnp.concatenate([jnp.ones_like(inputs), jnp.where(is_first, 0, 2)], axis=1)
    order = jnp.argsort(jnp.where(segments > 0, 3 * segments + kind, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
    sort = lambda x: jnp.take_along_axis(x, order, axis=1)

    columns = jnp.argsort(order, axis=1)[:, inputs.shape[1] :]
    num_inputs = jnp.sum(target_segments[:, :, None] == input_segments[:, None, :], axis=2)  # in the segment of each target
    segments, column = sort(segments), jnp.arange(order.shape[1])[None]
    is_start = segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    joined = {
        "decoder_input_tokens": sort(jnp.concatenate([inputs, decoder], axis=1)),
        "decoder_segment_ids": segments,
        "decoder_positions": column - jax.lax.cummax(jnp.where(is_start, column, 0), axis=1),
        "decoder_causal_attention": (sort(kind) < 2).astype(jnp.int32),
    }
    return joined, columns + jnp.where(is_first & (target_segments > 0), num_inputs, 0)
