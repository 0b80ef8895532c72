"""Classification with a head and an auxiliary language-modeling loss (Radford et al. 2018, sections 3.2 and 3.3).

Axis letters: B batch, K sequences of an example, T length, D embed, C classes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.loss import LossSums, target_tokens
from t5x_lab.models.model import Model
from t5x_lab.networks.functional import Params
from t5x_lab.networks.head import CLASSIFIER, ClassificationHead
from t5x_lab.networks.network import Batch, has_decoder, has_encoder

IDS, LENGTHS, CLASSES = "sequences", "sequence_lengths", "class_probabilities"


class Classifier(Model):
    """A `Model` for classification, with batches of examples:

      sequences            int [B, K, T], padded on the right; the hidden state of a sequence's last token is classified
      sequence_lengths     int [B, K]
      class_probabilities  float32 [B, C], target probabilities; 0 for a row of padding

    A decoder reads each sequence causally; an encoder, and a prefix decoder without a language-modeling loss, bidirectionally.
    In an encoder-decoder the encoder reads the sequence, and the state of the decoder's start token is classified.

    `LossSums` counts examples instead of tokens. `terms` has the language-modeling loss as `lm_loss`.
    """

    def __init__(self, config: ModelConfig, *args: Any):
        super().__init__(config, *args)
        assert config.head is not None
        self.head: ClassificationHead = config.head
        if config.losses:
            raise UserError("ModelConfig.losses cannot be combined with a classification head. Remove the losses, or HEAD.")
        if self.head.lm_weight and config.network.architecture in ("encoder", "encoder_decoder"):
            raise UserError(
                f"ClassificationHead.lm_weight is {self.head.lm_weight}, but architecture "
                f'"{config.network.architecture}" has no language-modeling loss on its inputs. Set lm_weight to 0.'
            )

    @property
    def terms(self) -> tuple[str, ...]:
        return ("lm_loss",) if self.head.lm_weight else ()

    def class_logits(self, params: Params, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns class logits, float32 [B, C]."""
        return self._run(params, batch, dropout_key)[0]

    def loss(self, params: Params, batch: Batch, objective_weights: jax.Array | None = None, dropout_key=None) -> LossSums:
        """Returns sums over the examples of a batch. `objective_weights` [B, K, T]: see `weights_and_normalizer`."""
        labels = batch[CLASSES]
        is_example = jnp.sum(labels, axis=-1)
        logits, network, sequences, hidden = self._run(params, batch, dropout_key)
        losses = -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)
        examples = jnp.sum(is_example)
        objective, terms = jnp.sum(losses), {}
        if self.head.lm_weight:
            weights = self.weights_and_normalizer(batch)[0] if objective_weights is None else objective_weights
            weights = weights.reshape(target_tokens(sequences).shape)
            loss = {"z_loss": self.config.z_loss, "label_smoothing": self.config.label_smoothing}
            lm_objective, tokens = self._cross_entropy(network, hidden, target_tokens(sequences), weights, **loss)
            objective += self.head.lm_weight * lm_objective
            terms = {"lm_loss": jnp.sum(tokens.loss * weights)}
        correct = jnp.argmax(logits, axis=-1) == jnp.argmax(labels, axis=-1)
        return LossSums(
            objective=objective,
            loss=jnp.sum(losses),
            z_loss=jnp.zeros(()),
            correct=jnp.sum(correct * is_example),
            weights=examples,
            objective_weights=examples,
            terms=terms,
        )

    def weights_and_normalizer(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of predicted tokens [B, K, T] and the number of examples.

        The weighted sum of token losses divided by that number is the mean that `lm_mean_over` asks for, over sequences or
        tokens.
        """
        weights = self._is_predicted(batch)
        if not self.head.lm_on_wrong and self.head.combine == "choices":
            correct = jax.nn.one_hot(jnp.argmax(batch[CLASSES], axis=-1), self.head.sequences)
            weights *= correct[..., None]
        examples = jnp.sum(jnp.sum(batch[CLASSES], axis=-1))
        if self.head.lm_mean_over == "sequences":
            weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
        weights = weights * examples / jnp.maximum(jnp.sum(weights), 1e-6)
        return weights, jnp.maximum(examples, 1e-6)

    def count_tokens(self, batch: Batch) -> dict[str, jax.Array]:
        with_loss = jnp.sum(self._is_predicted(batch)) if self.head.lm_weight else jnp.zeros(())
        return {"tokens_processed": jnp.sum(batch[LENGTHS]), "tokens_with_loss": with_loss.astype(jnp.int32)}

    def abstract_batch(self, rows: int, encoder_length: int, decoder_length: int) -> dict[str, jax.ShapeDtypeStruct]:
        k, length = self.head.sequences, max(encoder_length, decoder_length)
        shapes = {IDS: (rows, k, length), LENGTHS: (rows, k)}
        features = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
        return {**features, CLASSES: jax.ShapeDtypeStruct((rows, len(self.head.classes)), jnp.float32)}

    def _is_predicted(self, batch: Batch) -> jax.Array:
        """Returns float32 [B, K, T], 1 at tokens whose next token is predicted."""
        is_example = jnp.sum(batch[CLASSES], axis=-1)[:, None, None]
        return (_positions(batch[IDS]) < batch[LENGTHS][..., None] - 1) * is_example

    def _run(self, params: Params, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Any, Batch, jax.Array]:
        """Returns class logits [B, C], the module, its input of B * K rows, and its hidden states [B * K, T, D]."""
        network_key, head_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        sequences, lengths = batch[IDS], batch[LENGTHS]
        rows, k, length = sequences.shape
        inputs = self._make_inputs(sequences.reshape(rows * k, length), lengths.reshape(rows * k))
        network, hidden = self._hidden(params, inputs, network_key)
        last = lengths.reshape(-1) - 1 if hidden.shape[1] == length else jnp.zeros(rows * k, jnp.int32)
        states = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)
        return getattr(network, CLASSIFIER)(states.reshape(rows, k, -1), head_key), network, inputs, hidden

    def _make_inputs(self, ids: jax.Array, lengths: jax.Array) -> Batch:
        """Returns the model features of sequences [N, T] for the network's architecture."""
        network = self.config.network
        is_token = (_positions(ids) < lengths[:, None]).astype(jnp.int32)
        side = "encoder" if has_encoder(network) else "decoder"
        features = {
            f"{side}_input_tokens": ids,
            f"{side}_segment_ids": is_token,  # 0 may be a token id
            f"{side}_positions": _positions(ids) * is_token,
        }
        if not has_decoder(network):
            return {**features, "encoder_target_tokens": ids}
        if has_encoder(network):
            start = jnp.zeros((len(ids), 1), jnp.int32)
            features |= {"decoder_segment_ids": start + 1, "decoder_positions": start}
            return {**features, "decoder_input_tokens": start, "decoder_target_tokens": start}
        if network.architecture == "prefix_decoder":
            features["decoder_causal_attention"] = is_token if not self.head.lm_weight else jnp.zeros_like(is_token)
        targets = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
        return {**features, "decoder_target_tokens": jnp.where(_positions(ids) < lengths[:, None] - 1, targets, 0)}


def _positions(ids: jax.Array) -> jax.Array:
    """Returns the position of each token in its row, in the shape of `ids`."""
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)


def make_model(
    config: ModelConfig,
    constrain: Callable = lambda x, axes: x,
    row_shards: Callable[[], int] = lambda: 1,
    wide_logits: bool = True,
) -> Model:
    """Makes the `Model` of a configuration, a `Classifier` if it has a head. See `Model` for the arguments."""
    return (Classifier if config.head else Model)(config, constrain, row_shards, wide_logits)
