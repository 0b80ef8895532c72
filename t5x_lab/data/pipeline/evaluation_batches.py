"""Evaluation batches: a split of one task, the same in every iteration."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from t5x_lab.data.config import DataConfig
from t5x_lab.data.pipeline.examples import add_mixture_features, mixture_features
from t5x_lab.data.pipeline.failures import report_failing_record
from t5x_lab.data.pipeline.reading import read_split
from t5x_lab.data.pipeline.rows import convert, dataset_options
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.training.batches import HostBatch, Rows


class EvalBatches:
    """This process's rows of the batches of one task's `eval_split`, the same in every iteration.

    Every process reads the whole split, so that rows and batches do not depend on the number of processes. The last batch is
    padded with rows without loss. If all batches fit into `cache_bytes`, they are read once. Else the pipeline is rebuilt for
    each iteration, so that random choices repeat.

    Args:
      mixture, component: the task and its mixture.
      config: data configuration.
      rows: rows of this process. Default: all.
      num_batches: maximum number of batches. None = `config.eval_steps`.
      num_examples: number of examples, from the first. None = all.
      cache_bytes: bytes of batches to keep in memory.
    """

    def __init__(
        self,
        mixture: ResolvedMixture,
        component: Component,
        config: DataConfig,
        rows: Rows | None = None,
        num_batches: int | None = None,
        num_examples: int | None = None,
        cache_bytes: int = 0,
    ):
        self._mixture, self._component, self._config, self.split = mixture, component, config, config.eval_split
        self._rows = (rows or Rows.all(config.batch_size)).held
        self._num_batches, self._num_examples = num_batches or config.eval_steps, num_examples
        self._cache_bytes = cache_bytes
        self._cache: list[HostBatch] | None = None

    def __iter__(self) -> Iterator[HostBatch]:
        if self._cache is not None:
            yield from self._cache
            return
        batches, size = [], 0
        for batch in self._read():
            size += sum(x.nbytes for x in batch.values())
            if size <= self._cache_bytes:
                batches.append(batch)
            else:
                batches.clear()
            yield batch
        self._cache = batches if size <= self._cache_bytes else None

    def _read(self) -> Iterator[HostBatch]:
        size = self._config.batch_size
        pad = lambda x: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))
        with report_failing_record([self._component], self.split):
            for batch in self._dataset().as_numpy_iterator():
                yield {name: pad(x)[self._rows] for name, x in batch.items()}

    def _dataset(self) -> tf.data.Dataset:
        component, mixture, config = self._component, self._mixture, self._config
        dataset = read_split(component, self.split, trim=not component.is_text)
        dataset = dataset if self._num_examples is None else dataset.take(self._num_examples)
        features = mixture_features([component], mixture.architecture, config)
        examples = add_mixture_features(dataset, component, None, features, mixture.architecture)
        batches = convert(examples, mixture, [component], config, config.batch_size, drop_remainder=False)
        return batches.take(self._num_batches).with_options(dataset_options())


def eval_batches(mixture: ResolvedMixture, component: Component, config: DataConfig) -> Iterator[HostBatch]:
    """Yields all rows of at most `config.eval_steps` batches of one task's `eval_split`."""
    return iter(EvalBatches(mixture, component, config))
