"""What of a configuration follows from the task that is classified: its head, its metric, the steps of an epoch."""

import math
import os

import gin

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.data.config import by_name
from t5x_lab.networks.head import ClassificationHead
from t5x_lab.prompts.classification import Classification
from t5x_lab.prompts.config import Prompts

_COUNTED: dict[tuple[str, str, str], int | None] = {}  # by task, where records lie, and directory


def classification_of(task: str, prompts: Prompts) -> Classification:
    """What is classified by a task such as "classify_glue_cola".

    Raises:
      UserError: for a task that does not classify.
    """
    found = prompts.classification(task)
    if found is None:
        known = prompts.classified_names()
        raise UserError(
            f"MIXTURE_OR_TASK_NAME is {task!r}, of which is not known what is classified."
            f"{nearest(task or '', known)} There are {', '.join(known)}, and those of CLASSIFICATIONS."
        )
    return found


@gin.configurable(module="t5x_lab")
def head_of_task(
    task: str,
    prompts: Prompts,
    dropout_rate: float = 0.1,
    lm_weight: float = 0.5,
    lm_mean_over: str = "sequences",
    lm_on_wrong: bool = True,
) -> ClassificationHead:
    """The classification head for a task such as "classify_glue_cola".

    Args:
      task: MIXTURE_OR_TASK_NAME.
      prompts: of the run, which may have CLASSIFICATIONS.
      dropout_rate, lm_weight, lm_mean_over, lm_on_wrong: see `ClassificationHead`.
    """
    found = classification_of(task, prompts)
    return ClassificationHead(
        found.classes,
        found.combine,
        found.is_score,
        dropout_rate,
        lm_weight,
        lm_mean_over=lm_mean_over,
        lm_on_wrong=lm_on_wrong,
    )


@gin.configurable(module="t5x_lab")
def best_metric_of_task(task: str, prompts: Prompts, evaluation: str = "classify") -> dict[str, str]:
    """`SaveCheckpointConfig.best_metric` for a task such as "classify_glue_cola": the first of its metrics.

    Args:
      task, prompts: of the run.
      evaluation: the name of the one that measures it.
    """
    return {f"{evaluation}/{task}/{classification_of(task, prompts).metrics[0]}": "highest"}


@gin.configurable(module="t5x_lab")
def steps_of_epochs(epochs: float, task: str, prompts: Prompts, batch_size: int, examples: int | None = None) -> int:
    """Steps in which the training records of a task such as "classify_glue_cola" are read so many times.

    Args:
      epochs: how many; 1 for %EVAL_PERIOD.
      task, prompts, batch_size: of the run.
      examples: training records; None = counted.
    """
    if examples is None:
        examples = _counted(task, prompts)
    if not examples:
        raise UserError(f'Nobody knows how many training records "{task}" has. Say it: --gin.steps_of_epochs.examples=NUMBER')
    return max(1, math.ceil(epochs * examples / batch_size))


def _counted(task: str, prompts: Prompts) -> int | None:
    """The task's training records; counted once, for several macros ask."""
    from t5x_lab.prompts.classified import training_records

    key = task, by_name(prompts), os.getcwd()
    if key not in _COUNTED:
        _COUNTED[key] = training_records(classification_of(task, prompts), prompts)
    return _COUNTED[key]


def fixed_by_task(text: str, task: str | None, train_steps: int | None, eval_period: int) -> list[str]:
    """Lines of gin with what followed from the task in the configuration `text`: its head, and the steps that its records were
    counted for, which who uses the run later may not have."""
    head = f"{head_of_task.__name__}()" in text  # other tasks that are evaluated have not another one
    of_head = [f'head_of_task.task = "{task}"'] if head else []
    counted = f"{steps_of_epochs.__name__}()" in text
    return [*of_head, *([f"TRAIN_STEPS = {train_steps}", f"EVAL_PERIOD = {eval_period}"] if counted else [])]
