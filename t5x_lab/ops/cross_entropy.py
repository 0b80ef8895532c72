"""Logits, and softmax cross-entropy that never holds all of them.

The logits of T5's 32,128 ids in float32 are the largest array of a training step. Here tokens are processed in chunks: from
the logits of a chunk come its losses and, where a gradient is asked for, at once its part of the objective's gradient. Nothing
of size [B, T, V] outlives a chunk, and no matrix product is done twice. The gradient of single tokens' losses, which training
does not need, computes the chunks once more.

Axis letters: B batch, T length, D embed, V vocab, S shards of the batch, R = B / S rows of each, C columns of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from t5x_lab.ops.capping import capped


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """How a token's loss is computed, and how its arrays lie on devices.

    Attributes:
      z_loss: weight of log(Z)**2 in the objective, where Z is the softmax's sum (T5 code base).
      label_smoothing: s gives the target the probability 1 - s and every other id s / (V - 1); the entropy of that
        distribution is subtracted, so that a perfect model has loss 0 (as in T5X).
      scale: what logits are multiplied by.
      cap: what bounds them then, see `t5x_lab.ops.capping`; None = nothing.
      shards: parts that the batch's rows are split into over devices. Each sums its own gradient of the matrix; they are
        added once, after the last chunk.
      chunk: tokens of each shard, about, that have logits at one time; at least one column of its rows.
      constrain: f(array, logical axes) -> array, as in `Transformer`.
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
    """Per token, float32 [B, T]: cross-entropy, log Z, and 1 where no id is likelier than the target."""

    loss: jax.Array
    log_z: jax.Array
    correct: jax.Array


def logits_of(hidden: jax.Array, matrix_DV: jax.Array, scale: float = 1.0, cap: float | None = None) -> jax.Array:
    """Logits [..., V]: products in the dtype of the hidden states [..., D], summed in float32 (or wider, if they are)."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...D,DV->...V", hidden, matrix_DV.astype(hidden.dtype), preferred_element_type=wide)
    return capped(logits if scale == 1.0 else logits * scale, cap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden_BTD: jax.Array, matrix_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, config: CrossEntropy
) -> tuple[jax.Array, TokenLosses]:
    """The objective, sum of weight * (loss + z_loss * log(Z)**2) over tokens, and what it is made of.

    Args:
      hidden_BTD: what the matrix turns into logits.
      matrix_DV: the output matrix, or the transposed embedding table.
      targets_BT: ids below V.
      weights_BT: float32, of each token in the objective.
      config: see `CrossEntropy`.
    """
    losses, _ = _chunked(hidden_BTD, matrix_DV, targets_BT, None, config)
    return _objective(losses, weights_BT, config), losses


def cross_entropy_of_logits(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, config: CrossEntropy
) -> tuple[jax.Array, TokenLosses]:
    """As `cross_entropy`, of logits that are there as a whole; JAX differentiates it."""
    wide = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    losses, _ = _losses(wide, targets_BT, None, config)
    return _objective(losses, weights_BT, config), losses


def _forward(hidden, matrix, targets, weights, config):
    of_matrix = matrix.perturbed  # a frozen one has no gradient
    hidden, matrix, targets, weights = inputs = tuple(x.value for x in (hidden, matrix, targets, weights))
    of_token = lambda log_z, weights: (weights * (1.0 + 2.0 * config.z_loss * log_z), weights)
    losses, gradient = _chunked(hidden, matrix, targets, (of_token, (weights,)), config, of_matrix)
    return (_objective(losses, weights, config), losses), (inputs, losses, gradient)


def _backward(config, saved, cotangents):
    (hidden, matrix, targets, weights), losses, gradient = saved
    d_objective, d_losses = cotangents
    of_matrix = gradient[1] is not None
    d_hidden, d_weights = jnp.zeros_like(hidden), jnp.zeros_like(weights)
    d_matrix = jnp.zeros_like(matrix) if of_matrix else None
    if not isinstance(d_objective, SymbolicZero):
        d_hidden, d_matrix = jax.tree.map(lambda g: (g * d_objective).astype(g.dtype), gradient)
        d_weights = ((losses.loss + config.z_loss * jnp.square(losses.log_z)) * d_objective).astype(weights.dtype)
    if not (isinstance(d_losses.loss, SymbolicZero) and isinstance(d_losses.log_z, SymbolicZero)):
        given = (jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d for d in (d_losses.loss, d_losses.log_z))
        of_token = lambda log_z, d_loss, d_log_z: (d_loss + d_log_z, d_loss)
        _, more = _chunked(hidden, matrix, targets, (of_token, tuple(given)), config, of_matrix)
        d_hidden, d_matrix = jax.tree.map(jnp.add, (d_hidden, d_matrix), more)
    return d_hidden, d_matrix, None, d_weights


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _objective(losses: TokenLosses, weights_BT: jax.Array, config: CrossEntropy) -> jax.Array:
    return jnp.sum((losses.loss + config.z_loss * jnp.square(losses.log_z)) * weights_BT)


def _chunked(hidden_BTD, matrix_DV, targets_BT, cotangents, config: CrossEntropy, of_matrix: bool = True):
    """(token losses, (gradient of hidden, of matrix) or None). Without `of_matrix` that gradient is None.

    `cotangents` are None for no gradient; or a function and its arguments, each [B, T]: (log Z, arguments) -> what the softmax
    and what the target's distribution are weighted with in d_logits.
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

    of_token, arguments = cotangents or (None, ())
    with_gradient = of_token is not None

    def one_chunk(d_matrix, inputs):
        hidden_SRCD, targets_SRC, *arguments_SRC = inputs
        given = of_token and (lambda log_z: of_token(log_z, *arguments_SRC))
        losses, d_logits = _one_chunk_losses(hidden_SRCD, matrix, targets_SRC, given, config)
        if d_logits is None:
            return d_matrix, (losses, None)
        d_hidden = jnp.einsum("SRCV,DV->SRCD", d_logits, matrix)
        if not of_matrix:
            return None, (losses, d_hidden)
        if chunks == 1:
            return jnp.einsum("SRCD,SRCV->DV", hidden_SRCD, d_logits, preferred_element_type=wide), (losses, d_hidden)
        d_matrix += jnp.einsum("SRCD,SRCV->SDV", hidden_SRCD, d_logits, preferred_element_type=wide)
        return config.constrain(d_matrix, ("batch", None, "vocab")), (losses, d_hidden)

    inputs = tuple(to_chunks(x) for x in (hidden_BTD, targets_BT, *(x.astype(wide) for x in arguments)))
    if chunks == 1:
        d_matrix, outputs = one_chunk(None, jax.tree.map(lambda x: x[0], inputs))
        outputs = jax.tree.map(lambda x: x[None], outputs)
    else:
        sums = with_gradient and of_matrix
        zeros = jnp.zeros((S, D, matrix.shape[1]), wide) if sums else None
        zeros = config.constrain(zeros, ("batch", None, "vocab")) if sums else None
        d_matrix, outputs = jax.lax.scan(one_chunk, zeros, inputs)
        d_matrix = jnp.sum(d_matrix, axis=0) if sums else None
    losses, d_hidden = jax.tree.map(from_chunks, outputs)
    if not with_gradient:
        return losses, None
    if of_matrix:
        d_matrix = config.constrain(d_matrix, ("embed", "vocab")).astype(matrix_DV.dtype)
    return losses, (config.constrain(d_hidden, ("batch", "length", None)), d_matrix)


def _one_chunk_losses(hidden, matrix, targets, of_token, config: CrossEntropy):
    logits = config.constrain(logits_of(hidden, matrix, config.scale, config.cap), ("batch", None, None, "vocab"))
    losses, d_logits = _losses(logits, targets, of_token, config)
    if d_logits is not None and config.cap is not None:
        d_logits *= 1.0 - jnp.square(logits / config.cap)  # the derivative of the hyperbolic tangent
    return losses, None if d_logits is None else d_logits.astype(hidden.dtype)


def _losses(logits, targets, of_token, config: CrossEntropy):
    """(token losses, gradient with respect to the products before `scale`, or None).

    With p the softmax and q the smoothed target, d(loss)/d(logits) = p - q and d(log Z)/d(logits) = p. So `of_token`, called
    with log Z, says what p and q of each token are weighted with.
    """
    vocab_size = logits.shape[-1]
    low = config.label_smoothing / max(vocab_size - 1, 1)
    high = 1.0 - config.label_smoothing
    entropy = -(high * jnp.log(high) + config.label_smoothing * jnp.log(low + 1e-20)) if low else 0.0

    largest = jnp.max(logits, axis=-1)
    powers = jnp.exp(logits - largest[..., None])
    Z = jnp.sum(powers, axis=-1)
    log_z = largest + jnp.log(Z)
    # A comparison and a sum instead of a gather: they stay local when the vocabulary is split over devices.
    is_target = targets[..., None] == jnp.expand_dims(jnp.arange(vocab_size), range(targets.ndim))
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    expected = target_logit
    if low:
        expected = high * target_logit + low * (jnp.sum(logits, axis=-1) - target_logit)
    losses = TokenLosses(log_z - expected - entropy, log_z, (target_logit >= largest).astype(logits.dtype))
    if of_token is None:
        return losses, None
    d_softmax, d_target = of_token(log_z)
    target_term = jnp.where(is_target, high, low) * (d_target * config.scale)[..., None]
    return losses, powers * (d_softmax / Z * config.scale)[..., None] - target_term
