"""What the rest of the library asks of a network: the protocols that ours satisfy, and a user's.

Axis letters: B batch, T decoder length (of an encoder alone, its own), P prompt length, D embed, V vocab.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.errors import UserError

Batch = Mapping[str, jax.Array]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

ARCHITECTURES = ("encoder_decoder", "causal_decoder", "prefix_decoder", "encoder")


@runtime_checkable
class Network(Protocol):
    """Describes a network, and makes it. `TransformerConfig` is one; `networks.of_module` makes one of an NNX module's class.

    It may have more:
      max_length: tokens that it can tell the positions of; None, or none given: any number.
      dropout_rate: where it is 0, training makes no dropout keys.
      recomputed_flops(encoder_length, decoder_length): FLOPs of one sequence that the backward pass spends twice.
      remat_policy: which `compile --search` varies.
    """

    @property
    def architecture(self) -> str:
        """One of `ARCHITECTURES`; it says which features a batch has."""
        ...

    @property
    def vocab_size(self) -> int:
        """V; ids are below it."""
        ...

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Forward and backward FLOPs of one sequence; 0 is the length of a stack that is not there."""
        ...

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Module":
        """The module, with float32 parameters.

        An `nnx.Param` says its logical axes as metadata, `nnx.Param(x, axes=("embed", "mlp"))`, or as Flax does, by
        `nnx.with_partitioning`; without, it is copied to every device.

        Args:
          rngs: with the streams `params` and `dropout`, and a default one.
          constrain: f(array, logical axes) -> the array, split over the mesh; for activations.
        """
        ...


class Module(Protocol):
    """What `Network.make` returns, an `nnx.Module`. With these methods it trains, evaluates, scores and ranks.

    Its `nnx.Dropout` layers draw from a new key in every step, and rest where nothing is trained.

    It may have more:
      output_matrix() -> (matrix [D, V], a number): what hidden states are multiplied by to make logits. The loss then never
        holds all logits at once.
      logit_cap: c, where `logits` ends with c * tanh(logits / c); for the loss by the matrix.
      prefill and decode, see `Decoder`: it generates.
      unstack(): what `decode` takes as `layers`; called once before a loop over tokens.
    """

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Teacher-forced hidden states [B, T, ...].

        Args:
          batch: SeqIO's model features: `<side>_input_tokens` and `<side>_target_tokens`, int [B, T]; of a prefix decoder
            `decoder_causal_attention`; and `<side>_segment_ids` and `<side>_positions` only where examples are packed.
          dropout_key: None = no dropout. A module that draws from its own streams leaves the argument out.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [B, T, V] of hidden states."""
        ...


class Decoder(Module, Protocol):
    """A module that generates. Its state is any tree of arrays whose first axis is B.

    A state may have `reorder(rows)`, where each row replaces one of the same prompt, for what then need not move.
    """

    def prefill(self, prompt: jax.Array, max_tokens: int) -> tuple[jax.Array, Any]:
        """Reads prompts, int [B, P], 0 = padding on the right.

        They are the encoder's input, or follow the start token 0. A module whose `prefill` has the arguments `start` and
        `padding` as well serves vocabularies with other ids, see `Transformer.prefill`.

        Returns:
          (hidden state of each prompt's last token, [B, D]; the state, with room for `max_tokens` more)
        """
        ...

    def decode(self, state: Any, tokens: jax.Array, layers: Any = None) -> tuple[jax.Array, Any]:
        """Reads tokens, int [B, T], that follow; their hidden states [B, T, D], and the state after them."""
        ...


def name_of(network: Network) -> str:
    """What sentences call it: the name of its class, or of the module's."""
    return getattr(network, "name", type(network).__name__)


def dropout_rate(network: Network) -> float:
    """Its rate of dropout; 1 where it does not say, so that keys are made."""
    return getattr(network, "dropout_rate", 1.0)


def has_encoder(network: Network) -> bool:
    return network.architecture in ("encoder_decoder", "encoder")


def has_decoder(network: Network) -> bool:
    return network.architecture != "encoder"


def max_length(network: Network) -> int | None:
    """Tokens that it can tell the positions of; None where nothing limits them."""
    return getattr(network, "max_length", None)


def more_ids(network: Network) -> frozenset[int]:
    """Ids beyond its vocabulary that it embeds, as those of a soft prompt."""
    return getattr(network, "more_ids", frozenset())


def recomputed_flops(network: Network, encoder_length: int, decoder_length: int) -> int:
    """FLOPs of one sequence that its backward pass spends on what it does not keep, as far as it says so."""
    count = getattr(network, "recomputed_flops", None)
    return count(encoder_length, decoder_length) if count else 0


def check_length(network: Network, length: int) -> None:
    """Raises a `UserError` when sequences of that many tokens are longer than the model can tell positions."""
    most = max_length(network)
    if most is not None and length > most:
        is_table = most == getattr(network, "max_positions", None) and getattr(network, "longest_sequence", None) is None
        more = f", or set --gin.TransformerConfig.max_positions={length}" if is_table else ""
        raise UserError(
            f"A sequence of {length} tokens is longer than the model's {most} positions. Shorten TASK_FEATURE_LENGTHS (or the "
            f"prompt){more}."
        )


def prefill(module: Any, prompt: jax.Array, max_tokens: int, start: int | None, padding: int) -> tuple[jax.Array, Any]:
    """`prefill` of a module, or of one that knows the start token 0 and padding 0 alone."""
    if "start" in inspect.signature(module.prefill).parameters:
        return module.prefill(prompt, max_tokens, start=start, padding=padding)
    if start is None:
        prompt = prompt[:, 1:]  # it puts the start token there itself
    return module.prefill(jnp.where(prompt != padding, prompt, 0), max_tokens)


def is_feature(name: str) -> bool:
    """Whether networks are given that part of a batch: all but loss weights and counts."""
    return name not in ("raw_tokens", "task_tokens", "task") and not name.endswith("_loss_weights")


def abstract_batch(
    network: Network, rows: int, encoder_length: int, decoder_length: int, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the features of a batch."""
    names = {"encoder_input_tokens": encoder_length} if has_encoder(network) else {}
    if has_decoder(network):
        names |= dict.fromkeys(("decoder_input_tokens", "decoder_target_tokens"), decoder_length)
    else:
        names |= {"encoder_target_tokens": encoder_length}
    if network.architecture == "prefix_decoder":
        names |= {"decoder_causal_attention": decoder_length}
    if packed:
        sides = dict.fromkeys((name.partition("_")[0], length) for name, length in names.items())
        names |= {f"{side}_{what}": length for side, length in sides for what in ("segment_ids", "positions")}
    return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name, length in names.items()}


def segments_of(batch: Batch, segment_ids: str, tokens: str) -> jax.Array | None:
    """Segment ids where the batch is packed, else 1 for tokens and 0 for padding, else None (all tokens are real)."""
    if segment_ids in batch:
        return batch[segment_ids]
    return (batch[tokens] > 0).astype(jnp.int32) if tokens in batch else None
