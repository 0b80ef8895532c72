"""The training step, a pure function of (state, batch): loss, gradient, update, counters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_lab.models.loss import LossSums
from t5x_lab.models.model import Model
from t5x_lab.networks.functional import Params
from t5x_lab.networks.network import Batch, dropout_rate
from t5x_lab.optim.counts import skip_update
from t5x_lab.optim.groups import merge, select
from t5x_lab.training.hooks import Statistics
from t5x_lab.training.state import TrainState, add_to_counter

Metrics = dict[str, jax.Array]


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    learning_rates: Callable[[Any, jax.Array], Metrics],
    *,
    seed: int,
    microbatches: int = 1,
    sum_over_slices: Callable[[Callable], Callable] = lambda function: lambda shared, rows: function(None, shared, rows),
    is_trained: Callable[[str], bool] = lambda name: True,
    statistics: Statistics = Statistics(),
    skip_bad_steps: bool = False,
    average_decay: float | None = None,
    gradient_point: Callable[[Any, Params], Params] = lambda opt_state, params: params,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the training step.

    Args:
      model: the model.
      optimizer: optax transformation of the trained parameters.
      learning_rates: function (optimizer state, step) -> learning rates by metric name.
      seed: seed of dropout. The key of a step depends on the seed and the step number.
      microbatches: number of equal parts of the batch that are processed sequentially. Without dropout, loss and gradient do
        not depend on it.
      sum_over_slices: adds gradients and losses over slices. See `Partitioner`.
      is_trained: whether the parameter of this name is trained.
      statistics: statistics of hooks.
      skip_bad_steps: whether only the update of a step with a non-finite loss, gradient or update is skipped. By default all
        later updates are skipped too.
      average_decay: decay of `TrainState.average`.
      gradient_point: function (optimizer state, trained parameters) -> parameters at which the gradient is computed.

    Returns:
      Function (state, batch) -> (state, metrics). The metrics are scalars: `loss` (cross-entropy per token with loss),
      `z_loss`, `accuracy`, additional losses, `grad_norm`, the learning rates, `healthy`, and the token counts of this step;
      and `task_tokens` [tasks].
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _, dropout_key = jax.random.split(jax.random.key(seed))  # the first key initialized the parameters
        key = jax.random.fold_in(dropout_key, state.step)
        weights, normalizer = model.weights_and_normalizer(batch)
        trained = select(state.params, is_trained)
        frozen = select(state.params, lambda name: not is_trained(name))
        loss = lambda trained, *args: model.loss(merge(trained, frozen), *args)
        gradients = _gradients(model, loss, microbatches)
        point = gradient_point(state.opt_state, trained)
        grads, sums = sum_over_slices(gradients)((point, normalizer, key), (dict(batch), weights))

        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        counts = count_tokens(model, batch)
        counts["task_tokens"] = count_by_task(batch, counts["tokens_processed"])
        params = merge(optax.apply_updates(trained, updates), frozen)
        counters = {name: add_to_counter(counter, counts[name]) for name, counter in state.counters.items()}
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            counters=counters,
            average=moving_average(state.average, params, state.step, average_decay),
        )
        grad_norm = optax.tree.norm(grads)
        # The update too: a schedule or an optimizer may be infinite where the gradient is not.
        norms = (sums.loss, sums.z_loss, grad_norm, optax.tree.norm(updates))
        healthy = state.healthy & jnp.all(jnp.isfinite(jnp.stack(norms)))
        # The host reads metrics a step late and buffers are donated, so a bad step is undone here.
        new = jax.tree.map(lambda new, old: jnp.where(healthy, new, old), new, state)
        if skip_bad_steps:  # the step number and the schedule's count in the optimizer advance
            slots = skip_update(new.opt_state, opt_state)
            new = dataclasses.replace(new, step=state.step + 1, counters=counters, opt_state=slots)
        metrics = {
            **per_token(sums),
            "grad_norm": grad_norm,
            **learning_rates(state.opt_state, state.step),
            "healthy": healthy,
            **counts,
        }
        hook_statistics = statistics.compute(trained, grads, updates)
        return dataclasses.replace(new, healthy=jnp.ones((), bool) if skip_bad_steps else healthy), {
            **metrics,
            **hook_statistics,
        }

    return train_step


def moving_average(average: Params | None, params: Params, step: jax.Array, decay: float | None) -> Params | None:
    """Returns decay * average + (1 - decay) * params, float32, with decay at most (1 + n) / (10 + n) after n steps.

    The smaller initial decay reduces the weight of the initial parameters (as in TensorFlow's ExponentialMovingAverage).
    """
    if average is None or decay is None:
        return None
    new_share = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + new_share * (new - old), average, params)


def _gradients(model: Model, loss: Callable, microbatches: int) -> Callable[..., tuple[Params, LossSums]]:
    """Returns a function (slice index, (params, normalizer, key), (batch, weights)) -> (gradient, loss sums) of a slice's rows.

    The gradient is that of objective / normalizer, summed over microbatches.
    """

    def objective(params, normalizer, batch, weights, key):
        sums = loss(params, batch, weights, key if dropout_rate(model.config.network) else None)
        return sums.objective / normalizer, sums

    gradient = jax.grad(objective, has_aux=True)

    def split(x):
        # Every microbatch has rows from every device's shard of the batch, so that no device idles.
        return jnp.moveaxis(x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]), 1, 0)

    def gradients(slice_index, shared, rows):
        params, normalizer, key = shared
        if slice_index is not None:
            key = jax.random.fold_in(key, slice_index)
        if microbatches == 1:
            return gradient(params, normalizer, *rows, key)

        def accumulate(total, inputs):
            index, *rows = inputs
            result = gradient(params, normalizer, *rows, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, result), None

        start = (jax.tree.map(jnp.zeros_like, params), model.no_losses())
        return jax.lax.scan(accumulate, start, (jnp.arange(microbatches), *jax.tree.map(split, rows)))[0]

    return gradients


def make_eval_step(model: Model) -> Callable[[Params, Batch], tuple[LossSums, Metrics]]:
    """Returns the function (params, batch) -> (loss sums, token counts), without dropout."""

    def eval_step(params: Params, batch: Batch) -> tuple[LossSums, Metrics]:
        return model.loss(params, batch), count_tokens(model, batch)

    return eval_step


def per_token(sums: LossSums) -> Metrics:
    """Returns means over the tokens with loss."""
    weights = jnp.maximum(sums.weights, 1e-6)
    terms = {name: term / jnp.maximum(sums.objective_weights, 1e-6) for name, term in sums.terms.items()}
    return {"loss": sums.loss / weights, "z_loss": sums.z_loss / weights, "accuracy": sums.correct / weights, **terms}


def count_tokens(model: Model, batch: Batch) -> Metrics:
    """Counts the tokens of a batch: processed, with loss, and of raw text if the pipeline counted them."""
    raw = jnp.sum(batch["raw_tokens"]) if "raw_tokens" in batch else jnp.zeros((), jnp.int32)
    return {**model.count_tokens(batch), "raw_tokens": raw}


def count_by_task(batch: Batch, processed: jax.Array) -> jax.Array:
    """Returns the processed tokens of each task in the batch, int [tasks]."""
    return jnp.sum(batch["task_tokens"], axis=0) if "task_tokens" in batch else processed[None]
