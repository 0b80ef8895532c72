"""Modules that the fork server of `commands` imports before it forks."""

import gc

import bokeh.embed
import bokeh.plotting  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import seqio  # noqa: F401
import t5.data  # noqa: F401

import t5x_lab.data.pipeline.batches
import t5x_lab.evaluation.metrics.task_metrics
import t5x_lab.runs.evaluate.evaluations
import t5x_lab.runs.train.train
import t5x_lab.tasks  # noqa: F401

gc.collect()
gc.freeze()  # garbage collections in forked processes neither visit nor copy what is imported here
