"""FLOPs of training, also with frozen or PEFT parameters."""

import dataclasses
from typing import Any

import jax

from t5x_lab.models.classifier import make_model
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.networks.flops import traced_flops
from t5x_lab.networks.wrapper import replace_remat_policy
from t5x_lab.optim.groups import flat_names, merge, select, trained_predicate
from t5x_lab.runs.config.run_config import RunConfig


def training_flops(run: RunConfig, model: Model, encoder_length: int, decoder_length: int) -> int:
    """Returns the FLOPs of one row, forward and backward, of the run's model.

    With TRAINABLE, PEFT, HEAD or frozen groups, this is the count of the base network scaled by a ratio: the matrix-product
    FLOPs of the traced gradients of this model, divided by those of the base network with all parameters trained.
    """
    lengths = encoder_length, decoder_length
    full, names = run.model.network.flops(*lengths), flat_names(model.axes)
    is_base = not run.model.peft and run.model.head is None
    is_trained = trained_predicate(run.optimizer, list(names), run.trainable)
    if run.model.unchecked or (is_base and all(map(is_trained, names))):
        return full  # an unchecked model cannot be traced with tokens alone
    network: Any = run.model.network
    for _ in filter(None, (run.model.peft, run.model.head)):
        network = network.network
    base = dataclasses.replace(run.model, network=network, peft={}, head=None)
    gradients = _gradient_flops(run.model, is_trained, *lengths)
    return round(full * gradients / _gradient_flops(base, lambda name: True, *lengths))


def _gradient_flops(config: ModelConfig, is_trained: Any, encoder_length: int, decoder_length: int) -> int:
    network: Any = config.network
    if hasattr(network, "remat_policy"):
        network = replace_remat_policy(network, "everything")
    model = make_model(dataclasses.replace(config, network=network, losses={}, cross_entropy_weight=1.0))
    params = model.abstract_params
    batch = model.abstract_batch(1, encoder_length, decoder_length)
    frozen = select(params, lambda name: not is_trained(name))
    loss = lambda trained, frozen, batch: model.loss(merge(trained, frozen), batch).objective
    return traced_flops(jax.grad(loss), select(params, is_trained), frozen, batch)
