"""Choosing the next token: greedy, temperature, top-k and top-p."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError

IMPOSSIBLE = -1e10
_ROUNDING = 1e-6  # of sums of probabilities in float32
LogitsFn = Callable[[jax.Array], jax.Array]
EndIds = int | tuple[int, ...]  # an end token, or several of which any ends a text, or none


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen.

    Attributes:
      temperature: 0 = greedy; otherwise logits are divided by it.
      top_k: only the k most probable tokens; 0 = all.
      top_p: only the smallest set of most probable tokens whose mass reaches p, after temperature and top_k
        (Holtzman et al. 2020, nucleus sampling); 1 = all.
      logits_fn: what the model's logits [..., V] are replaced by before all that, or None; keep one function for many calls,
        each new one compiles anew.
      rescale_log_probs: whether the log-probabilities of what is drawn are those after temperature, top_k and top_p, as T5X
        gives them (greedy ones are 0); otherwise they are the model's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logits_fn: LogitsFn | None = None
    rescale_log_probs: bool = False

    def __post_init__(self):
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}; it must not be negative. 0 decodes greedily.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must not be negative. 0 keeps all tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1. 1 keeps all tokens.")


def is_end(token: jax.Array, stop_ids: EndIds) -> jax.Array:
    """Whether tokens, int of any shape, end a text."""
    return jnp.isin(token, jnp.array(stop_ids, jnp.int32))


def replaced(logits: jax.Array, logits_fn: LogitsFn | None) -> jax.Array:
    """What a user's function makes of logits float32 [..., V].

    Raises:
      UserError: when it is not of the same shape.
    """
    if logits_fn is None:
        return logits
    found = logits_fn(logits)
    if getattr(found, "shape", None) != logits.shape:
        raise UserError(f"logits_fn made {found} of logits of shape {logits.shape}; it must keep the shape.")
    return found.astype(logits.dtype)


def choose(logits: jax.Array, config: SamplingConfig, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next token of each row, int32 [B], and its log-probability, float32 [B].

    Args:
      logits: float32 [B, V], of the model.
      config: how it is chosen.
      keys: [B]; each row draws with its own.
    """
    token, rescaled = _drawn(logits, config, keys)
    return token, rescaled if config.rescale_log_probs else _log_prob(logits, token)


def _log_prob(logits: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), index[:, None], axis=-1)[:, 0]


def _drawn(logits: jax.Array, config: SamplingConfig, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens, and their log-probabilities among those that they are drawn from."""
    if config.temperature == 0.0:
        return _first_of_the_largest(logits), jnp.zeros(logits.shape[:1])
    logits = logits / config.temperature
    draw = jax.vmap(jax.random.categorical)
    if not config.top_k and config.top_p == 1.0:
        token = draw(keys, logits).astype(jnp.int32)
        return token, _log_prob(logits, token)
    # The most probable first, of equal ones that with the smaller id, so that ties do not make a set larger.
    ordered, ids = jax.lax.top_k(logits, min(config.top_k or logits.shape[-1], logits.shape[-1]))
    if config.top_p < 1.0:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ordered = jnp.where(mass_before < config.top_p * (1 - _ROUNDING), ordered, IMPOSSIBLE)
    drawn = draw(keys, ordered)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32), _log_prob(ordered, drawn)


def _first_of_the_largest(logits: jax.Array) -> jax.Array:
    """`argmax` as two plain reductions, which a CPU does five times as fast."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, ids[None], ids[-1]), axis=-1)
