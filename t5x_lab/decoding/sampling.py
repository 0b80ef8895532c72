"""Greedy, temperature, top-k and top-p sampling."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError

_NEVER = -1e10


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen.

    Attributes:
      temperature: 0 = greedy; otherwise logits are divided by it.
      top_k: only the k most probable tokens; 0 = all.
      top_p: only the smallest set of most probable tokens whose mass reaches p, after temperature and top_k
        (Holtzman et al. 2020, nucleus sampling); 1 = all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}; it must not be negative. 0 decodes greedily.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must not be negative. 0 keeps all tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1. 1 keeps all tokens.")


def generate(
    model, params: Any, prompts: jax.Array, seed: jax.Array | int, max_tokens: int, config: SamplingConfig, eos_id: int
) -> tuple[jax.Array, jax.Array]:
    """Reads prompts int [B, P] with the model's `prefill` and writes on with its `step`; returns what `sample` does."""
    logits, state = model.prefill(params, prompts, max_tokens)
    step = lambda state, token: model.step(params, state, token)
    return sample(step, logits, state, max_tokens=max_tokens, eos_id=eos_id, config=config, key=jax.random.key(seed))


def sample(
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    logits: jax.Array,
    state: Any,
    *,
    max_tokens: int,
    eos_id: int,
    config: SamplingConfig,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Generates until every row has written `eos_id` or `max_tokens` tokens.

    Args:
      step: (state, tokens int [B]) -> (logits of the next token [B, V], state).
      logits: of the first token, [B, V].
      state: what `step` threads, after the prompt.
      max_tokens: most tokens to write, the end token included.
      eos_id: the end token.
      config: how to choose.
      key: a random key; not used when greedy.

    Returns:
      (tokens int [B, max_tokens], 0 after the end token; log-probability of each under the unmodified model, float32)
    """
    batch = logits.shape[0]

    def unfinished(carry):
        written, _, _, done, _, _ = carry
        return (written < max_tokens) & ~jnp.all(done)

    def write_one(carry):
        i, logits, state, done, tokens, log_probs = carry
        token = choose(logits, config, jax.random.fold_in(key, i))
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        tokens = tokens.at[:, i].set(jnp.where(done, 0, token))
        log_probs = log_probs.at[:, i].set(jnp.where(done, 0.0, log_prob))
        done |= token == eos_id
        logits, state = step(state, token)
        return i + 1, logits, state, done, tokens, log_probs

    empty = (jnp.zeros((batch, max_tokens), jnp.int32), jnp.zeros((batch, max_tokens), jnp.float32))
    carry = (jnp.int32(0), logits, state, jnp.zeros((batch,), bool), *empty)
    return jax.lax.while_loop(unfinished, write_one, carry)[-2:]


def choose(logits: jax.Array, config: SamplingConfig, key: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B], from logits [B, V]."""
    if config.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / config.temperature
    if config.top_k:
        smallest_kept = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest_kept, _NEVER, logits)
    if config.top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        probabilities = jax.nn.softmax(ordered, axis=-1)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        smallest_kept = jnp.min(jnp.where(mass_before < config.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest_kept, _NEVER, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
