"""Softmax cross-entropy with T5's z-loss and label smoothing, per token, in float32."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array, label_smoothing: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each token and log Z, its log partition function.

    With label smoothing s the target has probability 1 - s and every other token s / (V - 1); the entropy of that
    distribution is subtracted, so that a perfect model has loss 0 (as in T5X).

    Args:
      logits: float [..., V].
      targets: int [...], ids below V.

    Returns:
      (loss, log_z), both float32 [...]. The z-loss of a token is z_loss * log_z ** 2 (T5 code base).
    """
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather: it stays local when the vocabulary is split over devices.
    is_target = targets[..., None] == jnp.arange(vocab_size)
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if label_smoothing == 0.0:
        return log_z - target_logit, log_z
    low = label_smoothing / (vocab_size - 1)
    high = 1.0 - label_smoothing
    expected_logit = high * target_logit + low * (jnp.sum(logits, axis=-1) - target_logit)
    entropy = -(high * jnp.log(high) + label_smoothing * jnp.log(low + 1e-20))
    return log_z - expected_logit - entropy, log_z
