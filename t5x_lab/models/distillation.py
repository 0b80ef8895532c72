"""Knowledge distillation (Hinton et al. 2015): a teacher's logits as features of a batch, and the loss of a student on them.

Axis letters: B batch, S encoder length, T decoder length, L = S + T, D embed, V vocab, K logits of the teacher.
"""

import dataclasses
from typing import Any

import gin
import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.models.loss import target_tokens
from t5x_lab.networks.network import Batch, segments_of, wide_logits

LOGITS, IDS = "teacher_logits", "teacher_ids"  # features, float32 and int [B, T, K]; without IDS, K is the vocabulary
_CHUNK = 64  # positions whose logits of the whole vocabulary exist at a time
_PADDING = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model whose predictions a student learns, with `distillation` in `ModelConfig.losses`. Its vocabulary is the student's.

    A decoder reads the inputs and targets of an example as one text.

    Attributes:
      path: run, checkpoint or Hugging Face directory. Its forward pass is sharded like the student's.
      top: number of its largest logits that count. None = all.
    """

    path: str
    top: int | None = None

    def __post_init__(self):
        check_types(self)
        check_positive(self, "top")


@gin.configurable(module="t5x_lab")
def distillation(network: Any, hidden: jax.Array, batch: Batch, weights: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Returns the sum of Kullback-Leibler divergences of the student's from the teacher's distributions. See `Loss`.

    Both are softmaxes of logits / temperature, the teacher's over its logits that count, and the sum is multiplied by
    temperature**2, so that gradients do not depend on it (Hinton et al. 2015, section 2). It is 0 for batches without a
    teacher's logits, as in evaluations.

    Args:
      network, hidden, batch, weights: see `Loss`.
      temperature: temperature of both distributions.
    """
    if LOGITS not in batch:
        return jnp.zeros((), jnp.float32)

    @jax.checkpoint
    def divergences(hidden: jax.Array, logits: jax.Array, ids: jax.Array | None) -> jax.Array:
        log_q = jax.nn.log_softmax(network.logits(hidden).astype(jnp.float32) / temperature)
        log_q = log_q if ids is None else jnp.take_along_axis(log_q, ids, axis=-1)
        log_p = jax.nn.log_softmax(logits / temperature)
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    losses = _in_chunks(divergences, hidden, batch[LOGITS], batch.get(IDS))
    return temperature**2 * jnp.sum(losses * weights)


def teacher_features(teacher: Any, has_encoder: bool, batch: Batch, top: int | None, start: int = 0) -> dict[str, jax.Array]:
    """Returns the teacher's logits for each target of a batch.

    Args:
      teacher: module of the teacher.
      has_encoder: whether it has an encoder and reads the batch as it is.
      batch: batch of the student.
      top: number of logits, see `Teacher`.
      start: id that a decoder reads before a text.
    """
    if has_encoder:
        hidden_BTD = teacher(batch)
    else:
        text, places_BT = as_one_text(batch, start)
        hidden_BTD = jnp.take_along_axis(teacher(text), places_BT[..., None], axis=1)

    def logits_of(hidden: jax.Array) -> tuple[jax.Array, ...]:
        logits = wide_logits(teacher, hidden)
        return (logits,) if top is None else tuple(jax.lax.top_k(logits, top))

    return dict(zip((LOGITS, IDS), _in_chunks(logits_of, hidden_BTD)))


def as_one_text(batch: Batch, start: int = 0) -> tuple[Batch, jax.Array]:
    """Returns the batch in which a decoder reads the inputs and targets of each example as one text.

    Args:
      batch: a batch, packed or not. That of a decoder has this form.
      start: id before each text.

    Returns:
      Features of a decoder [B, L], and the place of each target in them, int [B, T].
    """
    targets_BT = target_tokens(batch)
    if "encoder_input_tokens" not in batch:
        return batch, jnp.broadcast_to(jnp.arange(targets_BT.shape[1])[None], targets_BT.shape)
    sides = [
        (batch[f"{side}_tokens"], segments_of(batch, f"{segments}_segment_ids", f"{side}_tokens"))
        for side, segments in (("encoder_input", "encoder"), ("decoder_target", "decoder"))
    ]
    tokens_BL = jnp.concatenate([tokens for tokens, _ in sides], axis=1)
    segments_BL = jnp.concatenate([jnp.asarray(segments) for _, segments in sides], axis=1)
    # Texts in the order of their segments, inputs before targets, padding last.
    side_BL = jnp.concatenate([jnp.full_like(tokens, i) for i, (tokens, _) in enumerate(sides)], axis=1)
    order_BL = jnp.argsort(jnp.where(segments_BL > 0, 2 * segments_BL + side_BL, _PADDING), axis=1, stable=True)
    tokens_BL, segments_BL = (jnp.take_along_axis(x, order_BL, axis=1) for x in (tokens_BL, segments_BL))
    shifted = lambda x, first: jnp.pad(x, ((0, 0), (1, 0)), constant_values=first)[:, :-1]
    is_first_BL = segments_BL != shifted(segments_BL, -1)
    index_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1])[None], tokens_BL.shape)
    text = {
        "decoder_input_tokens": jnp.where(is_first_BL, start, shifted(tokens_BL, start)),
        "decoder_target_tokens": tokens_BL,
        "decoder_segment_ids": segments_BL,
        "decoder_positions": index_BL - jax.lax.cummax(jnp.where(is_first_BL, index_BL, 0), axis=1),
    }
    return text, jnp.argsort(order_BL, axis=1)[:, -targets_BT.shape[1] :]


def _in_chunks(function: Any, *arrays: jax.Array | None) -> Any:
    """Applies a function to arrays [B, T, ...] in chunks of positions, one after the other."""
    T = next(x.shape[1] for x in arrays if x is not None)
    chunk = min(_CHUNK, T)
    number = -(-T // chunk)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, number * chunk - T), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(x.shape[0], number, chunk, *x.shape[2:]), 1, 0)

    results = jax.lax.map(lambda parts: function(*parts), jax.tree.map(split, arrays))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], number * chunk, *x.shape[3:])[:, :T]
    return jax.tree.map(join, results)
