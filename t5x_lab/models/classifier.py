"""A network with a classification head: its class is trained, and its language model beside it (Radford et al. 2018, 3.2-3.3).

Axis letters: B batch, K sequences of an example, T length, D embed, C classes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lab.config.errors import UserError
from t5x_lab.models.loss import target_tokens
from t5x_lab.models.model import LossSums, Model, ModelConfig
from t5x_lab.networks.functional import Params
from t5x_lab.networks.head import CLASSIFIER, ClassificationHead
from t5x_lab.networks.network import Batch, has_decoder, has_encoder

IDS, LENGTHS, CLASSES = "sequences", "sequence_lengths", "class_probabilities"


class Classifier(Model):
    """A `Model` whose batches are examples:

      sequences            int [B, K, T], padding on the right; a sequence's last token is the one whose state is classified
      sequence_lengths     int [B, K]
      class_probabilities  float32 [B, C], what the classes should have; of a row of padding, 0

    A decoder reads each sequence by itself, causally; an encoder, and a prefix decoder without a language-modelling loss, in
    both directions. Of an encoder-decoder the encoder reads it, and the state is that of the decoder's start token.

    In `LossSums`, what is of tokens is of examples; `terms` has the language-modelling loss, as `lm_loss`.
    """

    def __init__(self, config: ModelConfig, *args: Any):
        super().__init__(config, *args)
        assert config.head is not None
        self.head: ClassificationHead = config.head
        if config.losses:
            raise UserError("ModelConfig.losses are of a network without a head; leave them out, or HEAD.")
        if self.head.lm_weight and config.network.architecture in ("encoder", "encoder_decoder"):
            raise UserError(
                f"ClassificationHead.lm_weight is {self.head.lm_weight}, and the network is of architecture "
                f'"{config.network.architecture}", which reads a sequence as a whole and predicts none of it. Set it to 0.'
            )

    @property
    def terms(self) -> tuple[str, ...]:
        return ("lm_loss",) if self.head.lm_weight else ()

    def class_logits(self, params: Params, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Logits of the classes, float32 [B, C]."""
        return self._run(params, batch, dropout_key)[0]

    def loss(self, params: Params, batch: Batch, objective_weights: jax.Array | None = None, dropout_key=None) -> LossSums:
        """Sums over a batch's examples; `objective_weights` [B, K, T] are those of `weights_and_normalizer`."""
        wanted = batch[CLASSES]
        is_example = jnp.sum(wanted, axis=-1)
        logits, network, read, hidden = self._run(params, batch, dropout_key)
        losses = -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)
        examples = jnp.sum(is_example)
        objective, terms = jnp.sum(losses), {}
        if self.head.lm_weight:
            weights = self.weights_and_normalizer(batch)[0] if objective_weights is None else objective_weights
            weights = weights.reshape(target_tokens(read).shape)
            loss = {"z_loss": self.config.z_loss, "label_smoothing": self.config.label_smoothing}
            trained, tokens = self._cross_entropy(network, hidden, target_tokens(read), weights, **loss)
            objective += self.head.lm_weight * trained
            terms = {"lm_loss": jnp.sum(tokens.loss * weights)}
        correct = jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)
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
        """Weights of predicted tokens [B, K, T], and the number of examples.

        The weighted sum of the tokens' losses, divided by that number, is their mean as the head says: over sequences, each
        counted with its own mean, or over tokens.
        """
        counted = self._predicted(batch)
        if not self.head.lm_on_wrong and self.head.combine == "choices":
            right = jax.nn.one_hot(jnp.argmax(batch[CLASSES], axis=-1), self.head.sequences)
            counted *= right[..., None]
        examples = jnp.sum(jnp.sum(batch[CLASSES], axis=-1))
        if self.head.lm_mean_over == "sequences":
            counted /= jnp.maximum(jnp.sum(counted, axis=-1, keepdims=True), 1.0)
        weights = counted * examples / jnp.maximum(jnp.sum(counted), 1e-6)
        return weights, jnp.maximum(examples, 1e-6)

    def count_tokens(self, batch: Batch) -> dict[str, jax.Array]:
        with_loss = jnp.sum(self._predicted(batch)) if self.head.lm_weight else jnp.zeros(())
        return {"tokens_processed": jnp.sum(batch[LENGTHS]), "tokens_with_loss": with_loss.astype(jnp.int32)}

    def abstract_batch(self, rows: int, encoder_length: int, decoder_length: int) -> dict[str, jax.ShapeDtypeStruct]:
        k, length = self.head.sequences, max(encoder_length, decoder_length)
        shapes = {IDS: (rows, k, length), LENGTHS: (rows, k)}
        found = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
        return {**found, CLASSES: jax.ShapeDtypeStruct((rows, len(self.head.classes)), jnp.float32)}

    def _predicted(self, batch: Batch) -> jax.Array:
        """Float32 [B, K, T], 1 where the next token of an example's sequence is predicted."""
        is_example = jnp.sum(batch[CLASSES], axis=-1)[:, None, None]
        return (_positions(batch[IDS]) < batch[LENGTHS][..., None] - 1) * is_example

    def _run(self, params: Params, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Any, Batch, jax.Array]:
        """(logits [B, C], the module, what it reads as a batch of B * K rows, its hidden states [B * K, T, D])"""
        of_network, of_head = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        sequences, lengths = batch[IDS], batch[LENGTHS]
        rows, k, length = sequences.shape
        read = self._read(sequences.reshape(rows * k, length), lengths.reshape(rows * k))
        network, hidden = self._hidden(params, read, of_network)
        last = lengths.reshape(-1) - 1 if hidden.shape[1] == length else jnp.zeros(rows * k, jnp.int32)
        states = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)
        return getattr(network, CLASSIFIER)(states.reshape(rows, k, -1), of_head), network, read, hidden

    def _read(self, ids: jax.Array, lengths: jax.Array) -> Batch:
        """The features of sequences [N, T], of the network's architecture."""
        network = self.config.network
        is_token = (_positions(ids) < lengths[:, None]).astype(jnp.int32)
        side = "encoder" if has_encoder(network) else "decoder"
        found = {
            f"{side}_input_tokens": ids,
            f"{side}_segment_ids": is_token,  # an id 0 may be a token
            f"{side}_positions": _positions(ids) * is_token,
        }
        if not has_decoder(network):
            return {**found, "encoder_target_tokens": ids}
        if has_encoder(network):
            start = jnp.zeros((len(ids), 1), jnp.int32)
            found |= {"decoder_segment_ids": start + 1, "decoder_positions": start}
            return {**found, "decoder_input_tokens": start, "decoder_target_tokens": start}
        if network.architecture == "prefix_decoder":
            found["decoder_causal_attention"] = is_token if not self.head.lm_weight else jnp.zeros_like(is_token)
        after = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
        return {**found, "decoder_target_tokens": jnp.where(_positions(ids) < lengths[:, None] - 1, after, 0)}


def _positions(ids: jax.Array) -> jax.Array:
    """The place of each token in its row, of the shape of `ids`."""
    return jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)


def model_of(config: ModelConfig, constrain: Callable = lambda x, axes: x, row_shards: Callable[[], int] = lambda: 1) -> Model:
    """The functions of a configuration: a `Classifier`'s where it has a head. Arguments are `Model`'s."""
    return (Classifier if config.head else Model)(config, constrain, row_shards)
