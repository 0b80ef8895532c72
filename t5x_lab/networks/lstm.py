"""LSTM language model: the baseline of Radford et al. (2018), Table 5.

Axis letters: B batch, T length, D embed, U units, V vocab, G the four gates (input, forget, cell, output).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from t5x_lab.config.checks import check_positive, check_types
from t5x_lab.config.errors import check_choice
from t5x_lab.config.macros import macro
from t5x_lab.networks.config import DTYPES, check_dropout
from t5x_lab.networks.flops import lstm_flops
from t5x_lab.networks.layers import Embedding, Projection, output_matrix, truncated_normal
from t5x_lab.networks.network import Batch, Constrain, segments_of
from t5x_lab.ops.cross_entropy import compute_logits
from t5x_lab.ops.dropout import dropout


@dataclasses.dataclass(frozen=True)
class LstmConfig:
    """One LSTM layer as a causal decoder: "LSTM (1 layer, 2048 units)" in Radford et al. (2018), Table 5.

    The paper does not specify an embedding size or an output layer. Here states are projected to the embedding size, so that
    logits can be tied as in its transformer.

    Attributes:
      vocab_size: V.
      emb_dim: D, the embedding size.
      hidden_dim: U, the number of units.
      logits_via_embedding, dropout_rate, dtype: see `TransformerConfig`. The cell state is float32.
    """

    vocab_size: int
    emb_dim: int
    hidden_dim: int
    logits_via_embedding: bool = True
    dropout_rate: float = dataclasses.field(default=0.0, metadata=macro("DROPOUT_RATE"))
    dtype: str = "bfloat16"

    architecture = "causal_decoder"

    def __post_init__(self):
        check_types(self)
        check_positive(self, "vocab_size", "emb_dim", "hidden_dim")
        check_choice("LstmConfig.dtype", self.dtype, DTYPES)
        check_dropout(self.dropout_rate)

    def flops(self, encoder_length: int, decoder_length: int) -> int:
        """Returns the FLOPs of one sequence. See `Network.flops`."""
        del encoder_length
        return lstm_flops(self, decoder_length)

    def make(self, rngs: nnx.Rngs, constrain: Constrain) -> "Lstm":
        return Lstm(self, constrain=constrain, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CellState:
    """Decoding state of an LSTM: cell and output of each row, float32 [B, U]."""

    cell: jax.Array
    output: jax.Array


class Lstm(nnx.Module):
    """One LSTM layer (Hochreiter & Schmidhuber 1997) with forget gates, whose bias is initialized to 1.

    Args:
      config: sizes.
      constrain, rngs: see `Transformer`.
    """

    def __init__(self, config: LstmConfig, *, constrain: Callable = lambda x, axes: x, rngs: nnx.Rngs):
        c = config
        self.config, self.constrain = c, constrain
        self.token_embedder = Embedding(c.vocab_size, c.emb_dim, constrain, rngs=rngs)
        kernel = truncated_normal(rngs.params(), (c.emb_dim, 4, c.hidden_dim), "t5", c.emb_dim)
        self.inputs = Projection(kernel, ("embed", "gates", "units"), "BTD,DGU->BTGU", ("gates", "units"))
        self.inputs.bias[...] = self.inputs.bias[...].at[1].set(1.0)
        kernel = truncated_normal(rngs.params(), (c.hidden_dim, 4, c.hidden_dim), "t5", c.hidden_dim)
        self.recurrent = Projection(kernel, ("recurrent", "gates", "units"), "BTU,UGW->BTGW")
        kernel = truncated_normal(rngs.params(), (c.hidden_dim, c.emb_dim), "t5", c.hidden_dim)
        self.out = Projection(kernel, ("units", "embed"), "BTU,UD->BTD")
        if not c.logits_via_embedding:
            kernel = truncated_normal(rngs.params(), (c.emb_dim, c.vocab_size), "t5", c.emb_dim)
            self.logits_dense = Projection(kernel, ("embed", "vocab"), "BTD,DV->BTV")

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns hidden states [B, T, D]. The state is reset at each packed example."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        tokens = batch["decoder_input_tokens"]
        segments = segments_of(batch, "decoder_segment_ids", "decoder_target_tokens")
        if segments is None:
            segments = jnp.ones(tokens.shape, jnp.int32)
        fresh = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
        hidden, _ = self._run(self._embed(tokens, keys[0]), fresh, self._start(tokens.shape[0]))
        return dropout(hidden, self.config.dropout_rate, keys[1])

    def prefill(
        self, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, CellState]:
        """Processes prompts. See `Transformer.prefill`. The state of a row is the one before its padding."""
        del max_tokens
        is_token = prompt != padding
        first = jnp.full((prompt.shape[0], 0 if start is None else 1), start or 0, jnp.int32)
        tokens = jnp.concatenate([first, jnp.where(is_token, prompt, 0)], axis=1)
        num_inputs = first.shape[1] + jnp.sum(is_token, axis=1)
        hidden, states = self._run(self._embed(tokens), jnp.zeros(tokens.shape, bool), self._start(tokens.shape[0]))
        pick = lambda x: jnp.take_along_axis(x, (num_inputs - 1)[:, None, None], axis=1)
        return pick(hidden)[:, 0], jax.tree.map(lambda x: pick(x)[:, 0], states)

    def decode(self, state: CellState, tokens: jax.Array, layers: None = None) -> tuple[jax.Array, CellState]:
        """Processes the next tokens. See `Transformer.decode`."""
        hidden, states = self._run(self._embed(tokens), jnp.zeros(tokens.shape, bool), state)
        return hidden, jax.tree.map(lambda x: x[:, -1], states)

    def _embed(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return dropout(self.token_embedder(tokens, DTYPES[self.config.dtype]), self.config.dropout_rate, key)

    def _start(self, batch: int) -> CellState:
        zeros = jnp.zeros((batch, self.config.hidden_dim), jnp.float32)
        return CellState(zeros, zeros)

    def _run(self, x_BTD: jax.Array, fresh_BT: jax.Array, state: CellState) -> tuple[jax.Array, CellState]:
        """Returns projected outputs [B, T, D] and the state after each token [B, T, U].

        The state is reset at `fresh` tokens.
        """

        def run_step(state: CellState, inputs) -> tuple[CellState, CellState]:
            gates_BGU, fresh_B = inputs
            state = jax.tree.map(lambda x: jnp.where(fresh_B[:, None], 0.0, x), state)
            recurrent_BGU = self.recurrent(state.output[:, None].astype(x_BTD.dtype))[:, 0]
            gates_BGU = (gates_BGU + recurrent_BGU).astype(jnp.float32)
            input_gate, forget_gate, candidate, output_gate = (gates_BGU[:, i] for i in range(4))
            cell = jax.nn.sigmoid(forget_gate) * state.cell + jax.nn.sigmoid(input_gate) * jnp.tanh(candidate)
            state = CellState(cell, jax.nn.sigmoid(output_gate) * jnp.tanh(cell))
            return state, state

        time_first = lambda x: jnp.moveaxis(x, 1, 0)
        _, states = jax.lax.scan(run_step, state, (time_first(self.inputs(x_BTD)), time_first(fresh_BT)))
        states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), states)
        return self.constrain(self.out(states.output.astype(x_BTD.dtype)), ("batch", "length", None)), states

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns logits. See `Transformer.logits`."""
        return self.constrain(compute_logits(x_BTD, *self.output_matrix()), ("batch", None, "vocab"))

    def output_matrix(self) -> tuple[jax.Array, float]:
        """Returns the output matrix. See `Transformer.output_matrix`."""
        return output_matrix(self)
