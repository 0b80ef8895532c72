"""What a run's list of evaluations holds: the protocol of one, and those of the library. Imports nothing heavy."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from t5x_lab.config.checks import check_types, in_range, positive
from t5x_lab.config.errors import UserError, nearest, one_of
from t5x_lab.config.macros import macro
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig

WEIGHTS = ("last", "average", "each")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an evaluation found.

    Attributes:
      metrics: numbers by task, then by name.
      outputs: by task, one object an example, as JSON has them.
      media: by task and name, what is no number: `seqio.metrics` values such as `Text`, `Image` or `Histogram`.
      report: what the numbers of several tasks say together, as JSON has it.
      failures: by task, in a sentence, why there are no numbers.
    """

    metrics: Mapping[str, Mapping[str, float | None]]
    outputs: Mapping[str, list[dict]] = dataclasses.field(default_factory=dict)
    media: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)


Measure = Callable[[Any], Measured | Mapping[str, Mapping[str, float | None]]]


@runtime_checkable
class Evaluation(Protocol):
    """An entry of EVALS. A user's class need not inherit.

    It may also say when it is due and with which weights, by the attributes `period`, `steps`, `at_start` and `weights` of
    `TaskEvaluation`; without them it is due at EVAL_PERIOD, with the last weights.
    """

    name: str

    def prepare(self, model: Any) -> Measure | None:
        """Makes ready, once, before training begins; what is wrong with the evaluation is found here.

        Args:
          model: a `t5x_lab.runs.run.Run` that has no parameters yet.

        Returns:
          a function from a `Run` with parameters to metrics by task, then by name, or to `Measured`; None where there is
          nothing to measure. It may have `settings`, a dictionary of what its numbers depend on: results of other settings are
          kept apart.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledEvaluation:
    """What the library's evaluations have in common: a name, and when they are due.

    Attributes:
      name: of its results, evals/<name>/<step>.json; in metrics.jsonl the split is <name>/<task>.
      period: steps between two evaluations while training, after the last step too; None = none while training.
      steps: the steps to evaluate after, instead of every `period`.
      at_start: whether to evaluate before the first step, too.
      weights: the "last" ones, their moving "average" (AVERAGE_DECAY), or "each", that is the last ones, and where a run keeps
        an average that too, as <name>_average.
    """

    name: str
    period: int | None = dataclasses.field(default=1000, metadata=macro("EVAL_PERIOD"))
    steps: tuple[int, ...] = ()
    at_start: bool = False
    weights: str = "last"

    def __post_init__(self):
        check_types(self)
        one_of(f"{type(self).__name__}.weights", self.weights, WEIGHTS)
        positive(self, "period")
        if not all(isinstance(step, int) and step >= 0 for step in self.steps):
            raise UserError(f"{type(self).__name__}.steps is {self.steps}; give numbers of steps, from 0.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEvaluation(ScheduledEvaluation):
    """What evaluations on SeqIO's tasks have in common.

    Attributes:
      task: a task or mixture; None = the run's own.
      split: of the tasks; None = DataConfig.eval_split.
      lengths: of the tasks' features; None = TASK_FEATURE_LENGTHS.
      num_examples: the first N of each task; None = all.
      batch_size: examples at a time.
    """

    task: str | None = None
    split: str | None = None
    lengths: dict[str, int] | None = None
    num_examples: int | None = None
    batch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_examples", "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossEvaluation(TaskEvaluation):
    """The teacher-forced loss of each task.

    Attributes:
      num_batches: the first N of each task; None = DataConfig.eval_steps.
      batch_size: rows of a batch; None = BATCH_SIZE.
    """

    name: str = "eval"
    weights: str = "each"
    num_batches: int | None = None

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_batches")

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.loss import LossOfTasks

        return LossOfTasks.of(self, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputEvaluation(TaskEvaluation):
    """What evaluations of a model's outputs have in common.

    Attributes:
      cut_inputs: where inputs longer than `lengths` are cut: on the "right", before their end token, as in training; on the
        "left", so that the question stays; or None, nowhere, as T5X evaluates.
      outputs: whether each example's outputs are kept, with its inputs and targets: inference/<name>/<task>-<step>.jsonl.
      batch_size: texts at a time, fewer of long ones.
    """

    cut_inputs: str | None = "right"
    outputs: bool = False
    batch_size: int | None = 32

    def __post_init__(self):
        super().__post_init__()
        if self.cut_inputs is not None:
            one_of(f"{type(self).__name__}.cut_inputs", self.cut_inputs, ("right", "left"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsEvaluation(OutputEvaluation):
    """The metrics that SeqIO tasks define themselves, on what the model writes and on its scores of the targets.

    Attributes:
      decoding: how predictions are written: greedily, drawn, or by a beam search. Both have a `logits_fn`.
      seed: of what is drawn.
      max_tokens: most tokens of a prediction; None = the length of the task's targets.
      beginning: what every prediction begins with; the model goes on from there.
    """

    name: str = "infer"
    decoding: SamplingConfig | BeamConfig = SamplingConfig()
    seed: int = 0
    max_tokens: int | None = None
    beginning: str = ""

    def __post_init__(self):
        super().__post_init__()
        positive(self, "max_tokens")
        in_range(self, "seed", 0, 2**32)

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.task_metrics import TaskMetrics

        return TaskMetrics.of(self, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingEvaluation(OutputEvaluation):
    """How often the right one of several choices is the likeliest; see `t5x_lab.evaluation.rank`.

    Tasks have the features of `t5.data.preprocessors.rank_classification`, a row for each choice: `inputs`, `targets`, `idx`
    (numbers of the question and the choice), `is_correct`, and perhaps `weight`. A task may say its data set and its prompt, by
    attributes `data_set` and `prompt`; else the mixtures that a mixture is made of are data sets, and their tasks the prompts.

    Attributes:
      choose_on: another split, on which the best prompt of each data set is chosen, whose accuracy is reported too; FLAN's is
        "validation", for a `split` of "test".
    """

    name: str = "rank"
    choose_on: str | None = None

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.ranking import RankedTasks

        return RankedTasks.of(self, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationEvaluation(TaskEvaluation):
    """The metrics of what a classification head predicts, and its loss; of tasks such as "classify_glue_cola".

    Attributes:
      outputs: whether each example's prediction is kept: inference/<name>/<task>-<step>.jsonl.
      batch_size: examples at a time.
    """

    name: str = "classify"
    outputs: bool = False
    batch_size: int | None = 32

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.classification import ClassifiedTasks

        return ClassifiedTasks.of(self, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeEvaluation(ScheduledEvaluation):
    """What the model knows before it is fine-tuned, by `t5x_lab.evaluation.probes`; data sets lie where RECORDS says.

    Attributes:
      probes: objects such as @Blimp(), or your own `Probe`s.
      num_examples: the first N of each data set, and for a threshold; None = all.
      batch_size: texts at a time.
    """

    name: str = "probes"
    probes: tuple = ()
    num_examples: int | None = None
    batch_size: int = 32

    def __post_init__(self):
        super().__post_init__()
        positive(self, "num_examples", "batch_size")

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.probing import Probes

        return Probes(self, model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesEvaluation(ScheduledEvaluation):
    """What the model writes behind prompts: no numbers, but texts for the console, TensorBoard and reports.

    Attributes:
      prompts: what it goes on from; or the inputs of an encoder.
      max_tokens: most tokens of a text.
      temperature, top_k, top_p: see `SamplingConfig`; 0 is greedy.
      seed: of what is drawn.
    """

    name: str = "samples"
    prompts: tuple[str, ...] = ()
    max_tokens: int = 40
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        positive(self, "max_tokens")
        in_range(self, "seed", 0, 2**32)
        SamplingConfig(self.temperature, self.top_k, self.top_p)
        if not self.prompts:
            raise UserError('SamplesEvaluation.prompts is empty; give some: ("The people", "We must").')

    def prepare(self, model: Any) -> Measure | None:
        from t5x_lab.evaluation.samples import Samples

        return Samples(self, model)


def check_evaluations(evals: Sequence[Any]) -> None:
    """Raises a `UserError` for what is no evaluation, a name that is no folder's, and two of one name."""
    names: list[str] = []
    for entry in evals:
        if isinstance(entry, type) or not isinstance(entry, Evaluation):
            shown = f"the class {entry.__name__}" if isinstance(entry, type) else repr(entry)
            raise UserError(
                f"EVALS has {shown}. An entry is an object with a name and a function prepare(model), such as "
                "@mine/LossEvaluation(); see t5x_lab.protocols.Evaluation."
            )
        name = entry.name
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
            raise UserError(
                f"EVALS has an evaluation of the name {name!r}; its results lie in a folder of that name: use letters, digits, "
                '"_", "-" and ".".'
            )
        one_of(f'The weights of the evaluation "{name}"', getattr(entry, "weights", "last"), WEIGHTS)
        if not isinstance(getattr(entry, "steps", ()), tuple | list):
            raise UserError(f'The evaluation "{name}" has the steps {entry.steps!r}; give a tuple of numbers.')  # type: ignore[attr-defined]
        period = getattr(entry, "period", None)
        if period is not None and (not isinstance(period, int) or period < 1):
            raise UserError(f'The evaluation "{name}" has the period {period!r}; it is a number of steps, at least 1.')
        made = [name, *([f"{name}_average"] if getattr(entry, "weights", "last") == "each" else [])]
        twice = next((each for each in made if each in names), None)
        if twice:
            raise UserError(
                f'EVALS has two evaluations of the name "{twice}", whose results would lie in one folder. Give one another '
                f"name, for example --gin.other/{type(entry).__name__}.name=other with @other/{type(entry).__name__}()."
            )
        names += made


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends a training whose evaluation gets no better.

    Attributes:
      metric: "<name>/<task>/<metric>" of an evaluation of EVALS, such as "eval/sotu_full_lm/loss".
      patience: evaluations without a new best one after which it ends.
      best_is: "lowest" or "highest".
      min_delta: what a new best one is better by, at least.
    """

    metric: str
    patience: int = 5
    best_is: str = "lowest"
    min_delta: float = 0.0

    def __post_init__(self):
        check_types(self)
        positive(self, "patience")
        one_of("EarlyStopping.best_is", self.best_is, ("lowest", "highest"))
        if not self.min_delta >= 0:
            raise UserError(f"EarlyStopping.min_delta is {self.min_delta}; it must not be negative.")

    def is_over(self, values: list[float]) -> bool:
        """Whether the last `patience` of these values, in the order of steps, are none of them a new best one."""
        sign = 1.0 if self.best_is == "highest" else -1.0
        best, since = -float("inf"), 0
        for value in values:
            is_new = sign * value > best + self.min_delta if best > -float("inf") else value == value
            best, since = (sign * value, 0) if is_new else (best, since + 1)
        return since >= self.patience and best > -float("inf")  # what was never measured ends nothing


def check_metric_name(what: str, metric: str, names: list[str]) -> None:
    """Raises a `UserError` unless the metric is called "<name>/<task>/<metric>", of an evaluation of one of these names."""
    parts = metric.split("/", 2)
    if len(parts) < 3:
        raise UserError(f'{what} is "{metric}"; it is <name>/<task>/<metric>, such as "eval/sotu_full_lm/loss".')
    if parts[0] not in names:
        raise UserError(
            f'{what} is "{metric}", but EVALS has no evaluation "{parts[0]}".{nearest(parts[0], names)} It has '
            f"{', '.join(names) or 'none'}."
        )
