"""Soft prompts (Lester et al. 2021): trained embedding vectors before each input, with all other parameters frozen.

The vectors are embeddings of ids above the vocabulary. `SpecialTokens.input_start` puts these ids before each input, in packed
rows, in every architecture, in training and in inference.
"""

import dataclasses
from typing import Any

import gin
import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import UserError

FIRST_ID = 1 << 24  # above the ids of any vocabulary


@gin.configurable(module="t5x_lab")
def soft_prompt_ids(length: int) -> tuple[int, ...]:
    """Returns the ids of a soft prompt, for `SpecialTokens.input_start`.

    Args:
      length: number of vectors.
    """
    return tuple(range(FIRST_ID, FIRST_ID + length))


@dataclasses.dataclass(frozen=True)
class SoftPrompt:
    """Soft prompt: embeds the ids of `soft_prompt_ids`.

    Attributes:
      length: P, the number of vectors. Lester et al. use 100.
      modules: regular expression of the token embedding. See `PeftMethod`. If the encoder has a table of its own, both get
        vectors, of which those of the encoder are read.
      range: the vectors are initialized uniformly between -range and range (Lester et al., section 3.2: 0.5).
    """

    length: int = 100
    modules: str = "(encoder_)?token_embedder"
    range: float = 0.5

    def __post_init__(self):
        check_types(self)
        check_positive(self, "length", "range")

    @property
    def ids(self) -> tuple[int, ...]:
        return soft_prompt_ids(self.length)

    def make(self, module: Any, rngs: nnx.Rngs) -> "PromptEmbedding":
        """Makes the embedding of the soft prompt. See `PeftMethod.make`.

        Raises:
          UserError: if the module has no `embedding` [vocabulary, embed].
        """
        table = getattr(module, "embedding", None)
        if table is None or table.get_value().ndim != 2:
            raise UserError("the module has no `embedding` [vocabulary, embed]. Set SoftPrompt.modules to the token embedding.")
        shape = (self.length, table.get_value().shape[1])
        return PromptEmbedding(jax.random.uniform(rngs.params(), shape, minval=-self.range, maxval=self.range))


class PromptEmbedding(nnx.Module):
    """Embedding table of a soft prompt, [P, D]."""

    def __init__(self, table: jax.Array):
        self.embedding = nnx.Param(table, axes=(None, "embed"))

    def __call__(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array:
        """Returns `embedded` [..., D] with the soft prompt's vectors where `tokens` [...] are its ids."""
        table = self.embedding[...].astype(embedded.dtype)
        index = jnp.clip(tokens - FIRST_ID, 0, len(table) - 1)
        return jnp.where((tokens >= FIRST_ID)[..., None], jnp.take(table, index, axis=0), embedded)
