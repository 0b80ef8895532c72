"""Writing texts token by token, in rows that take up a new text as soon as theirs is finished.

Everything here works over any `step(state, token) -> (logits, state)`; a state knows how to `put` other rows into itself.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lab.decoding.sampling import SamplingConfig, choose

Integer = jax.Array | int
Step = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Texts being written, one in each row. B rows, at most T tokens, V ids.

    Attributes:
      state: the model's, which `step` threads.
      logits: of each row's next token, float32 [B, V].
      tokens, log_probs: what is written, int32 and float32 [B, T], 0 beyond it. The end token counts; log-probabilities are
        those of the unmodified model.
      written: their number, int32 [B].
      limit: most tokens of each row's text, int32 [B], up to T; 0 where the row has none.
      stream: int32 [B], the number of each text. What is drawn for it depends on the seed, on this and on the tokens written,
        so not on the texts beside it.
      ended: bool [B], has written the end token, or was stopped.
    """

    state: Any
    logits: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    written: jax.Array
    limit: jax.Array
    stream: jax.Array
    ended: jax.Array

    @property
    def done(self) -> jax.Array:
        return self.ended | (self.written >= self.limit)

    def put(self, rows: jax.Array, fresh: "Slots") -> "Slots":
        """These rows replaced by those of `fresh`; a row number of B or more replaces nothing."""
        put = lambda old, new: old.at[rows].set(new, mode="drop")
        without_state = (dataclasses.replace(slots, state=None) for slots in (self, fresh))
        return dataclasses.replace(jax.tree.map(put, *without_state), state=self.state.put(rows, fresh.state))


def begin(logits: jax.Array, state: Any, limit: jax.Array, stream: jax.Array, max_tokens: int) -> Slots:
    """Rows with nothing written yet, after their prompts."""
    batch = logits.shape[0]
    tokens, log_probs = jnp.zeros((batch, max_tokens), jnp.int32), jnp.zeros((batch, max_tokens), jnp.float32)
    written, ended = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
    return Slots(state, logits.astype(jnp.float32), tokens, log_probs, written, limit, stream, ended)


def write(
    step: Step, slots: Slots, *, config: SamplingConfig, eos_id: int, seed: Integer, at_most: Integer, until: Integer
) -> Slots:
    """Writes `at_most` tokens into every row that is not done, or fewer: until so many rows are done.

    Args:
      step: (state, tokens int [B]) -> (logits of the next token [B, V], state).
      slots: where to go on.
      config: how to choose.
      eos_id: the end token.
      seed: of everything drawn; not used when greedy.
      at_most, until: integers.
    """
    rows, beyond = jnp.arange(slots.tokens.shape[0]), slots.tokens.shape[1]
    keys = jax.vmap(lambda stream: jax.random.fold_in(jax.random.key(seed), stream))(slots.stream)

    def unfinished(carry) -> jax.Array:
        i, slots = carry
        return (i < at_most) & (jnp.sum(slots.done) < until)

    def write_one(carry):
        i, slots = carry
        token = choose(slots.logits, config, jax.vmap(jax.random.fold_in)(keys, slots.written))
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(slots.logits), token[:, None], axis=-1)[:, 0]
        to = (rows, jnp.where(slots.done, beyond, slots.written))  # a row that is done writes nowhere
        logits, state = step(slots.state, token)
        return i + 1, dataclasses.replace(
            slots,
            state=state,
            logits=logits.astype(jnp.float32),
            tokens=slots.tokens.at[to].set(token, mode="drop"),
            log_probs=slots.log_probs.at[to].set(log_prob, mode="drop"),
            written=slots.written + ~slots.done,
            ended=slots.ended | (~slots.done & (token == eos_id)),
        )

    return jax.lax.while_loop(unfinished, write_one, (jnp.int32(0), slots))[1]


def generate(
    model, params: Any, prompts: jax.Array, seed: Integer, max_tokens: int, config: SamplingConfig, eos_id: int
) -> tuple[jax.Array, jax.Array]:
    """Completes one batch: prompts int [B, P], read with the model's `prefill` and written on with its `stepper`.

    Returns:
      (tokens int [B, max_tokens], 0 after the end token; log-probability of each, float32)
    """
    batch = prompts.shape[0]
    logits, state = model.prefill(params, prompts, max_tokens)
    slots = begin(logits, state, jnp.full((batch,), max_tokens, jnp.int32), jnp.arange(batch), max_tokens)
    slots = write(model.stepper(params), slots, config=config, eos_id=eos_id, seed=seed, at_most=max_tokens, until=batch)
    return slots.tokens, slots.log_probs


class Programs(Protocol):
    """What `write_all` asks of the device. Texts are token ids without padding."""

    def begin(self, prompts: list[list[int]], limits: list[int], streams: list[int]) -> Slots:
        """Rows that hold these texts; those beyond them are done."""
        ...

    def refill(self, slots: Slots, rows: list[int], prompts: list[list[int]], limits: list[int], streams: list[int]) -> Slots:
        """These rows given to new texts."""
        ...

    def write(self, slots: Slots, stopped: np.ndarray, at_most: int, until: int) -> tuple[Slots, "Written"]:
        """See `write`; the rows of `stopped` bool [B] end."""
        ...


class Written(NamedTuple):
    """What the host looks at: the fields of `Slots` of these names."""

    tokens: Any
    log_probs: Any
    written: Any
    done: Any


STOPS_EVERY = 16  # tokens between two looks at whether a text is to be stopped


def write_all(
    programs: Programs,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    streams: Sequence[int],
    *,
    rows: int,
    group: int,
    is_stopped: Callable[[int, np.ndarray], bool] | None = None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Completes any number of prompts in `rows` rows; those with long prompts first, so that neighbours are of equal lengths.

    Args:
      programs: see there.
      prompts, limits, streams: of each text, see `Slots`.
      rows: texts that are written at a time.
      group: rows that are refilled at a time; reading prompts one by one would be slow.
      is_stopped: (number of the text, its tokens so far) -> whether to stop; asked every `STOPS_EVERY` tokens.

    Yields:
      (number of the text, its tokens, their log-probabilities), in the order in which they finish.
    """
    waiting = collections.deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
    take = lambda n: [waiting.popleft() for _ in range(min(n, len(waiting)))]
    of = lambda texts: [[x[i] for i in texts] for x in (prompts, limits, streams)]
    held: list[int | None] = [*take(rows)]
    slots, stopped = programs.begin(*of(held)), np.zeros((rows,), bool)
    held += [None] * (rows - len(held))
    at_most = STOPS_EVERY if is_stopped else max(limits, default=0)
    while any(text is not None for text in held):
        until = rows - sum(text is not None for text in held) + group if waiting else rows
        slots, now = programs.write(slots, stopped, at_most, min(until, rows))
        for row, text in enumerate(held):
            if text is None:
                continue
            tokens, log_probs = (x[row, : now.written[row]] for x in (now.tokens, now.log_probs))
            stopped[row] = is_stopped is not None and is_stopped(text, tokens)
            if now.done[row] or stopped[row]:
                yield text, tokens, log_probs
                held[row] = None
        free = [row for row, text in enumerate(held) if text is None]
        while waiting and len(free) >= group:
            texts, to, free = take(group), free[:group], free[group:]
            slots = programs.refill(slots, to[: len(texts)], *of(texts))
            for row, text in zip(to, texts, strict=False):
                held[row], stopped[row] = text, False
