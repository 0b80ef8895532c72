"""Beam search with T5's brevity penalty, over any step function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.generation import force_tokens
from t5x_lab.decoding.rows import reorder_rows, take_rows
from t5x_lab.decoding.sampling import IMPOSSIBLE, EndIds, LogitsFn, apply_logits_fn, is_end
from t5x_lab.networks.network import has_encoder


@dataclasses.dataclass(frozen=True)
class BeamConfig:
    """Beam size and length penalty.

    Attributes:
      size: K, the number of hypotheses per prompt.
      alpha: exponent of the length penalty. The score of a finished hypothesis of n tokens, EOS included, is the sum of its
        log-probabilities divided by ((5 + n) / 6) ** alpha (Wu et al. 2016, equation 14). T5 uses 0.6. The prompt of a decoder
        is counted in n, as in T5X.
      logits_fn: see `SamplingConfig`.
    """

    size: int = 4
    alpha: float = 0.6
    logits_fn: LogitsFn | None = None

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"beam_size is {self.size}; it must be at least 1.")
        if not self.alpha >= 0:
            raise UserError(f"beam_alpha is {self.alpha}; it must not be negative. 0 turns the length penalty off.")

    def penalty(self, length):
        return ((5.0 + length) / 6.0) ** self.alpha


def make_beam_config(size: int, alpha: float | None, logits_fn: LogitsFn | None = None) -> BeamConfig | None:
    """Returns the configuration for `beam_size` and `beam_alpha`; None, which is sampling, for size 1 without an alpha."""
    if size == 1 and alpha is None:
        return None
    return BeamConfig(size, BeamConfig.alpha if alpha is None else alpha, logits_fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """State of a beam search. Axes: B prompts, K hypotheses, T tokens. Empty slots have the score `IMPOSSIBLE`.

    Attributes:
      written: number of tokens of the live hypotheses, int.
      logits: logits of the live hypotheses' next token, [B, K, V].
      state: decoding state of the model, B * K rows.
      live, live_scores: tokens [B, K, T] and sums of log-probabilities [B, K] of the live hypotheses, best first.
      done, done_scores: tokens [B, K, T] and penalized scores [B, K] of the finished hypotheses, best first.
    """

    written: jax.Array
    logits: jax.Array
    state: Any
    live: jax.Array
    live_scores: jax.Array
    done: jax.Array
    done_scores: jax.Array


def search(
    model,
    params: Any,
    prompts: jax.Array,
    max_tokens: int,
    config: BeamConfig,
    eos_id: EndIds,
    start: int | None = 0,
    padding: int = 0,
    decoder_prefix: tuple[int, ...] = (),
):
    """Runs beam search for prompts int [B, P] with the model's `prefill` and `decode_step`.

    Args:
      model: a `Model`.
      params: its parameters.
      prompts: int [B, P].
      max_tokens: maximum number of generated tokens, EOS included.
      config: beam size and length penalty.
      eos_id: EOS id, or several.
      start: start token before a decoder's prompts; None for prompts that have it.
      padding: padding id.
      decoder_prefix: ids that every hypothesis of an encoder-decoder starts with. They are not returned.

    Returns:
      See `beam_search`.
    """
    logits, state = model.prefill(params, prompts, max_tokens + len(decoder_prefix), start, padding)
    logits, state = force_tokens(model.decode_step(params), logits, state, decoder_prefix)
    # T5X counts the prompt of a decoder without the start token.
    counted = jnp.sum(prompts != padding, axis=1) - (start is None)
    before = jnp.full_like(counted, len(decoder_prefix)) if has_encoder(model.config.network) else counted
    state = take_rows(state, jnp.repeat(jnp.arange(prompts.shape[0]), config.size))
    return beam_search(
        model.decode_step(params),
        logits,
        state,
        reorder_rows,
        max_tokens=max_tokens,
        eos_id=eos_id,
        config=config,
        tokens_before=before,
    )


def beam_search(
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    logits: jax.Array,
    state: Any,
    reorder: Callable[[Any, jax.Array], Any],
    *,
    max_tokens: int,
    eos_id: EndIds,
    config: BeamConfig,
    tokens_before: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the K best hypotheses of each prompt.

    The search ends when no live hypothesis can beat the worst finished one. If fewer than K hypotheses finish within
    `max_tokens`, the best live ones follow, with the score that they would have if they ended there.

    Args:
      step: function (state, tokens int [B * K]) -> (logits [B * K, V], state).
      logits: logits of the first token, [B, V].
      state: state after the prompts, with each row repeated K times.
      reorder: function (state, rows int [B * K]) -> state with these rows. A row is replaced by a row of the same prompt.
      max_tokens: maximum number of generated tokens, EOS included.
      eos_id: EOS id, or several.
      config: beam size and length penalty.
      tokens_before: number of earlier tokens that the length penalty counts, [B]. Default: 0.

    Returns:
      Tokens int [B, K, max_tokens], 0 after EOS, and scores float32 [B, K]; finished hypotheses first, best first.
    """
    (batch, vocab), size = logits.shape, config.size
    before = jnp.zeros((batch,)) if tokens_before is None else tokens_before
    penalty = lambda length: config.penalty(before + length)[:, None]
    max_penalty = penalty(max_tokens)
    # All hypotheses are equal at the start, so only the first one is live.
    first = jnp.where(jnp.arange(size) == 0, 0.0, IMPOSSIBLE)
    beams = _Beams(
        written=jnp.int32(0),
        logits=jnp.broadcast_to(logits[:, None], (batch, size, vocab)),
        state=state,
        live=jnp.zeros((batch, size, max_tokens), jnp.int32),
        live_scores=jnp.broadcast_to(first, (batch, size)).astype(jnp.float32),
        done=jnp.zeros((batch, size, max_tokens), jnp.int32),
        done_scores=jnp.full((batch, size), IMPOSSIBLE, jnp.float32),
    )

    def may_improve(beams: _Beams) -> jax.Array:
        return (beams.written < max_tokens) & jnp.any(beams.live_scores[:, :1] / max_penalty > beams.done_scores[:, -1:])

    def write_one(beams: _Beams) -> _Beams:
        scores = beams.live_scores[..., None] + jax.nn.log_softmax(
            apply_logits_fn(beams.logits.astype(jnp.float32), config.logits_fn)
        )
        # Each hypothesis ends in at most as many candidates as there are end ids, so K live ones remain.
        candidates = min((1 + max(np.size(eos_id), 1)) * size, size * vocab)
        scores, index = jax.lax.top_k(scores.reshape(batch, -1), candidates)
        parent, token = index // vocab, index % vocab
        tokens = jnp.take_along_axis(beams.live, parent[..., None], axis=1).at[:, :, beams.written].set(token)
        ends = is_end(token, eos_id)

        done_scores = jnp.where(ends & (scores > IMPOSSIBLE / 2), scores / penalty(beams.written + 1.0), IMPOSSIBLE)
        done_scores = jnp.concatenate([beams.done_scores, done_scores], axis=1)
        best_scores, best = jax.lax.top_k(done_scores, size)
        done = jnp.take_along_axis(jnp.concatenate([beams.done, tokens], axis=1), best[..., None], axis=1)

        live_scores, live = jax.lax.top_k(jnp.where(ends, IMPOSSIBLE, scores), size)
        pick = lambda x: jnp.take_along_axis(x, live, axis=1)
        rows = (jnp.arange(batch)[:, None] * size + pick(parent)).reshape(-1)
        next_logits, state = step(reorder(beams.state, rows), pick(token).reshape(-1))
        return _Beams(
            written=beams.written + 1,
            logits=next_logits.reshape(batch, size, vocab),
            state=state,
            live=jnp.take_along_axis(tokens, live[..., None], axis=1),
            live_scores=live_scores,
            done=done,
            done_scores=best_scores,
        )

    return _finished_first(jax.lax.while_loop(may_improve, write_one, beams), max_penalty)


def _finished_first(beams: _Beams, max_penalty: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and scores. Live hypotheses, with the penalty `max_penalty` [B, 1], fill the slots after finished ones."""
    is_done = beams.done_scores > IMPOSSIBLE / 2
    place = jnp.maximum(jnp.arange(is_done.shape[1])[None] - jnp.sum(is_done, axis=1, keepdims=True), 0)
    live = jnp.take_along_axis(beams.live, place[..., None], axis=1)
    live_scores = jnp.take_along_axis(beams.live_scores, place, axis=1) / max_penalty
    return jnp.where(is_done[..., None], beams.done, live), jnp.where(is_done, beams.done_scores, live_scores)
