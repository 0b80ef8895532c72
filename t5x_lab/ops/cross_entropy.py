"""Softmax cross-entropy in chunks of tokens, which never holds the logits of all tokens.

The float32 logits of T5's 32,128 ids are the largest array of a training step. Here the logits of a chunk give its losses and,
if a gradient is needed, immediately its part of the objective's gradient. No array [B, T, V] exists, and no matrix product is
computed twice. The gradient of individual token losses, which training does not need, recomputes the chunks.

Axis letters: B batch, T length, D embed, V vocab, S shards of the batch, R = B / S rows of each, C columns of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from t5x_lab.ops.capping import soft_cap


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Settings of the loss.

    Attributes:
      z_loss: weight of log(Z)**2 in the objective, where Z is the sum of the exponentials of the logits (T5's code).
      label_smoothing: s gives the target the probability 1 - s and every other id s / (V - 1). The entropy of this distribution
        is subtracted, so that a perfect model has loss 0, as in T5X.
      scale: factor of the logits.
      cap: soft cap of the scaled logits, see `soft_cap`. None = no cap.
      shards: S, the number of device shards of the batch's rows. Each sums its own gradient of the output matrix; the sums are
        added once, after the last chunk.
      chunk: approximate number of tokens per shard whose logits exist at a time, at least one column.
      constrain: function (array, logical axes) -> array. See `Transformer`.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    shards: int = 1
    chunk: int = 2048
    constrain: Callable = lambda x, axes: x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLosses:
    """Values per token, float32 [B, T]: cross-entropy, log Z, and 1 if the target is the most likely id, else 0."""

    loss: jax.Array
    log_z: jax.Array
    correct: jax.Array


def compute_logits(hidden: jax.Array, matrix_DV: jax.Array, scale: float = 1.0, cap: float | None = None) -> jax.Array:
    """Returns logits [..., V] of hidden states [..., D], multiplied in their dtype and accumulated in float32 or wider."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...D,DV->...V", hidden, matrix_DV.astype(hidden.dtype), preferred_element_type=wide)
    return soft_cap(logits if scale == 1.0 else logits * scale, cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden_BTD: jax.Array, matrix_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, config: CrossEntropy
) -> tuple[jax.Array, TokenLosses]:
    """Returns the objective, the sum of weight * (loss + z_loss * log(Z)**2) over tokens, and the token losses.

    Args:
      hidden_BTD: hidden states.
      matrix_DV: output matrix, or transposed embedding table.
      targets_BT: target ids.
      weights_BT: float32 weights of the tokens in the objective.
      config: settings of the loss.
    """
    losses, _ = _chunked(hidden_BTD, matrix_DV, targets_BT, None, config)
    return _objective(losses, weights_BT, config), losses


def cross_entropy_of_logits(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, config: CrossEntropy
) -> tuple[jax.Array, TokenLosses]:
    """Returns the same as `cross_entropy` from given logits, with JAX's gradient."""
    wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    losses, _ = _losses(wide, targets_BT, None, config)
    return _objective(losses, weights_BT, config), losses


def _forward(hidden, matrix, targets, weights, config):
    needs_matrix = matrix.perturbed  # a frozen output matrix has no gradient
    hidden, matrix, targets, weights = inputs = tuple(x.value for x in (hidden, matrix, targets, weights))
    token_cotangents = lambda log_z, weights: (weights * (1.0 + 2.0 * config.z_loss * log_z), weights)
    losses, gradient = _chunked(hidden, matrix, targets, (token_cotangents, (weights,)), config, needs_matrix)
    return (_objective(losses, weights, config), losses), (inputs, losses, gradient)


def _backward(config, saved, cotangents):
    (hidden, matrix, targets, weights), losses, gradient = saved
    d_objective, d_losses = cotangents
    needs_matrix = gradient[1] is not None
    d_hidden, d_weights = jnp.zeros_like(hidden), jnp.zeros_like(weights)
    d_matrix = jnp.zeros_like(matrix) if needs_matrix else None
    if not isinstance(d_objective, SymbolicZero):
        d_hidden, d_matrix = jax.tree.map(lambda g: (g * d_objective).astype(g.dtype), gradient)
        d_weights = ((losses.loss + config.z_loss * jnp.square(losses.log_z)) * d_objective).astype(weights.dtype)
    if not (isinstance(d_losses.loss, SymbolicZero) and isinstance(d_losses.log_z, SymbolicZero)):
        cotangents = (
            jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in (d_losses.loss, d_losses.log_z)
        )
        token_cotangents = lambda log_z, d_loss, d_log_z: (d_loss + d_log_z, d_loss)
        _, gradient = _chunked(hidden, matrix, targets, (token_cotangents, tuple(cotangents)), config, needs_matrix)
        d_hidden, d_matrix = jax.tree.map(jnp.add, (d_hidden, d_matrix), gradient)
    return d_hidden, d_matrix, None, d_weights


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _objective(losses: TokenLosses, weights_BT: jax.Array, config: CrossEntropy) -> jax.Array:
    return jnp.sum((losses.loss + config.z_loss * jnp.square(losses.log_z)) * weights_BT)


def _chunked(hidden_BTD, matrix_DV, targets_BT, cotangents, config: CrossEntropy, needs_matrix: bool = True):
    """Returns token losses, and the gradients of hidden states and matrix or None.

    Args:
      hidden_BTD, matrix_DV, targets_BT: see `cross_entropy`.
      cotangents: None for no gradient; or a function and its arguments, each [B, T]. The function maps (log Z, arguments) to
        the weights of the softmax and of the target distribution in the gradient of the logits, see `_losses`.
      config: settings of the loss.
      needs_matrix: compute the gradient of the matrix, otherwise None.
    """
    B, T, D = hidden_BTD.shape
    S = config.shards if B % config.shards == 0 else 1
    chunks = max(1, round(B // S * T / config.chunk))
    C = -(-T // chunks)
    chunks = -(-T // C)
    matrix = config.constrain(matrix_DV.astype(hidden_BTD.dtype), (None, "vocab"))
    wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)

    def to_chunks(x):
        x = jnp.pad(x, [(0, 0), (0, chunks * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(S, B // S, chunks, C, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0)

    def from_chunks(x):
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(B, chunks * C, *x.shape[4:])[:, :T]

    token_cotangents, arguments = cotangents or (None, ())
    with_gradient = token_cotangents is not None

    def run_chunk(d_matrix, inputs):
        hidden_SRCD, targets_SRC, *arguments_SRC = inputs
        chunk_cotangents = token_cotangents and (lambda log_z: token_cotangents(log_z, *arguments_SRC))
        losses, d_logits = _chunk_losses(hidden_SRCD, matrix, targets_SRC, chunk_cotangents, config)
        if d_logits is None:
            return d_matrix, (losses, None)
        d_hidden = jnp.einsum("SRCV,DV->SRCD", d_logits, matrix)
        if not needs_matrix:
            return None, (losses, d_hidden)
        if chunks == 1:
            return jnp.einsum("SRCD,SRCV->DV", hidden_SRCD, d_logits, preferred_element_type=wide), (losses, d_hidden)
        d_matrix += jnp.einsum("SRCD,SRCV->SDV", hidden_SRCD, d_logits, preferred_element_type=wide)
        return config.constrain(d_matrix, ("batch", None, "vocab")), (losses, d_hidden)

    inputs = tuple(to_chunks(x) for x in (hidden_BTD, targets_BT, *(x.astype(wide) for x in arguments)))
    if chunks == 1:
        d_matrix, outputs = run_chunk(None, jax.tree.map(lambda x: x[0], inputs))
        outputs = jax.tree.map(lambda x: x[None], outputs)
    else:
        sums = with_gradient and needs_matrix
        zeros = jnp.zeros((S, D, matrix.shape[1]), wide) if sums else None
        zeros = config.constrain(zeros, ("batch", None, "vocab")) if sums else None
        d_matrix, outputs = jax.lax.scan(run_chunk, zeros, inputs)
        d_matrix = jnp.sum(d_matrix, axis=0) if sums else None
    losses, d_hidden = jax.tree.map(from_chunks, outputs)
    if not with_gradient:
        return losses, None
    if needs_matrix:
        d_matrix = config.constrain(d_matrix, ("embed", "vocab")).astype(matrix_DV.dtype)
    return losses, (config.constrain(d_hidden, ("batch", "length", None)), d_matrix)


def _chunk_losses(hidden, matrix, targets, token_cotangents, config: CrossEntropy):
    logits = config.constrain(compute_logits(hidden, matrix, config.scale, config.cap), ("batch", None, None, "vocab"))
    losses, d_logits = _losses(logits, targets, token_cotangents, config)
    if d_logits is not None and config.cap is not None:
        d_logits *= 1.0 - jnp.square(logits / config.cap)  # derivative of tanh
    return losses, None if d_logits is None else d_logits.astype(hidden.dtype)


def _losses(logits, targets, token_cotangents, config: CrossEntropy):
    """Returns token losses, and the gradient of the logits before `scale` or None.

    With softmax p and smoothed target distribution q, d(loss)/d(logits) = p - q and d(log Z)/d(logits) = p.
    `token_cotangents(log Z)` returns the weights of p and q for each token.
    """
    vocab_size = logits.shape[-1]
    low = config.label_smoothing / max(vocab_size - 1, 1)
    high = 1.0 - config.label_smoothing
    entropy = -(high * jnp.log(high) + config.label_smoothing * jnp.log(low + 1e-20)) if low else 0.0

    largest = jnp.max(logits, axis=-1)
    powers = jnp.exp(logits - largest[..., None])
    Z = jnp.sum(powers, axis=-1)
    log_z = largest + jnp.log(Z)
    # Comparison and sum instead of a gather: they stay local when the vocabulary is sharded.
    is_target = targets[..., None] == jnp.expand_dims(jnp.arange(vocab_size), range(targets.ndim))
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    expected = target_logit
    if low:
        expected = high * target_logit + low * (jnp.sum(logits, axis=-1) - target_logit)
    losses = TokenLosses(log_z - expected - entropy, log_z, (target_logit >= largest).astype(logits.dtype))
    if token_cotangents is None:
        return losses, None
    d_softmax, d_target = token_cotangents(log_z)
    target_term = jnp.where(is_target, high, low) * (d_target * config.scale)[..., None]
    return losses, powers * (d_softmax / Z * config.scale)[..., None] - target_term
