"""The `Evaluation` protocol, `EvaluationResult`, and the base classes of the library's evaluations. Free of TensorFlow."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from t5x_lab.config.checks import check_positive, check_types, implements
from t5x_lab.config.errors import UserError, check_choice
from t5x_lab.config.macros import macro

WEIGHTS = ("last", "average", "each")


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation at one step.

    Attributes:
      metrics: numbers by task, then by metric name.
      outputs: JSON objects by task, one per example.
      media: non-numeric values by task and name, such as `seqio.metrics.Text`, `Image` or `Histogram`.
      report: a JSON object computed from several tasks, such as an average.
      failures: the reason, by task, why a task has no metrics.
    """

    metrics: Mapping[str, Mapping[str, float | None]]
    outputs: Mapping[str, list[dict]] = dataclasses.field(default_factory=dict)
    media: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)


Evaluator = Callable[[Any], EvaluationResult | Mapping[str, Mapping[str, float | None]]]


class Evaluation(Protocol):
    """An entry of EVALS. A user's class need not inherit from it.

    It may have the attributes `period`, `steps`, `at_start` and `weights` of `TaskEvaluation`. Without them it runs every
    EVAL_PERIOD steps on the last weights.
    """

    name: str

    def prepare(self, model: Any) -> Evaluator | None:
        """Prepares the evaluation once, before training begins. Mistakes in its settings are raised here.

        Args:
          model: a `t5x_lab.runs.model.run.Run` without parameters.

        Returns:
          A function from a `Run` with parameters to an `EvaluationResult`, or to metrics by task and name. None if there is
          nothing to evaluate. The function may have an attribute `settings`, a dictionary of everything its numbers depend
          on. Results of different settings are kept in different folders.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledEvaluation:
    """Base class of the library's evaluations: the name and the schedule.

    Attributes:
      name: name of the result folder, evals/<name>. In metrics.jsonl the split is <name>/<task>.
      period: steps between evaluations. The last step is evaluated too. None = not during training.
      steps: steps after which to evaluate. If set, it replaces `period`.
      at_start: whether to evaluate before the first step.
      weights: "last", the moving "average" (AVERAGE_DECAY), or "each": both if the run keeps an average. The second result is
        then called <name>_average.
    """

    name: str
    period: int | None = dataclasses.field(default=1000, metadata=macro("EVAL_PERIOD"))
    steps: tuple[int, ...] = ()
    at_start: bool = False
    weights: str = "last"

    def __post_init__(self):
        check_types(self)
        check_choice(f"{type(self).__name__}.weights", self.weights, WEIGHTS)
        check_positive(self, "period")
        if not all(isinstance(step, int) and step >= 0 for step in self.steps):
            raise UserError(f"{type(self).__name__}.steps is {self.steps}. It must hold numbers of steps, 0 or more.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvaluation(ScheduledEvaluation):
    """Base class of evaluations on SeqIO tasks.

    Attributes:
      task: a task or mixture. None = the run's own.
      split: split of the tasks. None = DataConfig.eval_split.
      lengths: tokens of each feature. None = TASK_FEATURE_LENGTHS.
      num_examples: number of examples of each task, from the first. None = all.
      batch_size: examples per batch.
    """

    task: str | None = None
    split: str | None = None
    lengths: dict[str, int] | None = None
    num_examples: int | None = None
    batch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_examples", "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputEvaluation(TaskEvaluation):
    """Base class of evaluations of model outputs: predictions and scores.

    Attributes:
      truncate_inputs: where to truncate inputs longer than `lengths`. "right" truncates before the EOS token, as training does.
        "left" keeps the end, so that a question stays. None does not truncate, and predictions are at most as long as the
        longest target, as in T5X.
      outputs: whether to write the outputs of each example to inference/<name>/<task>-<step>.jsonl.
      batch_size: texts per batch. Batches of long texts are smaller.
    """

    truncate_inputs: str | None = "right"
    outputs: bool = False
    batch_size: int | None = 32

    def __post_init__(self):
        super().__post_init__()
        if self.truncate_inputs is not None:
            check_choice(f"{type(self).__name__}.truncate_inputs", self.truncate_inputs, ("right", "left"))


def check_evaluations(evals: Sequence[Any]) -> None:
    """Raises a `UserError` for an invalid entry of EVALS, an invalid name, or two entries of the same name."""
    names: list[str] = []
    for entry in evals:
        if not implements(entry, Evaluation):
            described = f"the class {entry.__name__}" if isinstance(entry, type) else repr(entry)
            raise UserError(
                f"EVALS contains {described}. An entry is an object with a name and a function prepare(model), such as "
                "@mine/LossEvaluation(). See t5x_lab.protocols.Evaluation."
            )
        name = entry.name
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
            raise UserError(
                f"EVALS contains an evaluation with the name {name!r}. The name is also a folder name: use letters, digits, "
                '"_", "-" and ".".'
            )
        check_choice(f'The weights of the evaluation "{name}"', getattr(entry, "weights", "last"), WEIGHTS)
        steps = getattr(entry, "steps", ())
        if not isinstance(steps, tuple | list):
            raise UserError(f'The evaluation "{name}" has the steps {steps!r}. They must be a tuple of numbers.')
        period = getattr(entry, "period", None)
        if period is not None and (not isinstance(period, int) or period < 1):
            raise UserError(f'The evaluation "{name}" has the period {period!r}. It must be a number of steps, at least 1.')
        folders = [name, *([f"{name}_average"] if getattr(entry, "weights", "last") == "each" else [])]
        duplicate = next((folder for folder in folders if folder in names), None)
        if duplicate:
            raise UserError(
                f'EVALS contains two evaluations with the name "{duplicate}", which would write to the same folder. Rename '
                f"one, for example --gin.other/{type(entry).__name__}.name=other with @other/{type(entry).__name__}()."
            )
        names += folders
