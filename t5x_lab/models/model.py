"""A network with its loss, as pure functions of (parameters, batch).

Parameters are nested dicts of arrays, so that optimizers, checkpoints and shardings need no knowledge of Flax.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.checks import check_types, in_range
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
from t5x_lab.networks.additions import Addition, WithAdditions, check_additions
from t5x_lab.networks.checks import check_network
from t5x_lab.networks.functional import Functional, Params
from t5x_lab.networks.head import ClassificationHead, WithHead, head_of
from t5x_lab.networks.network import Batch, Network, abstract_batch, is_feature, name_of, prefill
from t5x_lab.networks.of_module import OfModule
from t5x_lab.ops.cross_entropy import CrossEntropy, TokenLosses, cross_entropy, cross_entropy_of_logits

SCORED = 512  # tokens that have logits at one time, where no gradient's products are to be fed


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A network and its loss.

    Attributes:
      network: a `Network`, or the class of an NNX module, see `OfModule`.
      added: `Addition`s to it, by the names of their parameters, {"lora": @Lora()}.
      head: what the network classifies, beside all else that it does; its class is then trained, see `Classifier`.
      z_loss: weight of log(Z)**2 per token with loss, 1e-4 in T5's code.
      label_smoothing: probability mass moved from the target to all other tokens.
      loss_normalizing_factor: see `weights_and_normalizer`; None is T5X's sum over tokens.
      losses: further terms of what is trained, `Loss`es by the names of their metrics.
      cross_entropy_weight: what cross-entropy and z-loss are multiplied by beside them; 0 trains on `losses` alone, and the
        metrics still have the cross-entropy.
      unchecked: why the network or a loss cannot be tried on SeqIO's model features alone, where it reads others.
    """

    network: Network
    added: dict[str, Addition] = dataclasses.field(default_factory=dict, metadata=macro("ADDED"))
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
        """Of a batch's row, which each have the row's lengths."""
        return self.head.sequences if self.head else 1

    def __post_init__(self):
        if callable(self.network) and not hasattr(self.network, "make"):
            object.__setattr__(self, "network", OfModule(self.network))
        check_types(self)
        if self.head and head_of(self.network) is None:  # it has one where this is a copy
            object.__setattr__(self, "network", WithHead(self.network, self.head))
        if self.added and not hasattr(self.network, "added"):  # it has them where this is a copy
            check_additions(self.added)
            object.__setattr__(self, "network", WithAdditions(self.network, tuple(self.added.items())))
        check_normalizer(self.loss_normalizing_factor)
        if self.z_loss < 0:
            raise UserError(f"Z_LOSS is {self.z_loss}; it must not be negative. T5 uses 1e-4; 0.0 turns it off.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"LABEL_SMOOTHING is {self.label_smoothing}; it must be at least 0 and below 1.")
        in_range(self, "cross_entropy_weight", 0.0, math.inf)
        if not self.losses and not self.cross_entropy_weight:
            raise UserError("ModelConfig.cross_entropy_weight is 0 and ModelConfig.losses is empty; nothing would be trained.")
        try:
            check_losses(self.losses, self.network, check_network(self.network))
        except UserError as error:
            if not isinstance(error.__cause__, KeyError):
                raise
            object.__setattr__(self, "unchecked", error)  # it may read a feature of the run's converter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a batch; they add over microbatches and evaluation batches.

    Attributes:
      objective: what training differentiates: (cross-entropy + z-loss) times the objective's weights, and the terms of a
        user's.
      loss, z_loss, correct: times the batch's own loss weights, for the metrics.
      weights: sum of those weights.
      objective_weights: sum of the objective's weights.
      terms: a user's losses, by name.
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
    """Of each row's target tokens.

    Attributes:
      log_prob: the sum of their log-probabilities, float32 [B].
      is_greedy: whether no id is likelier than any of them, bool [B].
    """

    log_prob: jax.Array
    is_greedy: jax.Array


class Model:
    """The functions of one network. Holds shapes and names only; every method takes the parameters.

    Args:
      config: network and loss.
      constrain: shards activations; see `Transformer`.
      parts_of_rows: () -> parts that `constrain` splits a batch's rows into.
    """

    def __init__(
        self, config: ModelConfig, constrain: Callable = lambda x, axes: x, parts_of_rows: Callable[[], int] = lambda: 1
    ):
        self.config, self._constrain, self._parts_of_rows = config, constrain, parts_of_rows

        self._functional = Functional(lambda rngs: config.network.make(rngs, constrain))
        self.abstract_params, self.axes = self._functional.abstract_params, self._functional.axes
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))
        self.generates = hasattr(self._functional.abstract_module(), "prefill")

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters."""
        return self._functional.init(key)

    def check_generates(self, function: str) -> None:
        """Raises a `UserError` that names the function, where the network cannot decode step by step."""
        if not self.generates:
            name = name_of(self.config.network)
            raise UserError(
                f"{function} needs a network that decodes step by step, and {name} has no prefill and decode. It trains, "
                "evaluates, scores and ranks without them; t5x_lab.protocols.Decoder says what they are."
            )

    def check_start(self, start: int | None) -> None:
        """Raises a `UserError` where a network that generates knows the start token 0 alone, and another one is asked for."""
        prefill = getattr(self._functional.abstract_module(), "prefill", None)
        if start != 0 and prefill and "start" not in inspect.signature(prefill).parameters:
            raise UserError(
                f"SpecialTokens.start is {start}, and the prefill of {name_of(self.config.network)} puts 0 before its prompts. "
                "Give it the arguments start and padding, see t5x_lab.protocols.Decoder."
            )

    def network(self, params: Params) -> Any:
        """The NNX module with these parameters in it, as it is used."""
        return self._functional.module(params)

    def logits(self, params: Params, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Teacher-forced logits, float32 [B, T, V]; of an encoder alone, [B, S, V]."""
        network, hidden = self._hidden(params, batch, dropout_key)
        return network.logits(hidden)

    def prefill(
        self, params: Params, prompt: jax.Array, max_tokens: int, start: int | None = 0, padding: int = 0
    ) -> tuple[jax.Array, Any]:
        """Runs prompts [B, P]; returns the next token's logits, float32 [B, V], and the state. See `Transformer.prefill`."""
        network = self.network(params)
        hidden, state = prefill(network, prompt, max_tokens, start, padding)
        return network.logits(hidden[:, None])[:, 0], state

    def decode_step(self, params: Params) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
        """The function of one decode step: (state, tokens int [B]) -> (next logits, float32 [B, V]; the new state).

        Make it outside of the loop that calls it.
        """
        outside = self.network(params)
        layers = outside.unstack() if hasattr(outside, "unstack") else None

        def step(state: Any, token: jax.Array) -> tuple[jax.Array, Any]:
            network = self.network(params)  # a module that counts what it draws must be the loop's own
            hidden, state = network.decode(state, token[:, None], layers)
            return network.logits(hidden)[:, 0], state

        return step

    def loss(self, params: Params, batch: Batch, objective_weights: jax.Array | None = None, dropout_key=None) -> LossSums:
        """Loss sums of a batch; `objective_weights` [B, T] are the loss weights unless given."""
        weights = token_weights(batch)
        objective_weights = weights if objective_weights is None else objective_weights
        network, hidden = self._hidden(params, batch, dropout_key)
        share = self.config.cross_entropy_weight
        objective, tokens = self._cross_entropy(
            network,
            hidden if share else jax.lax.stop_gradient(hidden),
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
            objective=sum(terms.values(), share * objective if share else jnp.float32(0)),
            loss=jnp.sum(tokens.loss * weights),
            z_loss=jnp.sum(self.config.z_loss * jnp.square(tokens.log_z) * weights),
            correct=jnp.sum(tokens.correct * weights),
            weights=jnp.sum(weights),
            objective_weights=jnp.sum(objective_weights),
            terms=terms,
        )

    def weights_and_normalizer(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The objective's weights [B, T] of a whole batch, and what the weighted sum is divided by."""
        return weights_and_normalizer(batch, self.config.loss_normalizing_factor)

    def count_tokens(self, batch: Batch) -> dict[str, jax.Array]:
        """Tokens of a batch: `tokens_processed`, padding excluded, and `tokens_with_loss`.

        An encoder's targets stand in the place of its inputs and are not counted again.
        """
        streams = [name for name in ("encoder_input_tokens", "decoder_target_tokens") if name in batch]
        return {
            "tokens_processed": sum((jnp.sum(batch[name] > 0) for name in streams), jnp.zeros((), jnp.int32)),
            "tokens_with_loss": jnp.sum(token_weights(batch) > 0),
        }

    def abstract_batch(self, rows: int, encoder_length: int, decoder_length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch's features."""
        return abstract_batch(self.config.network, rows, encoder_length, decoder_length)

    def no_losses(self) -> LossSums:
        """The sums of no tokens."""
        zero = jnp.zeros((), jnp.float32)
        return LossSums(*(zero,) * 6, dict.fromkeys(self.terms, zero))

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of further terms of what is trained."""
        return tuple(self.config.losses)

    def score(self, params: Params, batch: Batch) -> Scores:
        """Scores each row's target tokens with loss; no z-loss, no label smoothing."""
        weights = (token_weights(batch) > 0).astype(jnp.float32)
        network, hidden = self._hidden(params, batch)
        return _summed(self._cross_entropy(network, hidden, target_tokens(batch), weights, chunk=SCORED)[1], weights)

    def score_continuations(
        self,
        params: Params,
        prompts: jax.Array,
        rows: jax.Array,
        targets: jax.Array,
        start: int | None = 0,
        padding: int = 0,
    ) -> Scores:
        """Scores targets [R, T]; target r follows prompt rows[r] of the prompts [U, P]. See `Transformer.prefill`.

        A prompt is run once for all its targets.
        """
        network = self.network(params)
        steps = targets.shape[1]
        weights = (targets != padding).astype(jnp.float32)
        targets = jnp.where(targets != padding, targets, 0)
        hidden, state = prefill(network, prompts, steps, start, padding)
        hidden = hidden[rows][:, None]
        if steps > 1:
            after, _ = network.decode(take_rows(state, rows), targets[:, :-1])
            hidden = jnp.concatenate([hidden, after], axis=1)
        return _summed(self._cross_entropy(network, hidden, targets, weights, chunk=SCORED)[1], weights)

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
        config = CrossEntropy(scale=scale, cap=cap, shards=self._parts_of_rows(), constrain=self._constrain, **loss)
        return cross_entropy(hidden, matrix, targets, weights, config)


def _summed(tokens: TokenLosses, weights: jax.Array) -> Scores:
    return Scores(-jnp.sum(tokens.loss * weights, axis=-1), jnp.all((tokens.correct > 0) | (weights == 0), axis=-1))
