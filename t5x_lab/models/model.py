"""A network and its loss as pure functions of (parameters, batch).

Parameters are nested dicts of arrays. Optimizers, checkpoints and shardings do not depend on Flax.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError
from t5x_lab.decoding.rows import take_rows
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.loss import (
    LossSums,
    target_tokens,
    token_weights,
    weights_and_normalizer,
)
from t5x_lab.networks.functional import Functional, Params
from t5x_lab.networks.network import Batch, abstract_batch, is_feature, network_name, prefill, wide_logits, widen
from t5x_lab.ops.cross_entropy import CrossEntropy, TokenLosses, cross_entropy, cross_entropy_of_logits

SCORING_CHUNK = 512  # tokens whose logits exist at a time in scoring, where there is no backward pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of each row's target tokens.

    Attributes:
      log_prob: sum of the targets' log-probabilities, float32 [B].
      is_greedy: every target is the most likely token, bool [B].
    """

    log_prob: jax.Array
    is_greedy: jax.Array


class Model:
    """The functions of a network and its loss. It holds shapes and names; every method takes the parameters.

    Args:
      config: network and loss.
      constrain: function (x, logical axes) -> x that shards activations. See `Transformer`.
      row_shards: function that returns the number of shards of a batch's rows.
      wide_logits: whether logits of a bfloat16 network are computed in float32, as in T5X. On TPUs it would make no difference:
        their float32 products are of bfloat16 factors.
    """

    def __init__(
        self,
        config: ModelConfig,
        constrain: Callable = lambda x, axes: x,
        row_shards: Callable[[], int] = lambda: 1,
        wide_logits: bool = True,
    ):
        self.config, self._constrain, self._row_shards, self._wide_logits = config, constrain, row_shards, wide_logits

        self._functional = Functional(lambda rngs: config.network.make(rngs, constrain))
        self.abstract_params, self.axes = self._functional.abstract_params, self._functional.axes
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))
        self.can_generate = hasattr(self._functional.abstract_module(), "prefill")

    def init(self, key: jax.Array) -> Params:
        """Returns initial float32 parameters."""
        return self._functional.init(key)

    def check_can_generate(self, function: str) -> None:
        """Raises a `UserError` that names the function, where the network cannot decode step by step."""
        if not self.can_generate:
            name = network_name(self.config.network)
            raise UserError(
                f"{function} needs a network that decodes step by step, and {name} has no prefill and decode. It trains, "
                "evaluates, scores and ranks without them; t5x_lab.protocols.Decoder says what they are."
            )

    def check_start(self, start: int | None) -> None:
        """Raises a `UserError` if `start` is not 0 and the network's `prefill` supports only start token 0."""
        prefill = getattr(self._functional.abstract_module(), "prefill", None)
        if start != 0 and prefill and "start" not in inspect.signature(prefill).parameters:
            raise UserError(
                f"SpecialTokens.start is {start}, but `prefill` of {network_name(self.config.network)} always uses start "
                "token 0. Add the arguments start and padding to it. See t5x_lab.protocols.Decoder."
            )

    def network(self, params: Params) -> Any:
        """Returns the NNX module with these parameters."""
        return self._functional.module(params)

    def logits(self, params: Params, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns teacher-forced logits, float32 [B, T, V]; [B, S, V] for an encoder-only network."""
        return self._logits(*self._hidden(params, batch, dropout_key))

    def prefill(
        self, params: Params, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, Any]:
        """Processes prompts [B, P]. Returns the next token's logits, float32 [B, V], and the decoding state.

        See `Transformer.prefill`.
        """
        network = self.network(params)
        hidden, state = prefill(network, prompt, max_tokens, start, padding)
        return self._logits(network, hidden[:, None])[:, 0], state

    def decode_step(self, params: Params) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
        """Returns the function of one decoding step: (state, tokens int [B]) -> (logits float32 [B, V], new state).

        Call this outside of the decoding loop: it unstacks the layers once.
        """
        network = self.network(params)
        layers = network.unstack() if hasattr(network, "unstack") else None

        def step(state: Any, token: jax.Array) -> tuple[jax.Array, Any]:
            network = self.network(params)  # NNX does not allow to change a module from outside of the traced loop
            hidden, state = network.decode(state, token[:, None], layers)
            return self._logits(network, hidden)[:, 0], state

        return step

    def loss(self, params: Params, batch: Batch, objective_weights: jax.Array | None = None, dropout_key=None) -> LossSums:
        """Returns the loss sums of a batch. `objective_weights` [B, T] default to the batch's loss weights."""
        weights = token_weights(batch)
        objective_weights = weights if objective_weights is None else objective_weights
        network, hidden = self._hidden(params, batch, dropout_key)
        factor = self.config.cross_entropy_weight
        objective, tokens = self._cross_entropy(
            network,
            hidden if factor else jax.lax.stop_gradient(hidden),
            target_tokens(batch),
            objective_weights,
            z_loss=self.config.z_loss,
            label_smoothing=self.config.label_smoothing,
        )
        terms = {
            name: jnp.asarray(term(network, hidden, batch, objective_weights), jnp.float32)
            for name, term in self.config.losses.items()
        }
        return LossSums(
            objective=sum(terms.values(), factor * objective if factor else jnp.float32(0)),
            loss=jnp.sum(tokens.loss * weights),
            z_loss=jnp.sum(self.config.z_loss * jnp.square(tokens.log_z) * weights),
            correct=jnp.sum(tokens.correct * weights),
            weights=jnp.sum(weights),
            objective_weights=jnp.sum(objective_weights),
            terms=terms,
        )

    def weights_and_normalizer(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the objective's weights [B, T] of a whole batch and the divisor of the weighted sum."""
        return weights_and_normalizer(batch, self.config.loss_normalizing_factor)

    def count_tokens(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the tokens of a batch: `tokens_processed`, padding excluded, and `tokens_with_loss`.

        The targets of an encoder-only network replace its inputs and are not counted twice.
        """
        streams = [name for name in ("encoder_input_tokens", "decoder_target_tokens") if name in batch]
        return {
            "tokens_processed": sum((jnp.sum(batch[name] > 0) for name in streams), jnp.zeros((), jnp.int32)),
            "tokens_with_loss": jnp.sum(token_weights(batch) > 0),
        }

    def abstract_batch(self, rows: int, encoder_length: int, decoder_length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch's features."""
        return abstract_batch(self.config.network, rows, encoder_length, decoder_length)

    def no_losses(self) -> LossSums:
        """Returns loss sums of zero."""
        zero = jnp.zeros((), jnp.float32)
        return LossSums(*(zero,) * 6, dict.fromkeys(self.terms, zero))

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the additional loss terms."""
        return tuple(self.config.losses)

    def score(self, params: Params, batch: Batch) -> Scores:
        """Scores the targets with loss of each row, without z-loss and label smoothing."""
        weights = (token_weights(batch) > 0).astype(jnp.float32)
        network, hidden = self._hidden(params, batch)
        return _sum_scores(self._cross_entropy(network, hidden, target_tokens(batch), weights, chunk=SCORING_CHUNK)[1], weights)

    def score_continuations(
        self,
        params: Params,
        prompts: jax.Array,
        rows: jax.Array,
        targets: jax.Array,
        start: int | None = 0,
        padding: int = 0,
    ) -> Scores:
        """Scores targets [R, T] as continuations of prompts. Target r continues prompt rows[r] of `prompts` [U, P].

        Each prompt is processed once. See `Transformer.prefill`.
        """
        network = self.network(params)
        steps = targets.shape[1]
        weights = (targets != padding).astype(jnp.float32)
        targets = jnp.where(targets != padding, targets, 0)
        hidden, state = prefill(network, prompts, steps, start, padding)
        hidden = hidden[rows][:, None]
        if steps > 1:
            rest, _ = network.decode(take_rows(state, rows), targets[:, :-1])
            hidden = jnp.concatenate([hidden, rest], axis=1)
        return _sum_scores(self._cross_entropy(network, hidden, targets, weights, chunk=SCORING_CHUNK)[1], weights)

    def _hidden(self, params: Params, batch: Batch, dropout_key: jax.Array | None = None) -> tuple[Any, jax.Array]:
        network = self._functional.module(params, dropout_key)
        takes_key = "dropout_key" in inspect.signature(network.__call__).parameters
        features = {name: x for name, x in batch.items() if is_feature(name)}
        return network, network(features, **({"dropout_key": dropout_key} if takes_key else {}))

    def _logits(self, network: Any, hidden: jax.Array) -> jax.Array:
        return wide_logits(network, hidden) if self._wide_logits else network.logits(hidden)

    def _cross_entropy(self, network, hidden, targets, weights, **loss) -> tuple[jax.Array, TokenLosses]:
        if not hasattr(network, "output_matrix"):
            return cross_entropy_of_logits(network.logits(hidden), targets, weights, CrossEntropy(**loss))
        matrix, scale = network.output_matrix()
        cap = getattr(network, "logit_cap", None)
        config = CrossEntropy(scale=scale, cap=cap, shards=self._row_shards(), constrain=self._constrain, **loss)
        return cross_entropy(widen(hidden) if self._wide_logits else hidden, matrix, targets, weights, config)


def _sum_scores(tokens: TokenLosses, weights: jax.Array) -> Scores:
    return Scores(-jnp.sum(tokens.loss * weights, axis=-1), jnp.all((tokens.correct > 0) | (weights == 0), axis=-1))
