"""Soft prompts (Lester et al. 2021): learned vectors before each input, and nothing else that learns.

They are embeddings of ids that no vocabulary has, which stand before inputs as `SpecialTokens.input_start` has it: in packed
rows, in every architecture, in training and when a model is asked.
"""

import dataclasses
from typing import Any

import gin
import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_types, positive
from t5x_lab.config.errors import UserError

FIRST_ID = 1 << 24  # above every vocabulary's


@gin.configurable(module="t5x_lab")
def soft_prompt_ids(length: int) -> tuple[int, ...]:
    """The ids of a soft prompt, for `SpecialTokens.input_start`.

    Args:
      length: its vectors.
    """
    return tuple(range(FIRST_ID, FIRST_ID + length))


@dataclasses.dataclass(frozen=True)
class SoftPrompt:
    """Embeds the ids of `soft_prompt_ids`.

    Attributes:
      length: vectors; Lester et al. take 100.
      modules: the network's embedding of tokens, see `Addition`.
      range: they begin uniformly within -range and range (section 3.2 of the paper: 0.5).
    """

    length: int = 100
    modules: str = "token_embedder"
    range: float = 0.5

    def __post_init__(self):
        check_types(self)
        positive(self, "length", "range")

    @property
    def ids(self) -> tuple[int, ...]:
        return soft_prompt_ids(self.length)

    def make(self, module: Any, rngs: nnx.Rngs) -> "PromptEmbedding":
        """As `Addition.make`, for a module with an `embedding` of [vocabulary, embed]."""
        table = getattr(module, "embedding", None)
        if table is None or table.get_value().ndim != 2:
            raise UserError("it has no embedding [vocabulary, embed]; name the one of tokens with SoftPrompt.modules.")
        shape = (self.length, table.get_value().shape[1])
        return PromptEmbedding(jax.random.uniform(rngs.params(), shape, minval=-self.range, maxval=self.range))


class PromptEmbedding(nnx.Module):
    """The table of a soft prompt, [P, D]."""

    def __init__(self, table: jax.Array):
        self.embedding = nnx.Param(table, axes=(None, "embed"))

    def __call__(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array:
        """Embeddings [..., D] of tokens [...], its own ones where these are of the prompt."""
        table = self.embedding[...].astype(embedded.dtype)
        number = jnp.clip(tokens - FIRST_ID, 0, len(table) - 1)
        return jnp.where((tokens >= FIRST_ID)[..., None], jnp.take(table, number, axis=0), embedded)
