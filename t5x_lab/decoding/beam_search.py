"""Beam search with T5's brevity penalty, over any step function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.generation import forced
from t5x_lab.decoding.rows import reorder_rows, take_rows
from t5x_lab.decoding.sampling import IMPOSSIBLE, EndIds, LogitsFn, is_end, replaced
from t5x_lab.networks.network import has_encoder


@dataclasses.dataclass(frozen=True)
class BeamConfig:
    """How many hypotheses are kept, and how their scores forgive length.

    Attributes:
      size: hypotheses that are kept at each step.
      alpha: a finished hypothesis of n tokens, the end token included, scores the sum of its log-probabilities divided by
        ((5 + n) / 6) ** alpha (Wu et al. 2016, equation 14); T5 uses 0.6. A decoder's prompt counts, as in T5X.
      logits_fn: see `SamplingConfig`.
    """

    size: int = 4
    alpha: float = 0.6
    logits_fn: LogitsFn | None = None

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"beam_size is {self.size}; it must be at least 1.")
        if not self.alpha >= 0:
            raise UserError(f"beam_alpha is {self.alpha}; it must not be negative. 0 forgives nothing.")

    def penalty(self, length):
        return ((5.0 + length) / 6.0) ** self.alpha


def beams_of(size: int, alpha: float | None, logits_fn: LogitsFn | None = None) -> BeamConfig | None:
    """What `beam_size` and `beam_alpha` ask for: one hypothesis without an alpha is no beam search."""
    if size == 1 and alpha is None:
        return None
    return BeamConfig(size, BeamConfig.alpha if alpha is None else alpha, logits_fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Beams:
    """Axes: B prompts, K hypotheses of each, T tokens. Slots that hold nothing yet score `IMPOSSIBLE`.

    Attributes:
      written: int, tokens written by the hypotheses that go on.
      logits: of their next token, [B, K, V].
      state: the model's, of B * K rows.
      live, live_scores: [B, K, T] and [B, K], sums of log-probabilities, best first.
      done, done_scores: finished ones, and their scores with the penalty, best first.
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
    beginning: tuple[int, ...] = (),
):
    """Beam search after prompts int [B, P], with the model's `prefill` and `decode_step`; returns what `beam_search` does.

    `beginning` are tokens that all hypotheses of a decoder behind an encoder begin with; they are not among those returned.
    """
    logits, state = model.prefill(params, prompts, max_tokens + len(beginning), start, padding)
    logits, state = forced(model.decode_step(params), logits, state, beginning)
    # T5X counts a decoder's prompt without its start token.
    counted = jnp.sum(prompts != padding, axis=1) - (start is None)
    before = jnp.full_like(counted, len(beginning)) if has_encoder(model.config.network) else counted
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
    """The best hypotheses of each prompt.

    It ends when no hypothesis that goes on can still beat the worst finished one. Where fewer than K have finished after
    `max_tokens`, the best unfinished ones follow them, scored as if they had.

    Args:
      step: (state, tokens int [B * K]) -> (logits [B * K, V], state).
      logits: of the first token, [B, V].
      state: after the prompts, each row K times, next to each other.
      reorder: (state, rows int [B * K]) -> the state of these rows, each from the same prompt as the one it replaces.
      max_tokens: most tokens to write, the end token included.
      eos_id: the end token, or several.
      config: how many, and the penalty.
      tokens_before: [B], of the sequence that a hypothesis continues, which its length counts; None = none.

    Returns:
      (tokens int [B, K, max_tokens], 0 after the end token; scores float32 [B, K]), finished ones first, best first
    """
    (batch, vocab), size = logits.shape, config.size
    before = jnp.zeros((batch,)) if tokens_before is None else tokens_before
    penalty = lambda length: config.penalty(before + length)[:, None]
    most = penalty(max_tokens)
    # All hypotheses begin alike: only the first one counts.
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
        return (beams.written < max_tokens) & jnp.any(beams.live_scores[:, :1] / most > beams.done_scores[:, -1:])

    def write_one(beams: _Beams) -> _Beams:
        scores = beams.live_scores[..., None] + jax.nn.log_softmax(replaced(beams.logits.astype(jnp.float32), config.logits_fn))
        # Of 2K candidates at most K end here, so that K go on.
        candidates = min(2 * size, size * vocab)
        scores, index = jax.lax.top_k(scores.reshape(batch, -1), candidates)
        parent, token = index // vocab, index % vocab
        tokens = jnp.take_along_axis(beams.live, parent[..., None], axis=1).at[:, :, beams.written].set(token)
        ends = is_end(token, eos_id)

        done_scores = jnp.where(ends & (scores > IMPOSSIBLE / 2), scores / penalty(beams.written + 1.0), IMPOSSIBLE)
        done_scores = jnp.concatenate([beams.done_scores, done_scores], axis=1)
        best, kept = jax.lax.top_k(done_scores, size)
        done = jnp.take_along_axis(jnp.concatenate([beams.done, tokens], axis=1), kept[..., None], axis=1)

        live_scores, going_on = jax.lax.top_k(jnp.where(ends, IMPOSSIBLE, scores), size)
        pick = lambda x: jnp.take_along_axis(x, going_on, axis=1)
        rows = (jnp.arange(batch)[:, None] * size + pick(parent)).reshape(-1)
        next_logits, state = step(reorder(beams.state, rows), pick(token).reshape(-1))
        return _Beams(
            written=beams.written + 1,
            logits=next_logits.reshape(batch, size, vocab),
            state=state,
            live=jnp.take_along_axis(tokens, going_on[..., None], axis=1),
            live_scores=live_scores,
            done=done,
            done_scores=best,
        )

    return _finished_first(jax.lax.while_loop(may_improve, write_one, beams), most)


def _finished_first(beams: _Beams, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens and scores; unfinished hypotheses, whose penalty is `most` [B, 1], take the places that no finished one has."""
    is_done = beams.done_scores > IMPOSSIBLE / 2
    place = jnp.maximum(jnp.arange(is_done.shape[1])[None] - jnp.sum(is_done, axis=1, keepdims=True), 0)
    live = jnp.take_along_axis(beams.live, place[..., None], axis=1)
    live_scores = jnp.take_along_axis(beams.live_scores, place, axis=1) / most
    return jnp.where(is_done[..., None], beams.done, live), jnp.where(is_done, beams.done_scores, live_scores)
