"""Sampling of the next token: greedy, temperature, top-k and top-p."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError

IMPOSSIBLE = -1e10
_ROUNDING = 1e-6  # rounding error of sums of probabilities in float32
LogitsFn = Callable[[jax.Array], jax.Array]
EndIds = int | tuple[int, ...]  # EOS ids; any of several ends a sequence


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings.

    Attributes:
      temperature: divisor of the logits. 0 = greedy decoding.
      top_k: sample from the k most likely tokens. 0 = all.
      top_p: sample from the smallest set of most likely tokens with probability at least p, after temperature and top_k
        (nucleus sampling, Holtzman et al. 2020). 1 = all.
      logits_fn: function that replaces the model's logits [..., V] first, or None. Each new function object is compiled again.
      rescale_log_probs: return log-probabilities after temperature, top_k and top_p, as T5X does (0 for greedy decoding),
        instead of the model's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logits_fn: LogitsFn | None = None
    rescale_log_probs: bool = False

    def __post_init__(self):
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}. It must not be negative. 0 is greedy decoding.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}. It must not be negative. 0 keeps all tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}. It must be above 0 and at most 1. 1 keeps all tokens.")


def is_end(token: jax.Array, stop_ids: EndIds) -> jax.Array:
    """Returns whether tokens, int of any shape, are EOS ids."""
    return jnp.isin(token, jnp.array(stop_ids, jnp.int32))


def apply_logits_fn(logits: jax.Array, logits_fn: LogitsFn | None) -> jax.Array:
    """Applies a user's function to logits, float32 [..., V].

    Raises:
      UserError: if it changes the shape.
    """
    if logits_fn is None:
        return logits
    result = logits_fn(logits)
    if getattr(result, "shape", None) != logits.shape:
        raise UserError(f"logits_fn returned {result} for logits of shape {logits.shape}. It must keep the shape.")
    return result.astype(logits.dtype)


def choose(logits: jax.Array, config: SamplingConfig, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the next token of each row, int32 [B], and its log-probability, float32 [B].

    Args:
      logits: logits of the model, float32 [B, V].
      config: sampling settings.
      keys: random key of each row, [B].
    """
    token, rescaled = _sample(logits, config, keys)
    return token, rescaled if config.rescale_log_probs else _log_prob(logits, token)


def _log_prob(logits: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), index[:, None], axis=-1)[:, 0]


def _sample(logits: jax.Array, config: SamplingConfig, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and their log-probabilities in the distribution that they are sampled from."""
    if config.temperature == 0.0:
        return _argmax(logits), jnp.zeros(logits.shape[:1])
    logits = logits / config.temperature
    sample = jax.vmap(jax.random.categorical)
    if not config.top_k and config.top_p == 1.0:
        token = sample(keys, logits).astype(jnp.int32)
        return token, _log_prob(logits, token)
    # Most likely tokens first; equal ones by id, so that ties do not enlarge the set.
    ordered, ids = jax.lax.top_k(logits, min(config.top_k or logits.shape[-1], logits.shape[-1]))
    if config.top_p < 1.0:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ordered = jnp.where(mass_before < config.top_p * (1 - _ROUNDING), ordered, IMPOSSIBLE)
    index = sample(keys, ordered)
    return jnp.take_along_axis(ids, index[:, None], axis=-1)[:, 0].astype(jnp.int32), _log_prob(ordered, index)


def _argmax(logits: jax.Array) -> jax.Array:
    """`jnp.argmax` as two reductions, which is five times as fast on a CPU."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, ids[None], ids[-1]), axis=-1)
