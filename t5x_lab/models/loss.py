"""Which tokens carry loss, and by what the sum is divided.

The normaliser is computed once for a whole batch, so that loss and gradient do not depend on the number of microbatches.
"""

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.networks.network import Batch

NORMALIZERS = ("NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE")


def check_normalizer(factor: float | str | None) -> None:
    if isinstance(factor, str) and factor not in NORMALIZERS:
        raise UserError(
            f'LOSS_NORMALIZING_FACTOR is "{factor}".{nearest(factor, NORMALIZERS)} '
            f"Choose one of {', '.join(NORMALIZERS)}, a number, or None for the sum over tokens."
        )
    if isinstance(factor, int | float) and factor <= 0:
        raise UserError(f"LOSS_NORMALIZING_FACTOR is {factor}; a number here must be greater than zero.")


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
        their segment ids.
    """
    weights = token_weights(batch)
    if factor is None:
        return weights, jnp.float32(1.0)
    if factor == "NUM_REAL_TARGET_TOKENS":
        return weights, jnp.maximum(jnp.sum(weights), 1e-6)
    if factor == "NUM_TOTAL_TARGET_TOKENS":
        return weights, jnp.float32(weights.size)
    if factor == "AVERAGE_PER_SEQUENCE":
        segments = batch.get(f"{predicting_side(batch)}_segment_ids", jnp.ones(weights.shape, jnp.int32))
        same = (segments[:, :, None] == segments[:, None, :]).astype(jnp.float32)
        total = jnp.einsum("BTS,BS->BT", same, weights)
        weights = jnp.where(total > 0, weights / jnp.maximum(total, 1e-6), 0.0)
        return weights, jnp.maximum(jnp.sum(weights), 1e-6)
    return weights, jnp.float32(factor)
