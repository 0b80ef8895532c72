"""The training step: loss, gradient, update, counters. A pure function of (state, batch)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_lab.models.model import LossSums, Model, Params
from t5x_lab.networks.network import Batch, dropout_rate
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
    sum_over_slices: Callable[[Callable], Callable] = lambda function: lambda whole, rows: function(None, whole, rows),
    is_trained: Callable[[str], bool] = lambda name: True,
    statistics: Statistics = Statistics(),
    skip_bad_steps: bool = False,
    average_decay: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the step.

    Args:
      model: gives loss sums.
      optimizer: an optax transformation, of the parameters that are trained.
      learning_rates: (the optimizer's state, step) -> its rates, by the names of their metrics.
      seed: of dropout; the key of a step is derived from the seed and the step's number.
      microbatches: equal parts that the batch is processed in, one after the other; loss and gradient do not depend on it.
      sum_over_slices: adds gradients and losses over slices, see `Partitioner`.
      is_trained: whether the parameter of a name is; of the others no gradient is computed.
      statistics: what hooks measure.
      skip_bad_steps: a step whose loss or gradient is not finite changes no parameter, and the next one goes on; by default
        none does.
      average_decay: of `TrainState.average`, where it is kept.

    Returns:
      (state, batch) -> (state, metrics), where metrics are scalars: `loss` (cross-entropy per token with loss),
      `z_loss`, `accuracy`, the losses of a user's, `grad_norm`, the learning rates, `healthy`, and this step's counts of
      tokens; and `task_tokens` [tasks].
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[1], state.step)  # the other half made the parameters
        weights, normalizer = model.weights_and_normalizer(batch)
        trained = select(state.params, is_trained)
        frozen = select(state.params, lambda name: not is_trained(name))
        loss = lambda trained, *args: model.loss(merge(trained, frozen), *args)
        gradients = _gradients(model, loss, microbatches)
        grads, sums = sum_over_slices(gradients)((trained, normalizer, key), (dict(batch), weights))

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
        healthy = state.healthy & jnp.isfinite(sums.loss) & jnp.isfinite(sums.z_loss) & jnp.isfinite(grad_norm)
        # The old buffers are donated and metrics are read a step late, so a bad step is undone here.
        new = jax.tree.map(lambda new, old: jnp.where(healthy, new, old), new, state)
        if skip_bad_steps:  # the run goes on with the next step, and with it the schedule, which counts in the optimizer
            counts_on = lambda old, new: new if jnp.issubdtype(new.dtype, jnp.integer) and new.ndim == 0 else old
            slots = jax.tree.map(counts_on, new.opt_state, opt_state)
            new = dataclasses.replace(new, step=state.step + 1, counters=counters, opt_state=slots)
        metrics = {
            **per_token(sums),
            "grad_norm": grad_norm,
            **learning_rates(state.opt_state, state.step),
            "healthy": healthy,
            **counts,
        }
        own = statistics.measure(trained, grads, updates)
        return dataclasses.replace(new, healthy=jnp.ones((), bool) if skip_bad_steps else healthy), {**metrics, **own}

    return train_step


def moving_average(average: Params | None, params: Params, step: jax.Array, decay: float | None) -> Params | None:
    """decay * average + (1 - decay) * params, float32; at first with the smaller decay (1 + n) / (10 + n) after n steps.

    So that the first parameters do not weigh for 1 / (1 - decay) steps (TensorFlow's ExponentialMovingAverage).
    """
    if average is None or decay is None:
        return None
    new_share = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + new_share * (new - old), average, params)


def _gradients(model: Model, loss: Callable, microbatches: int) -> Callable[..., tuple[Params, LossSums]]:
    """(slice, (params, normalizer, key), (batch, weights)) -> gradient of the objective / normalizer, and the sums.

    Both are of the rows that a slice has, over all microbatches.
    """

    def objective(params, normalizer, batch, weights, key):
        sums = loss(params, batch, weights, key if dropout_rate(model.config.network) else None)
        return sums.objective / normalizer, sums

    gradient = jax.grad(objective, has_aux=True)

    def split(x):
        # Every microbatch takes rows from every device's part of the batch, so that none of them idles.
        return jnp.moveaxis(x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]), 1, 0)

    def gradients(number, whole, rows):
        params, normalizer, key = whole
        if number is not None:
            key = jax.random.fold_in(key, number)
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
    """(params, batch) -> (loss sums, counts of tokens), without dropout."""

    def eval_step(params: Params, batch: Batch) -> tuple[LossSums, Metrics]:
        return model.loss(params, batch), count_tokens(model, batch)

    return eval_step


def per_token(sums: LossSums) -> Metrics:
    """Means over the tokens with loss."""
    weights = jnp.maximum(sums.weights, 1e-6)
    own = {name: term / jnp.maximum(sums.objective_weights, 1e-6) for name, term in sums.terms.items()}
    return {"loss": sums.loss / weights, "z_loss": sums.z_loss / weights, "accuracy": sums.correct / weights, **own}


def count_tokens(model: Model, batch: Batch) -> Metrics:
    """Tokens of a batch: processed, with loss, and of raw text where the pipeline counted them."""
    raw = jnp.sum(batch["raw_tokens"]) if "raw_tokens" in batch else jnp.zeros((), jnp.int32)
    return {**model.count_tokens(batch), "raw_tokens": raw}


def count_by_task(batch: Batch, processed: jax.Array) -> jax.Array:
    """Int [tasks], tokens processed of each task that is mixed into the batch."""
    return jnp.sum(batch["task_tokens"], axis=0) if "task_tokens" in batch else processed[None]
