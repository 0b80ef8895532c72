"""What `commands` forks from has imported; see there."""

import seqio  # noqa: F401
import t5.data  # noqa: F401

import t5x_lab.data.pipeline
import t5x_lab.evaluation.task_metrics
import t5x_lab.runs.evaluate
import t5x_lab.runs.train
import t5x_lab.tasks  # noqa: F401
