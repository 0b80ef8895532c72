"""A network and its loss as pure functions of (parameters, batch).

Parameters are nested dicts of arrays. Optimizers, checkpoints and shardings do not depend on Flax.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_range, check_types
from t5x_lab.config.errors import UserError
from t5x_lab.config.macros import macro
from t5x_lab.decoding.rows import take_rows
from t5x_lab.models.loss import (
    Loss,
    check_losses,
    check_normalizer,
    target_tokens,
    token_weights,
    weights_and_normalizer,
)
from t5x_lab.networks.checks import check_network
from t5x_lab.networks.functional import Functional, Params
from t5x_lab.networks.head import ClassificationHead, WithHead, find_head
from t5x_lab.networks.module_network import ModuleNetwork
from t5x_lab.networks.network import Batch, Network, abstract_batch, is_feature, network_name, prefill
from t5x_lab.networks.peft import PeftMethod, PeftNetwork, check_peft
from t5x_lab.ops.cross_entropy import CrossEntropy, TokenLosses, cross_entropy, cross_entropy_of_logits

SCORING_CHUNK = 512  # tokens whose logits exist at a time in scoring, where there is no backward pass


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A network and its loss.

    Attributes:
      network: a `Network`, or the class of an NNX module. See `ModuleNetwork`.
      peft: PEFT methods by the name in their parameters' names, such as {"lora": @Lora()}.
      head: classification head. With a head, the classification loss is trained. See `Classifier`.
      z_loss: weight of log(Z)**2 per token with loss. T5 uses 1e-4.
      label_smoothing: probability mass that moves from the target to all other tokens.
      loss_normalizing_factor: divisor of the loss. See `weights_and_normalizer`. None is the sum over tokens, as in T5X.
      losses: additional loss terms by the name of their metric. See `Loss`.
      cross_entropy_weight: factor of cross-entropy and z-loss. With 0 only `losses` are trained; the metrics still include the
        cross-entropy.
      unchecked: the error of a trial with SeqIO's model features, if the network or a loss reads other features.
    """

    network: Network
    peft: dict[str, PeftMethod] = dataclasses.field(default_factory=dict, metadata=macro("PEFT"))
    head: ClassificationHead | None = dataclasses.field(default=None, metadata=macro("HEAD"))
    z_loss: float = dataclasses.field(default=1e-4, metadata=macro("Z_LOSS"))
    label_smoothing: float = dataclasses.field(default=0.0, metadata=macro("LABEL_SMOOTHING"))
    loss_normalizing_factor: float | str | None = dataclasses.field(
        default="NUM_REAL_TARGET_TOKENS", metadata=macro("LOSS_NORMALIZING_FACTOR")
    )
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)
    cross_entropy_weight: float = 1.0
    unchecked: UserError | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    @property
    def sequences(self) -> int:
        """Number of sequences per row of a batch."""
        return self.head.sequences if self.head else 1

    def __post_init__(self):
        if callable(self.network) and not hasattr(self.network, "make"):
            object.__setattr__(self, "network", ModuleNetwork(self.network))
        check_types(self)
        if self.head and find_head(self.network) is None:  # `dataclasses.replace` passes a network that has a head
            object.__setattr__(self, "network", WithHead(self.network, self.head))
        if self.peft and not hasattr(self.network, "peft"):
            check_peft(self.peft)
            object.__setattr__(self, "network", PeftNetwork(self.network, tuple(self.peft.items())))
        check_normalizer(self.loss_normalizing_factor)
        if self.z_loss < 0:
            raise UserError(f"Z_LOSS is {self.z_loss}; it must not be negative. T5 uses 1e-4. 0.0 turns it off.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"LABEL_SMOOTHING is {self.label_smoothing}; it must be at least 0 and below 1.")
        check_range(self, "cross_entropy_weight", 0.0, math.inf)
        if not self.losses and not self.cross_entropy_weight:
            raise UserError("ModelConfig.cross_entropy_weight is 0 and ModelConfig.losses is empty. Set one of them.")
        try:
            check_losses(self.losses, self.network, check_network(self.network))
        except UserError as error:
            if not isinstance(error.__cause__, KeyError):
                raise
            object.__setattr__(self, "unchecked", error)  # the feature may come from the run's converter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a batch. They can be added over microbatches and batches.

    Attributes:
      objective: the value that training differentiates: (cross-entropy + z-loss) times the objective's weights, plus the
        additional loss terms.
      loss, z_loss, correct: sums weighted with the batch's loss weights, for the metrics.
      weights: sum of the batch's loss weights.
      objective_weights: sum of the objective's weights.
      terms: additional loss terms by name.
    """

    objective: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    weights: jax.Array
    objective_weights: jax.Array
    terms: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


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
    """

    def __init__(self, config: ModelConfig, constrain: Callable = lambda x, axes: x, row_shards: Callable[[], int] = lambda: 1):
        self.config, self._constrain, self._row_shards = config, constrain, row_shards

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
        network, hidden = self._hidden(params, batch, dropout_key)
        return network.logits(hidden)

    def prefill(
        self, params: Params, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, Any]:
        """Processes prompts [B, P]. Returns the next token's logits, float32 [B, V], and the decoding state.

        See `Transformer.prefill`.
        """
        network = self.network(params)
        hidden, state = prefill(network, prompt, max_tokens, start, padding)
        return network.logits(hidden[:, None])[:, 0], state

    def decode_step(self, params: Params) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
        """Returns the function of one decoding step: (state, tokens int [B]) -> (logits float32 [B, V], new state).

        Call this outside of the decoding loop: it unstacks the layers once.
        """
        network = self.network(params)
        layers = network.unstack() if hasattr(network, "unstack") else None

        def step(state: Any, token: jax.Array) -> tuple[jax.Array, Any]:
            network = self.network(params)  # NNX does not allow to change a module from outside of the traced loop
            hidden, state = network.decode(state, token[:, None], layers)
            return network.logits(hidden)[:, 0], state

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

    def _cross_entropy(self, network, hidden, targets, weights, **loss) -> tuple[jax.Array, TokenLosses]:
        if not hasattr(network, "output_matrix"):
            return cross_entropy_of_logits(network.logits(hidden), targets, weights, CrossEntropy(**loss))
        matrix, scale = network.output_matrix()
        cap = getattr(network, "logit_cap", None)
        config = CrossEntropy(scale=scale, cap=cap, shards=self._row_shards(), constrain=self._constrain, **loss)
        return cross_entropy(hidden, matrix, targets, weights, config)


def _sum_scores(tokens: TokenLosses, weights: jax.Array) -> Scores:
    return Scores(-jnp.sum(tokens.loss * weights, axis=-1), jnp.all((tokens.correct > 0) | (weights == 0), axis=-1))
