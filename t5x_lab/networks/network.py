"""Protocols of networks, `Network`, `Module` and `Decoder`, for ours and a user's, with functions for their optional members.

Axis letters: B batch, T decoder length (encoder length for an encoder-only network), P prompt length, D embed, V vocab.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.errors import UserError

Batch = Mapping[str, jax.Array]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

ARCHITECTURES = ("encoder_decoder", "causal_decoder", "prefix_decoder", "encoder")


class Network(Protocol):
    """Describes and makes a network, such as `TransformerConfig`. `ModuleNetwork` makes a network from an NNX module class.

    Optional members:
      max_length: maximum sequence length in tokens. Default: None, unlimited.
      dropout_rate: with 0, training makes no dropout keys.
      recomputed_flops(encoder_length, decoder_length): FLOPs of one sequence that the backward pass recomputes.
      remat_policy: policy that `compile --search` varies.
    """

    @property
    def architecture(self) -> str:
        """One of `ARCHITECTURES`. It determines the features of a batch."""
        ...

    @property
    def vocab_size(self) -> int:
        """V. Token ids are less than V."""
        ...

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the forward and backward FLOPs of one sequence. The length of a missing stack is 0."""
        ...

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Module":
        """Makes the module, with float32 parameters.

        The metadata of an `nnx.Param` holds its logical axes, as in `nnx.Param(x, axes=("embed", "mlp"))` or with
        `nnx.with_partitioning`. A parameter without axes is replicated.

        Args:
          rngs: random number generators with the streams `params`, `dropout` and a default one.
          constrain: function (array, logical axes) -> array that shards activations over the mesh.
        """
        ...


class Module(Protocol):
    """An `nnx.Module` made by `Network.make`. These methods suffice for training, evaluation, scoring and ranking.

    Its `nnx.Dropout` layers use a new key in every training step and are inactive otherwise.

    Optional members:
      output_matrix() -> (matrix [D, V], scale): logits are scale * hidden @ matrix. The loss then never holds all logits.
      logit_cap: c, if `logits` computes c * tanh(logits / c). Used with `output_matrix`.
      prefill, decode: see `Decoder`. Required for generation.
      unstack(): returns the argument `layers` of `decode`. Called once before a loop over tokens.
    """

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns teacher-forced hidden states [B, T, ...].

        Args:
          batch: SeqIO's model features: `<side>_input_tokens` and `<side>_target_tokens`, int [B, T]; for a prefix decoder also
            `decoder_causal_attention`; for packed examples also `<side>_segment_ids` and `<side>_positions`.
          dropout_key: None = no dropout. A module that uses its own random streams omits this argument.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V] of hidden states."""
        ...


class Decoder(Module, Protocol):
    """A module that can generate. The decoding state is a tree of arrays whose first axis is B.

    A state may have a method `reorder(rows)` for beam search. Each row replaces a row of the same prompt, so arrays that depend
    on the prompt alone need not move.
    """

    def prefill(self, prompt: jax.Array, max_tokens: int) -> tuple[jax.Array, Any]:
        """Processes prompts, int [B, P], padded with 0 on the right.

        They are the encoder's input, or follow the start token 0. With the additional arguments `start` and `padding` a module
        supports other ids. See `Transformer.prefill`.

        Returns:
          Hidden state of each prompt's last token [B, D], and a decoding state with capacity for `max_tokens` more tokens.
        """
        ...

    def decode(self, state: Any, tokens: jax.Array, layers: Any = None) -> tuple[jax.Array, Any]:
        """Processes the next tokens, int [B, T]. Returns their hidden states [B, T, D] and the new state."""
        ...


def network_name(network: Network) -> str:
    """Returns the class name of a network or of its module, for messages."""
    return getattr(network, "name", type(network).__name__)


def dropout_rate(network: Network) -> float:
    """Returns the dropout rate of a network; 1 if it has none, so that keys are made."""
    return getattr(network, "dropout_rate", 1.0)


def has_encoder(network: Network) -> bool:
    return network.architecture in ("encoder_decoder", "encoder")


def has_decoder(network: Network) -> bool:
    return network.architecture != "encoder"


def max_length(network: Network) -> int | None:
    """Returns the maximum sequence length in tokens. None = unlimited."""
    return getattr(network, "max_length", None)


def additional_ids(network: Network) -> frozenset[int]:
    """Returns the ids beyond the vocabulary that a network embeds, such as those of a soft prompt."""
    return getattr(network, "additional_ids", frozenset())


def recomputed_flops(network: Network, encoder_length: int, decoder_length: int) -> int:
    """Returns the FLOPs of one sequence that the backward pass recomputes; 0 if the network does not define them."""
    count = getattr(network, "recomputed_flops", None)
    return count(encoder_length, decoder_length) if count else 0


def check_length(network: Network, length: int) -> None:
    """Raises a `UserError` if a sequence length exceeds the network's maximum."""
    limit = max_length(network)
    if limit is not None and length > limit:
        is_table = limit == getattr(network, "max_positions", None) and getattr(network, "longest_sequence", None) is None
        advice = f", or set --gin.TransformerConfig.max_positions={length}" if is_table else ""
        raise UserError(
            f"A sequence of {length} tokens exceeds the model's maximum of {limit}. Reduce TASK_FEATURE_LENGTHS or shorten the "
            f"prompt{advice}."
        )


def wide_logits(module: Any, hidden: jax.Array) -> jax.Array:
    """Returns the logits of hidden states, computed in float32 or wider unless the module computes them in a way of its own."""
    return module.logits(widen(hidden) if hasattr(module, "output_matrix") else hidden)


def widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def prefill(module: Any, prompt: jax.Array, max_tokens: int, start: int | None, padding: int) -> tuple[jax.Array, Any]:
    """Calls `prefill` of a module, also of one that supports only start token 0 and padding 0."""
    if "start" in inspect.signature(module.prefill).parameters:
        return module.prefill(prompt, max_tokens, start=start, padding=padding)
    if start is None:
        prompt = prompt[:, 1:]  # the module adds the start token itself
    return module.prefill(jnp.where(prompt != padding, prompt, 0), max_tokens)


def is_feature(name: str) -> bool:
    """Returns whether networks receive this entry of a batch: all except loss weights and counts."""
    return name not in ("raw_tokens", "task_tokens", "task") and not name.endswith("_loss_weights")


def abstract_batch(
    network: Network, rows: int, encoder_length: int, decoder_length: int, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the feature shapes of a batch."""
    names = {"encoder_input_tokens": encoder_length} if has_encoder(network) else {}
    if has_decoder(network):
        names |= dict.fromkeys(("decoder_input_tokens", "decoder_target_tokens"), decoder_length)
    else:
        names |= {"encoder_target_tokens": encoder_length}
    if network.architecture == "prefix_decoder":
        names |= {"decoder_causal_attention": decoder_length}
    if packed:
        sides = dict.fromkeys((name.partition("_")[0], length) for name, length in names.items())
        names |= {f"{side}_{name}": length for side, length in sides for name in ("segment_ids", "positions")}
    return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name, length in names.items()}


def segments_of(batch: Batch, segment_ids: str, tokens: str) -> jax.Array | None:
    """Returns the segment ids of a packed batch; otherwise 1 for tokens and 0 for padding; None if there is no padding."""
    if segment_ids in batch:
        return batch[segment_ids]
    return (batch[tokens] > 0).astype(jnp.int32) if tokens in batch else None
