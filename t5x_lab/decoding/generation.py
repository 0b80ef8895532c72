"""Generation with continuous batching: a row starts the next prompt as soon as its sequence is finished.

The functions work with any decoding step `(state, tokens) -> (logits, state)`.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lab.decoding.rows import put_rows
from t5x_lab.decoding.sampling import EndIds, SamplingConfig, apply_logits_fn, choose, is_end

Integer = jax.Array | int
Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences being generated, one in each of B rows, with at most T tokens and V ids.

    Attributes:
      state: decoding state of the model.
      logits: logits of each row's next token, float32 [B, V].
      tokens, log_probs: generated tokens, EOS included, and their log-probabilities, int32 and float32 [B, T], padded with 0.
      length: number of generated tokens, int32 [B].
      limit: maximum number of tokens of each row, int32 [B], at most T. 0 for a row without a sequence.
      stream: number of each sequence's random stream, int32 [B]. Samples depend on the seed, the stream and the length only,
        not on other rows.
      ended: the sequence has EOS or was stopped, bool [B].
    """

    state: Any
    logits: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    length: jax.Array
    limit: jax.Array
    stream: jax.Array
    ended: jax.Array

    @property
    def done(self) -> jax.Array:
        return self.ended | (self.length >= self.limit)

    def put(self, rows: jax.Array, other: "Sequences") -> "Sequences":
        """Replaces these rows by those of `other`. Row numbers out of range are ignored."""
        return put_rows(self, rows, other)


def start(logits: jax.Array, state: Any, limit: jax.Array, stream: jax.Array, max_tokens: int) -> Sequences:
    """Returns empty sequences after a prefill, with capacity for `max_tokens` tokens."""
    batch = logits.shape[0]
    tokens, log_probs = jnp.zeros((batch, max_tokens), jnp.int32), jnp.zeros((batch, max_tokens), jnp.float32)
    length, ended = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
    return Sequences(state, logits.astype(jnp.float32), tokens, log_probs, length, limit, stream, ended)


def generate(
    step: Step,
    sequences: Sequences,
    *,
    config: SamplingConfig,
    eos_id: EndIds,
    seed: Integer,
    max_steps: Integer,
    until: Integer,
) -> Sequences:
    """Runs decoding steps until `until` rows are done, at most `max_steps`.

    Args:
      step: function (state, tokens int [B]) -> (next logits [B, V], state).
      sequences: sequences to continue.
      config: sampling settings.
      eos_id: EOS id, or several.
      seed: seed of the random streams.
      max_steps: maximum number of steps.
      until: number of finished rows to stop at.
    """
    rows, beyond = jnp.arange(sequences.tokens.shape[0]), sequences.tokens.shape[1]
    keys = jax.vmap(lambda stream: jax.random.fold_in(jax.random.key(seed), stream))(sequences.stream)

    def should_continue(carry) -> jax.Array:
        i, sequences = carry
        return (i < max_steps) & (jnp.sum(sequences.done) < until)

    def add_token(carry):
        i, s = carry
        next_logits = apply_logits_fn(s.logits, config.logits_fn)
        token, log_prob = choose(next_logits, config, jax.vmap(jax.random.fold_in)(keys, s.length))
        place = (rows, jnp.where(s.done, beyond, s.length))  # writes of finished rows are out of range and dropped
        logits, state = step(s.state, token)
        return i + 1, dataclasses.replace(
            s,
            state=state,
            logits=logits.astype(jnp.float32),
            tokens=s.tokens.at[place].set(token, mode="drop"),
            log_probs=s.log_probs.at[place].set(log_prob, mode="drop"),
            length=s.length + ~s.done,
            ended=s.ended | (~s.done & is_end(token, eos_id)),
        )

    return jax.lax.while_loop(should_continue, add_token, (jnp.int32(0), sequences))[1]


def force_tokens(step: Step, logits: jax.Array, state: Any, tokens: Sequence[int]) -> tuple[jax.Array, Any]:
    """Runs `step` on given tokens for every row. Returns the next logits [B, V] and the state."""
    for token in tokens:
        logits, state = step(state, jnp.full(logits.shape[:1], token, jnp.int32))
    return logits, state


def complete(
    model, params: Any, prompts: jax.Array, seed: Integer, max_tokens: int, config: SamplingConfig, eos_id: EndIds
) -> tuple[jax.Array, jax.Array]:
    """Completes a batch of prompts, int [B, P].

    Returns:
      Tokens int [B, max_tokens], 0 after EOS, and their log-probabilities, float32.
    """
    batch = prompts.shape[0]
    logits, state = model.prefill(params, prompts, max_tokens)
    sequences = start(logits, state, jnp.full((batch,), max_tokens, jnp.int32), jnp.arange(batch), max_tokens)
    step = model.decode_step(params)
    sequences = generate(step, sequences, config=config, eos_id=eos_id, seed=seed, max_steps=max_tokens, until=batch)
    return sequences.tokens, sequences.log_probs


class Programs(Protocol):
    """Device functions of `complete_all`. Prompts are lists of token ids without padding."""

    def start(self, prompts: list[list[int]], limits: list[int], streams: list[int]) -> Sequences:
        """Starts these prompts in the first rows. The other rows are done."""
        ...

    def refill(
        self, sequences: Sequences, rows: list[int], prompts: list[list[int]], limits: list[int], streams: list[int]
    ) -> Sequences:
        """Starts other prompts in these rows."""
        ...

    def generate(self, sequences: Sequences, stopped: np.ndarray, max_steps: int, until: int) -> tuple[Sequences, "Generated"]:
        """Ends rows where `stopped`, bool [B], is true, and runs `generate`."""
        ...


class Generated(NamedTuple):
    """The fields of `Sequences` that the host reads."""

    tokens: Any
    log_probs: Any
    length: Any
    done: Any


STEPS_BETWEEN_STOP_CHECKS = 16


def complete_all(
    programs: Programs,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    streams: Sequence[int],
    *,
    rows: int,
    group: int,
    is_stopped: Callable[[int, np.ndarray], bool] | None = None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Completes any number of prompts in `rows` rows, longest prompts first, so that a prefill has little padding.

    Args:
      programs: device functions.
      prompts: token ids of each prompt.
      limits, streams: see `Sequences`.
      rows: number of sequences generated at a time.
      group: number of rows refilled at a time, because a prefill of single prompts is slow.
      is_stopped: function (index of the prompt, tokens so far) -> whether to stop, called every `STEPS_BETWEEN_STOP_CHECKS`
        steps.

    Yields:
      (index of the prompt, tokens, log-probabilities) in the order in which they finish.
    """
    waiting = collections.deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    take = lambda n: [waiting.popleft() for _ in range(min(n, len(waiting)))]
    select = lambda numbers: [[x[i] for i in numbers] for x in (prompts, limits, streams)]
    in_row: list[int | None] = [*take(rows)]  # index of each row's prompt
    sequences, stopped = programs.start(*select(in_row)), np.zeros((rows,), bool)
    in_row += [None] * (rows - len(in_row))
    max_steps = STEPS_BETWEEN_STOP_CHECKS if is_stopped else max(limits, default=0)
    while any(number is not None for number in in_row):
        until = rows - sum(number is not None for number in in_row) + group if waiting else rows
        sequences, now = programs.generate(sequences, stopped, max_steps, min(until, rows))
        for row, number in enumerate(in_row):
            if number is None:
                continue
            tokens, log_probs = (x[row, : now.length[row]] for x in (now.tokens, now.log_probs))
            stopped[row] = is_stopped is not None and is_stopped(number, tokens)
            if now.done[row] or stopped[row]:
                yield number, tokens, log_probs
                in_row[row] = None
        free = [row for row, number in enumerate(in_row) if number is None]
        while waiting and len(free) >= group:
            numbers, refilled, free = take(group), free[:group], free[group:]
            sequences = programs.refill(sequences, refilled[: len(numbers)], *select(numbers))
            for row, number in zip(refilled, numbers, strict=False):
                in_row[row], stopped[row] = number, False
