"""FLOPs of training, where parameters are frozen or added."""

import dataclasses
from typing import Any

import jax

from t5x_lab.models.classifier import model_of
from t5x_lab.models.model import Model, ModelConfig
from t5x_lab.networks.around import with_policy
from t5x_lab.networks.flops import traced_flops
from t5x_lab.optim.groups import flat_names, merge, select, trained
from t5x_lab.runs.config import RunConfig
from t5x_lab.runs.sharded_model import ShardedModel


def step_flops(run: RunConfig, sharded: ShardedModel, lengths: tuple[int, int]) -> int:
    """FLOPs of a training step on all devices; `lengths` are the encoder's and the decoder's."""
    return run.data.batch_size * training_flops(run, sharded.model, *lengths)


def training_flops(run: RunConfig, model: Model, encoder_length: int, decoder_length: int) -> int:
    """FLOPs of one row, forward and backward, of the run's model.

    With TRAINABLE, ADDED, HEAD or frozen groups it is the network's own count times a share: that of the matrix products of the
    gradients that are computed, in JAX's program, in those of all parameters without what is added.
    """
    lengths = encoder_length, decoder_length
    whole, names = run.model.network.flops(*lengths), flat_names(model.axes)
    is_plain = not run.model.added and run.model.head is None
    is_trained = trained(run.optimizer, list(names), run.trainable)
    if run.model.unchecked or (is_plain and all(map(is_trained, names))):
        return whole  # the former reads more than tokens
    network: Any = run.model.network
    for _ in filter(None, (run.model.added, run.model.head)):
        network = network.network
    plain = dataclasses.replace(run.model, network=network, added={}, head=None)
    ours = _of_gradients(run.model, is_trained, *lengths)
    return round(whole * ours / _of_gradients(plain, lambda name: True, *lengths))


def _of_gradients(config: ModelConfig, is_trained: Any, encoder_length: int, decoder_length: int) -> int:
    network: Any = config.network
    if hasattr(network, "remat_policy"):
        network = with_policy(network, "everything")
    model = model_of(dataclasses.replace(config, network=network, losses={}, cross_entropy_weight=1.0))
    params = model.abstract_params
    batch = model.abstract_batch(1, encoder_length, decoder_length)
    frozen = select(params, lambda name: not is_trained(name))
    loss = lambda trained, frozen, batch: model.loss(merge(trained, frozen), batch).objective
    return traced_flops(jax.grad(loss), select(params, is_trained), frozen, batch)
