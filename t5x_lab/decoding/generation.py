"""Generation token by token, with continuous batching: a row takes up the next prompt as soon as its sequence is finished.

Everything here works over any decode step `(state, tokens) -> (logits, state)`.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lab.decoding.rows import put_rows
from t5x_lab.decoding.sampling import EndIds, SamplingConfig, choose, is_end, replaced

Integer = jax.Array | int
Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences that are being generated, one in each of B rows; at most T tokens each, V ids.

    Attributes:
      state: the model's decoding state.
      logits: of each row's next token, float32 [B, V].
      tokens, log_probs: generated so far, int32 and float32 [B, T], then 0. The end token is one of them; log-probabilities
        are the model's own, before temperature, top-k and top-p.
      length: how many tokens, int32 [B].
      limit: the most tokens of each row's sequence, int32 [B], up to T; 0 for a row without a sequence.
      stream: int32 [B], the number of each sequence's random stream. What is drawn for it depends on the seed, its stream and
        its length alone, not on the other rows.
      ended: bool [B], whether it has its end token, or was stopped.
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
        """Replaces these rows by those of `other`; a row number beyond the last is skipped."""
        return put_rows(self, rows, other)


def start(logits: jax.Array, state: Any, limit: jax.Array, stream: jax.Array, max_tokens: int) -> Sequences:
    """Sequences of length 0 after a prefill, with room for `max_tokens` tokens."""
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
    """Runs decode steps until `until` rows are done, at most `max_steps`.

    Args:
      step: (state, tokens int [B]) -> (logits of the next token [B, V], state).
      sequences: so far.
      config: how the next token is chosen.
      eos_id: the end token, or several.
      seed: of the random streams; not used when greedy.
      max_steps, until: integers.
    """
    rows, beyond = jnp.arange(sequences.tokens.shape[0]), sequences.tokens.shape[1]
    keys = jax.vmap(lambda stream: jax.random.fold_in(jax.random.key(seed), stream))(sequences.stream)

    def goes_on(carry) -> jax.Array:
        i, sequences = carry
        return (i < max_steps) & (jnp.sum(sequences.done) < until)

    def add_token(carry):
        i, s = carry
        given = replaced(s.logits, config.logits_fn)
        token, log_prob = choose(given, config, jax.vmap(jax.random.fold_in)(keys, s.length))
        place = (rows, jnp.where(s.done, beyond, s.length))  # of a row that is done, beyond the last: dropped
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

    return jax.lax.while_loop(goes_on, add_token, (jnp.int32(0), sequences))[1]


def forced(step: Step, logits: jax.Array, state: Any, tokens: Sequence[int]) -> tuple[jax.Array, Any]:
    """What `step` gives after tokens that every row is made to begin with: logits [B, V] and the state."""
    for token in tokens:
        logits, state = step(state, jnp.full(logits.shape[:1], token, jnp.int32))
    return logits, state


def complete(
    model, params: Any, prompts: jax.Array, seed: Integer, max_tokens: int, config: SamplingConfig, eos_id: EndIds
) -> tuple[jax.Array, jax.Array]:
    """Completes one batch of prompts int [B, P], with the model's `prefill` and `decode_step`.

    Returns:
      (tokens int [B, max_tokens], 0 after the end token; log-probability of each, float32)
    """
    batch = prompts.shape[0]
    logits, state = model.prefill(params, prompts, max_tokens)
    sequences = start(logits, state, jnp.full((batch,), max_tokens, jnp.int32), jnp.arange(batch), max_tokens)
    step = model.decode_step(params)
    sequences = generate(step, sequences, config=config, eos_id=eos_id, seed=seed, max_steps=max_tokens, until=batch)
    return sequences.tokens, sequences.log_probs


class Programs(Protocol):
    """What `complete_all` asks of the device. Prompts are lists of token ids without padding."""

    def start(self, prompts: list[list[int]], limits: list[int], streams: list[int]) -> Sequences:
        """The first rows begin these prompts' completions; the other rows are done."""
        ...

    def refill(
        self, sequences: Sequences, rows: list[int], prompts: list[list[int]], limits: list[int], streams: list[int]
    ) -> Sequences:
        """These rows begin the completions of other prompts."""
        ...

    def generate(self, sequences: Sequences, stopped: np.ndarray, max_steps: int, until: int) -> tuple[Sequences, "Generated"]:
        """Ends the rows where `stopped` bool [B] is true, and runs `generate`."""
        ...


class Generated(NamedTuple):
    """What the host looks at: the fields of `Sequences` of these names."""

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
    """Completes any number of prompts in `rows` rows, the longest prompts first, so that a prefill has little padding.

    Args:
      programs: see there.
      prompts, limits, streams: see `Sequences`.
      rows: sequences that are generated at a time.
      group: rows that are refilled at a time; a prefill of each prompt alone would be slow.
      is_stopped: (number of the prompt, its tokens so far) -> whether to stop; asked every `STEPS_BETWEEN_STOP_CHECKS` steps.

    Yields:
      (number of the prompt, the tokens that complete it, their log-probabilities), in the order in which they are finished
    """
    waiting = collections.deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    take = lambda n: [waiting.popleft() for _ in range(min(n, len(waiting)))]
    select = lambda numbers: [[x[i] for i in numbers] for x in (prompts, limits, streams)]
    in_row: list[int | None] = [*take(rows)]  # the number of each row's prompt
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
