"""Which tokens carry loss, and by what the sum is divided.

The normaliser is computed once for a whole batch, so that loss and gradient do not depend on the number of microbatches.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.user_code import call_user_code, shown
from t5x_lab.networks.functional import Functional
from t5x_lab.networks.network import Batch, Network, abstract_batch, max_length


@runtime_checkable
class Loss(Protocol):
    """A term of what is trained, beside the cross-entropy or instead of it."""

    def __call__(self, network: Any, hidden: jax.Array, batch: Batch, weights: jax.Array) -> jax.Array:
        """A scalar: a sum over the batch's tokens, so that it adds over microbatches and evaluation batches.

        It is divided by what the cross-entropy is divided by, see LOSS_NORMALIZING_FACTOR; its metric is per token with loss.

        Args:
          network: the module with its parameters in it, after it has read the batch; `network.logits(hidden)` are its logits.
          hidden: its hidden states [B, T, …].
          batch: SeqIO's model features.
          weights: float32 [B, T], of each token in the loss. A penalty that does not depend on tokens is multiplied by
            their sum.
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
        raise UserError(f"LOSS_NORMALIZING_FACTOR is {factor}; a number here must be greater than zero.")


# Of every run; a user's metrics have other names.
METRICS = frozenset(("loss", "z_loss", "accuracy", "grad_norm", "learning_rate", "healthy", "mfu", "goodput"))
METRICS |= {"tokens_processed", "tokens_with_loss", "raw_tokens", "task_tokens"}
METRICS |= {"seconds", "seconds_per_step", "tokens_per_second", "data_wait_fraction"}


def check_metric(what: str, name: str) -> None:
    """Raises a `UserError` for a user's metric that is called like one of every run."""
    if name.partition("/")[0] in METRICS:
        raise UserError(f'{what} is called "{name}", which is another metric. Choose another name.')


def check_losses(losses: Mapping[str, Loss], network: Network, functional: Functional) -> None:
    """Raises a `UserError` for losses that do not give a scalar, found out on shapes alone of the network's module."""
    for name, loss in losses.items():
        check_metric("A loss of ModelConfig.losses", name)
        if not callable(loss) or isinstance(loss, type):
            raise UserError(
                f'ModelConfig.losses["{name}"] is {loss!r}; it must be a function of (network, hidden, batch, weights).'
            )

        def run(params, batch, loss=loss):
            module = functional.module(params)
            return loss(module, module(batch), batch, token_weights(batch))

        rows, tokens = 2, min(3, max_length(network) or 3)
        batch = abstract_batch(network, rows, tokens, tokens)
        what = f'The loss "{name}" fails'
        found = call_user_code(what, lambda run=run: jax.eval_shape(run, functional.abstract_params, batch))
        if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.floating):
            raise UserError(f'The loss "{name}" gives {shown(found)}; it must give a float, the sum over all tokens.')


def predicting_side(batch: Batch) -> str:
    """ "decoder", or "encoder" for a batch of an encoder alone; what the names of targets and loss weights begin with."""
    return "encoder" if "encoder_target_tokens" in batch else "decoder"


def target_tokens(batch: Batch) -> jax.Array:
    """Int [B, T], what the logits predict."""
    return batch[f"{predicting_side(batch)}_target_tokens"]


def token_weights(batch: Batch) -> jax.Array:
    """Float32 [B, T]: the batch's loss weights, or 1 for every target that is not padding."""
    weights = batch.get(f"{predicting_side(batch)}_loss_weights")
    return (target_tokens(batch) > 0 if weights is None else weights).astype(jnp.float32)


def weights_and_normalizer(batch: Batch, factor: float | str | None) -> tuple[jax.Array, jax.Array]:
    """Loss weights [B, T] and the number that the weighted sum is divided by.

    Args:
      batch: a whole batch, before it is split into microbatches.
      factor: None = the sum over tokens (T5X's default); a number; or one of `NORMALIZERS`: tokens with loss; all
        positions, padding included; or the mean over sequences of each sequence's mean, packed ones told apart by
        their segment ids. Padding is no sequence, whatever it weighs.
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
        number = jnp.cumsum(segments != jnp.pad(segments, [[0, 0], [1, 0]])[:, :-1], axis=1)  # whatever ids they have
        add_up = jax.vmap(lambda number, weights: jnp.zeros(len(weights) + 1).at[number].add(weights)[number])
        total = add_up(number, weights)
        weights = jnp.where(total > 0, weights / jnp.maximum(total, 1e-6), 0.0)
        return weights, jnp.maximum(jnp.sum(weights), 1e-6)
    return weights, jnp.float32(factor)
