"""The metrics that SeqIO tasks define, measured by SeqIO's own Evaluator on what a model generates and scores."""

import functools
import itertools
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import raised_in, told
from t5x_lab.data.cutting import cut_left, cut_right
from t5x_lab.data.failures import naming_what_fails
from t5x_lab.data.mixture import Part
from t5x_lab.data.tasks import name_in_seqio
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.evaluation.benchmarks import AVERAGES, averages, report
from t5x_lab.evaluation.config import Measured, MetricsEvaluation, OutputEvaluation
from t5x_lab.evaluation.examples import text_of
from t5x_lab.evaluation.tasks import EvaluatedTasks, evaluated_tasks
from t5x_lab.observe.console import say

_KINDS = seqio.metrics.ModelOutputType


class _Unconverted(seqio.PassThroughFeatureConverter):
    """Examples as their task makes them; the model pads and batches."""

    TASK_FEATURES: ClassVar[dict] = {}  # what SeqIO's Evaluator asks for, and its own pass-through converter lacks
    pack = False


class TaskMetrics:
    """Measures models on the same examples every time.

    Args:
      found: the tasks.
      how: see there. Longer inputs are cut as it says; their number is said.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, found: EvaluatedTasks, how: MetricsEvaluation):
        self._found, self._how, self.settings = found, how, found.settings(how)
        self._made: dict[str, tuple[seqio.Evaluator, list[dict]]] = {}

    @classmethod
    def of(cls, how: MetricsEvaluation, model: Any) -> "TaskMetrics | None":
        found = evaluated_tasks(how, model)
        found = found.only(lambda part: bool(part.task.metric_objs), "metrics (metric_fns or metric_objs)")
        if not found.parts and how.period:
            say(
                f'Evaluation "{how.name}" is due every {how.period} steps, but no task of "{found.tasks.name}" has a split '
                f'"{found.data.eval_split}" and metrics (metric_fns).'
            )
        if not model.generates:
            left_out = [part.task.name for part in found.parts if _needs_generation(part)]
            if left_out:
                say(f"The metrics of {', '.join(left_out)} need a network that decodes step by step; they are not measured.")
            found = found.only(lambda part: not _needs_generation(part), "metrics that a network without prefill can give")
        return cls(found, how) if found.parts else None

    def __call__(self, model: Any) -> Measured:
        """The tasks' metrics, and what is no number among them; a task whose examples or metrics fail is among the failures."""
        metrics: dict[str, dict] = {}
        media: dict[str, dict] = {}
        lines: dict[str, list] = {}
        failures: dict[str, str] = {}
        for part, (evaluator, examples) in self._found.read_each(self._examples, failures, "its metrics are not measured"):
            name = part.task.name
            # What devices do is done outside of `try`: where that fails, all processes end together.
            outputs = _Outputs(model, part, examples, self._how)
            outputs.make({metric.model_output_type for metric in part.task.metric_objs})
            try:
                found = _measured(evaluator, part.task.name, outputs, model.step)
            except Exception as error:
                evaluator._metrics_future = None  # SeqIO would wait for it for ever, the next time
                cause = error.__cause__ or error
                failures[name] = f'The metrics of task "{name}" failed: {raised_in(cause) or told(cause)}'
            else:
                values = {key: _number(value) for key, value in found.items()}
                metrics[name] = {key: value for key, value in values.items() if value is not None}
                media[name] = {key: found[key] for key, value in values.items() if value is None}
            if outputs.cut:
                say(f'{outputs.cut} of {len(examples)} inputs of task "{name}" were cut to {outputs.most} tokens.')
            if self._how.outputs:
                lines[name] = outputs.lines(part.task)
        benchmarks = report((part.task for part in self._found.parts), metrics)
        if found_averages := averages(benchmarks):
            metrics[AVERAGES] = found_averages
        reported = {"benchmarks": benchmarks} if benchmarks else {}
        return Measured(metrics, lines, {task: of for task, of in media.items() if of}, reported, failures)

    def _examples(self, part: Part) -> tuple[seqio.Evaluator, list[dict]]:
        """SeqIO's evaluator of a task, and what it evaluates on; made once."""
        name, data = part.task.name, self._found.data
        if name not in self._made:
            with naming_what_fails([part], data.eval_split):
                evaluator = self._evaluator(part)
                self._made[name] = evaluator, list(evaluator.cached_task_datasets[name].as_numpy_iterator())
        return self._made[name]

    def _evaluator(self, part: Part) -> seqio.Evaluator:
        data = self._found.data
        task = part.task
        options = dict(
            feature_converter=_Unconverted(),
            eval_split=data.eval_split,
            num_examples=self._how.num_examples,
            async_compute_metrics=False,
        )
        try:
            return seqio.Evaluator(name_in_seqio(task), **options)
        except ValueError as error:
            if "sequence_length" not in str(error):
                raise UserError(f'Task "{task.name}" cannot be evaluated: {error}') from error
            if self._how.cut_inputs != "right":
                say(f'A preprocessor of task "{task.name}" needs lengths; SeqIO cuts its inputs to TASK_FEATURE_LENGTHS.')
            return seqio.Evaluator(name_in_seqio(task), sequence_length=part.sequence_length, **options)


def _needs_generation(part: Part) -> bool:
    """Whether some metrics are on what a model writes."""
    return any(metric.model_output_type in (_KINDS.PREDICTION, _KINDS.PREDICTION_WITH_AUX) for metric in part.task.metric_objs)


def _measured(evaluator: seqio.Evaluator, task: str, outputs: "_Outputs", step: int) -> dict[str, Any]:
    metrics, _ = evaluator.evaluate(
        compute_metrics=True,
        step=step,
        model_fns={
            _KINDS.PREDICTION: lambda unused: outputs.predictions(),
            _KINDS.PREDICTION_WITH_AUX: lambda unused: (outputs.predictions(), {"scores": outputs.log_probs()}),
            _KINDS.SCORE: lambda unused: outputs.scores(),
            _KINDS.SCORE_WITH_INTERMEDIATES: lambda unused: (outputs.scores(), {}),
        },
    )
    return metrics.result()[task]


def _number(metric: Any) -> float | None:
    """The number that a metric is; None of a text, an image and the like."""
    value = getattr(metric, "value", metric)
    if isinstance(value, numbers.Real):
        return float(value)
    is_one = hasattr(value, "dtype") and getattr(value, "shape", None) in ((), (1,)) and np.asarray(value).dtype.kind in "fiub"
    return float(np.asarray(value).reshape(())) if is_one else None


class CutInputs:
    """Inputs of examples cut as an evaluation says.

    Args:
      model, examples, how: see `TaskMetrics`.
      part: the task whose examples they are.
      written: tokens that the model writes or scores behind them.

    Attributes:
      ids: the inputs, behind what stands before all of the task's.
      most: tokens that they are cut to; None where nothing cuts them.
      cut: how many were.
    """

    def __init__(self, model: Any, part: Part, examples: Sequence[dict], how: OutputEvaluation, written: int):
        whole = [example["inputs"].tolist() if "inputs" in example else [] for example in examples]
        before = part.before_inputs
        positions = model.max_positions and model.max_positions - len(before) - (0 if model.has_encoder else written)
        self.most = part.sequence_length.get("inputs") if how.cut_inputs else positions
        cut = cut_left if how.cut_inputs == "left" else functools.partial(cut_right, ends=model.end_ids)
        found = [cut(ids, self.most) for ids in whole]
        self.cut = sum(len(a) < len(b) for a, b in zip(found, whole, strict=True))
        self.ids = [[*before, *ids] for ids in found]


class _Outputs:
    """What one model gives for the examples of one task, asked for as SeqIO does: pairs of (number, output)."""

    def __init__(self, model: Any, part: Part, examples: Sequence[dict], how: MetricsEvaluation):
        self._model, self._examples, self._how = model, examples, how
        self._targets = [example["targets"].tolist() for example in examples]
        self._max_tokens = how.max_tokens or part.sequence_length.get("targets") or max(map(len, self._targets))
        self._beginning = model.vocabulary.encode(how.beginning) if how.beginning else []
        inputs = CutInputs(model, part, examples, how, self._max_tokens + len(self._beginning))
        self._inputs, self.most, self.cut = inputs.ids, inputs.most, inputs.cut

    def make(self, kinds: set) -> None:
        """Asks the model for all that metrics of these kinds need."""
        if kinds & {_KINDS.PREDICTION, _KINDS.PREDICTION_WITH_AUX}:
            self.written  # noqa: B018  (a cached property)
        if kinds & {_KINDS.SCORE, _KINDS.SCORE_WITH_INTERMEDIATES}:
            self.scored  # noqa: B018

    @functools.cached_property
    def generated(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [N, max_tokens], padding after the end token; their log-probabilities, or beams' scores [N, 1])"""
        decoding = self._how.decoding
        options = dict(max_tokens=self._max_tokens, batch_size=self._how.batch_size, beginning=self._beginning)
        if not isinstance(decoding, BeamConfig):
            return self._model.generate_tokens(self._inputs, sampling=decoding, seed=self._how.seed, **options)
        tokens, scores = self._model.search_tokens(self._inputs, beams=decoding, **options)
        return tokens[:, 0], scores[:, :1]

    @functools.cached_property
    def written(self) -> list[list[int]]:
        """What was generated, up to its end token; what stands behind may be a token of the vocabulary."""
        ends = self._model.end_ids
        rows = [list(itertools.takewhile(lambda token: token not in ends, row)) for row in self.generated[0].tolist()]
        return [[*self._beginning, *row] for row in rows]

    @functools.cached_property
    def scored(self) -> list[float]:
        return self._model.scores(self._inputs, self._targets, batch_size=self._how.batch_size).log_prob.tolist()

    def predictions(self) -> list[tuple[int, list[int]]]:
        length = self.generated[0].shape[1] + len(self._beginning)  # SeqIO wants rows of one length
        return [(i, [*row, *[max(self._model.eos_id, 0)] * (length - len(row))]) for i, row in enumerate(self.written)]

    def log_probs(self) -> list[float]:
        return self.generated[1].sum(axis=1).tolist()

    def scores(self) -> list[tuple[int, float]]:
        return list(enumerate(self.scored))

    def lines(self, task: seqio.Task) -> list[dict]:
        vocabularies = {name: feature.vocabulary for name, feature in task.output_features.items()}
        named = {name: vocabularies[name] for name in ("inputs", "targets") if name in vocabularies}
        lines: list[dict] = [{name: text_of(x, name, found) for name, found in named.items()} for x in self._examples]
        for i, line in enumerate(lines):
            if "written" in vars(self):  # a cached property that was asked for
                line["prediction"] = named["targets"].decode(self.written[i])
            if "scored" in vars(self):
                line["score"] = self.scored[i]
        return lines
