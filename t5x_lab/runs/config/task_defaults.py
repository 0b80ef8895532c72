"""Defaults that follow from a classification task: head, best metric, steps per epoch. Bound by runs/classify.gin."""

import math
import os

import gin

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.data.config import stable_repr
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.prompts.classification.config import Classification
from t5x_lab.prompts.prompts import Prompts
from t5x_lab.runs.data_layer import load_data_layer

_RECORD_COUNTS: dict[tuple[str, str, str], int | None] = {}  # by task, record location and working directory


def find_classification(task: str, prompts: Prompts) -> Classification:
    """Returns the classification task of a name such as "classify_glue_cola".

    Raises:
      UserError: for any other task.
    """
    classification = prompts.classification(task)
    if classification is None:
        names = prompts.classification_names()
        raise UserError(
            f"MIXTURE_OR_TASK_NAME is {task!r}, which is not a classification task.{did_you_mean(task or '', names)} "
            f"Classification tasks are {', '.join(names)}, and those of CLASSIFICATIONS."
        )
    return classification


@gin.configurable(module="t5x_lab")
def task_head(
    task: str,
    prompts: Prompts,
    dropout_rate: float = 0.1,
    lm_weight: float = 0.5,
    lm_mean_over: str = "sequences",
    lm_on_wrong: bool = True,
) -> ClassificationHead:
    """Returns the classification head for a task such as "classify_glue_cola".

    Args:
      task: MIXTURE_OR_TASK_NAME.
      prompts: prompt settings of the run, which may have CLASSIFICATIONS.
      dropout_rate, lm_weight, lm_mean_over, lm_on_wrong: see `ClassificationHead`.
    """
    classification = find_classification(task, prompts)
    return ClassificationHead(
        classification.classes,
        classification.combine,
        classification.is_score,
        dropout_rate,
        lm_weight,
        lm_mean_over=lm_mean_over,
        lm_on_wrong=lm_on_wrong,
    )


@gin.configurable(module="t5x_lab")
def task_best_metric(task: str, prompts: Prompts, evaluation: str = "classify") -> dict[str, str]:
    """Returns `SaveCheckpointConfig.best_metric` for a task such as "classify_glue_cola": the first of its metrics.

    Args:
      task, prompts: see `task_head`.
      evaluation: name of the evaluation that computes the metric.
    """
    return {f"{evaluation}/{task}/{find_classification(task, prompts).metrics[0]}": "highest"}


@gin.configurable(module="t5x_lab")
def steps_of_epochs(epochs: float, task: str, prompts: Prompts, batch_size: int, examples: int | None = None) -> int:
    """Returns the number of steps of some epochs over the training records of a task such as "classify_glue_cola".

    Args:
      epochs: number of epochs, 1 for %EVAL_PERIOD.
      task, prompts: see `task_head`.
      batch_size: BATCH_SIZE.
      examples: number of training records. None = counted.
    """
    if examples is None:
        examples = _count_records(task, prompts)
    if not examples:
        raise UserError(f'The number of training records of "{task}" is unknown. Set --gin.steps_of_epochs.examples=NUMBER.')
    return max(1, math.ceil(epochs * examples / batch_size))


def _count_records(task: str, prompts: Prompts) -> int | None:
    """Returns the number of the task's training records, counted once for several macros."""
    load_data_layer()
    from t5x_lab.prompts.classification.task import count_training_records  # needs TensorFlow

    key = task, stable_repr(prompts), os.getcwd()
    if key not in _RECORD_COUNTS:
        _RECORD_COUNTS[key] = count_training_records(find_classification(task, prompts), prompts)
    return _RECORD_COUNTS[key]


def frozen_task_bindings(text: str, task: str | None, train_steps: int | None, eval_period: int) -> list[str]:
    """Returns gin bindings that fix what followed from the task: its head, and the steps for which its records were counted.

    A later user of the run may not have the records, and may evaluate other tasks with the same head.

    Args:
      text: the configuration.
      task: MIXTURE_OR_TASK_NAME.
      train_steps, eval_period: values of the run.
    """
    head = [f'task_head.task = "{task}"'] if f"{task_head.__name__}()" in text else []
    is_counted = f"{steps_of_epochs.__name__}()" in text
    return [*head, *([f"TRAIN_STEPS = {train_steps}", f"EVAL_PERIOD = {eval_period}"] if is_counted else [])]
