"""Rates at which the examples of a mixture's tasks are sampled."""

import dataclasses

import numpy as np
import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.cache.reading import CachedFiles, split_source
from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.examples import add_mixture_features, mixture_features, text_features
from t5x_lab.data.pipeline.reading import MAX_SEPARATE_TASKS, task_shard
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture

LENGTH_SAMPLE = 1_000  # examples of a task whose mean length is computed, for rates in tokens


def example_rates(mixture: ResolvedMixture, config: DataConfig) -> list[float]:
    """Returns the rate at which examples of each training component are sampled. Rates need not sum to 1.

    Tasks without records have rate 0.

    Raises:
      UserError: if all rates are 0.
    """
    components = mixture.train_components
    if len(components) == 1:
        return [1.0]
    empty = {source for source in {component.task.source for component in components} if _is_empty(source, config.split)}
    names = [component.task.name for component in components if component.task.source in empty]
    if names:
        log(f"Tasks of {mixture.name} without training records are skipped: {', '.join(names)}.")
    rates = [
        0.0 if component.task.source in empty else rate for component, rate in zip(components, mixture.rates(), strict=True)
    ]
    if not any(rates):
        raise UserError(f'The mixture "{mixture.name}" has no training records. Add some, or use another mixture.')
    if config.rates_of == "examples":
        return rates
    length = lambda component: _mean_length(component, mixture.architecture, config)
    return [rate and rate / length(component) for component, rate in zip(components, rates, strict=True)]


def _is_empty(source: seqio.DataSource, split: str) -> bool:
    source = split_source(source, split)
    if isinstance(source, CachedFiles) and (count := source.num_input_examples(split)) is not None:
        return not count  # reading the first example of hundreds of tasks would take half of the time to the first batch
    return not list(source.get_dataset(split=split, shuffle=False).take(1))


def _mean_length(component: Component, architecture: str, config: DataConfig) -> float:
    """Returns the mean tokens of an example, estimated from the first examples of the task."""
    one_shard = dataclasses.replace(config, shards=1)
    examples = task_shard(component, one_shard, 0, 0, MAX_SEPARATE_TASKS + 1).take(LENGTH_SAMPLE)
    features = mixture_features([component], architecture, config)
    sizes = [
        sum(tf.size(x[name]) for name in text_features(component, architecture) if name in x).numpy()
        for x in add_mixture_features(examples, component, None, features, architecture)
    ]
    return max(float(np.mean(sizes or [0])), 1.0)
