"""Loss weights, the normalizer of the loss, sums of losses, and the protocol of additional loss terms.

The normalizer is computed once per batch, so that loss and gradient do not depend on the number of microbatches.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.user_code import call_user_code, shown
from t5x_lab.networks.checks import FeatureMismatch
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import Batch, Network, abstract_batch, max_length


class Loss(Protocol):
    """An additional loss term, or a replacement of the cross-entropy."""

    def __call__(self, network: Any, hidden: jax.Array, batch: Batch, weights: jax.Array) -> jax.Array:
        """Returns a scalar, a sum over the tokens of the batch, so that it can be added over batches.

        It is divided by the same normalizer as the cross-entropy, see LOSS_NORMALIZING_FACTOR. Its metric is per token with
        loss.

        Args:
          network: the module with its parameters. `network.logits(hidden)` returns logits.
          hidden: hidden states [B, T, ...].
          batch: SeqIO's model features.
          weights: loss weights, float32 [B, T]. Multiply a penalty that does not depend on tokens by their sum.
        """
        ...


NORMALIZERS = ("NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE")


def check_normalizer(factor: float | str | None) -> None:
    if isinstance(factor, str) and factor not in NORMALIZERS:
        raise UserError(
            f'LOSS_NORMALIZING_FACTOR is "{factor}".{did_you_mean(factor, NORMALIZERS)} '
            f"Choose one of {', '.join(NORMALIZERS)}, a number, or None for the sum over tokens."
        )
    if isinstance(factor, int | float) and factor <= 0:
        raise UserError(f"LOSS_NORMALIZING_FACTOR is {factor}. A number must be greater than zero.")


# Metrics of every run. A user's metrics must have other names.
METRICS = frozenset(("loss", "z_loss", "accuracy", "grad_norm", "learning_rate", "healthy", "mfu", "goodput"))
METRICS |= {"tokens_processed", "tokens_with_loss", "raw_tokens", "task_tokens"}
METRICS |= {"seconds", "seconds_per_step", "tokens_per_second", "data_wait_fraction"}


def check_metric(owner: str, name: str) -> None:
    """Raises a `UserError` for a user's metric with the name of a built-in metric."""
    if name.partition("/")[0] in METRICS:
        raise UserError(f'{owner} has the name "{name}", which is a built-in metric. Choose another name.')


def check_losses(losses: Mapping[str, Loss], network: Network, functional: Functional) -> None:
    """Checks losses on the shapes of a batch of tokens.

    Raises:
      FeatureMismatch: for a loss that reads another feature.
      UserError: for a loss that fails otherwise, or does not return a scalar.
    """
    for name, loss in losses.items():
        check_metric("A loss of ModelConfig.losses", name)
        if not callable(loss) or isinstance(loss, type):
            raise UserError(
                f'ModelConfig.losses["{name}"] is {loss!r}. It must be a function of (network, hidden, batch, weights).'
            )

        def run(params, batch, loss=loss):
            module = functional.module(params)
            return loss(module, module(batch), batch, token_weights(batch))

        rows, tokens = 2, min(3, max_length(network) or 3)
        batch = abstract_batch(network, rows, tokens, tokens)
        trial = lambda run=run: jax.eval_shape(run, functional.abstract_params, batch)
        try:
            result = call_user_code(f'The loss "{name}" fails', trial)
        except UserError as error:
            if isinstance(error.__cause__, KeyError):
                raise FeatureMismatch(error.sentence) from error.__cause__
            raise
        if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.floating):
            raise UserError(f'The loss "{name}" returns {shown(result)}. It must return a float scalar, the sum over tokens.')


def predicting_side(batch: Batch) -> str:
    """Returns the prefix of the targets' feature names: "decoder", or "encoder" for an encoder-only network."""
    return "encoder" if "encoder_target_tokens" in batch else "decoder"


def target_tokens(batch: Batch) -> jax.Array:
    """Returns the target ids, int [B, T]."""
    return batch[f"{predicting_side(batch)}_target_tokens"]


def token_weights(batch: Batch) -> jax.Array:
    """Returns the loss weights, float32 [B, T]. Default: 1 for targets, 0 for padding."""
    weights = batch.get(f"{predicting_side(batch)}_loss_weights")
    return (target_tokens(batch) > 0 if weights is None else weights).astype(jnp.float32)


def weights_and_normalizer(batch: Batch, factor: float | str | None) -> tuple[jax.Array, jax.Array]:
    """Returns loss weights [B, T] and the divisor of the weighted sum.

    Args:
      batch: a batch before it is split into microbatches.
      factor: None = no division, the sum over tokens (T5X's default); a number; or one of `NORMALIZERS`: the number of tokens
        with loss; the number of positions, padding included; or the mean over sequences of each sequence's mean, where segment
        ids separate packed sequences.
    """
    weights = token_weights(batch)
    if factor is None:
        return weights, jnp.float32(1.0)
    if factor == "NUM_REAL_TARGET_TOKENS":
        return weights, jnp.maximum(jnp.sum(weights), 1e-6)
    if factor == "NUM_TOTAL_TARGET_TOKENS":
        return weights, jnp.float32(weights.size)
    if factor == "AVERAGE_PER_SEQUENCE":
        segments = batch.get(f"{predicting_side(batch)}_segment_ids", (target_tokens(batch) > 0).astype(jnp.int32))
        weights = jnp.where(segments > 0, weights, 0.0)
        number = jnp.cumsum(segments != jnp.pad(segments, [[0, 0], [1, 0]])[:, :-1], axis=1)  # numbered from 1 per row
        segment_sums = jax.vmap(lambda number, weights: jnp.zeros(len(weights) + 1).at[number].add(weights)[number])
        total = segment_sums(number, weights)
        weights = jnp.where(total > 0, weights / jnp.maximum(total, 1e-6), 0.0)
        return weights, jnp.maximum(jnp.sum(weights), 1e-6)
    return weights, jnp.float32(factor)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a batch. They can be added over microbatches and batches.

    Attributes:
      objective: the value that training differentiates: (cross-entropy + z-loss) times the objective's weights, plus the
        additional loss terms.
      loss, z_loss, correct: sums weighted with the batch's loss weights, for the metrics.
      weights: sum of the batch's loss weights.
      objective_weights: sum of the objective's weights.
      terms: additional loss terms by name.
    """

    objective: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    weights: jax.Array
    objective_weights: jax.Array
    terms: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
