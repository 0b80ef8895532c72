"""Metrics that SeqIO tasks define, computed by SeqIO's Evaluator from what a model generates and scores."""

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.config.user_code import describe_error, describe_user_code_error
from t5x_lab.data.pipeline.failures import report_failing_record
from t5x_lab.data.tasks.mixture import Component
from t5x_lab.data.tasks.names import registered_name
from t5x_lab.decoding.beam_search import BeamConfig
from t5x_lab.decoding.sampling import SamplingConfig
from t5x_lab.evaluation.evaluation import EvaluationResult, OutputEvaluation
from t5x_lab.evaluation.examples import feature_text
from t5x_lab.evaluation.metrics.benchmarks import AVERAGES, averages, report
from t5x_lab.evaluation.tasks import EvaluationTasks, TruncatedInputs, resolve_evaluation_tasks

_OUTPUT_TYPES = seqio.metrics.ModelOutputType


class Decoding(NamedTuple):
    """Settings for generating predictions. See `MetricsEvaluation`."""

    method: SamplingConfig | BeamConfig
    seed: int
    num_samples: int
    max_tokens: int | None
    decoder_prefix: str


class _NoConversion(seqio.PassThroughFeatureConverter):
    """Leaves examples as their task makes them. The model pads and batches."""

    TASK_FEATURES: ClassVar[dict] = {}  # SeqIO's Evaluator reads it, and the pass-through converter lacks it
    pack = False


class MetricsEvaluator:
    """Computes the SeqIO metrics of tasks on a fixed set of examples.

    Args:
      tasks: the tasks to read.
      evaluation: settings of the evaluation.
      decoding: how predictions are generated.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, tasks: EvaluationTasks, evaluation: OutputEvaluation, decoding: Decoding):
        self._tasks, self._evaluation, self._decoding = tasks, evaluation, decoding
        self.settings = tasks.settings(evaluation)
        self._prepared: dict[str, tuple[seqio.Evaluator, list[dict]]] = {}

    @classmethod
    def create(cls, evaluation: OutputEvaluation, decoding: Decoding, model: Any) -> "MetricsEvaluator | None":
        """Returns the evaluator, or None if no task has the split and metrics. See `Evaluation.prepare`."""
        tasks = resolve_evaluation_tasks(evaluation, model)
        tasks = tasks.only(lambda component: bool(component.task.metric_objs), "metrics (metric_fns or metric_objs)")
        if not tasks.components and evaluation.period:
            log(
                f'Evaluation "{evaluation.name}" runs every {evaluation.period} steps, but no task of "{tasks.mixture.name}" '
                f'has a split "{tasks.data.eval_split}" and metrics (metric_fns).'
            )
        if not model.can_generate:
            skipped = [component.task.name for component in tasks.components if _needs_generation(component)]
            if skipped:
                log(f"The metrics of {', '.join(skipped)} need a network with a decode step. They are not computed.")
            tasks = tasks.only(lambda component: not _needs_generation(component), "metrics that need no generation")
        return cls(tasks, evaluation, decoding) if tasks.components else None

    def __call__(self, model: Any) -> EvaluationResult:
        """Returns the tasks' metrics. Tasks whose examples or metrics fail are among the failures."""
        metrics: dict[str, dict] = {}
        media: dict[str, dict] = {}
        lines: dict[str, list] = {}
        failures: dict[str, str] = {}
        consequence = "its metrics are not computed"
        for component, (evaluator, examples) in self._tasks.read_each(self._prepare_task, failures, consequence):
            name = component.task.name
            # Device work stays outside of `try`: if it fails, all processes end together.
            outputs = _ModelOutputs(model, component, examples, self._evaluation, self._decoding)
            outputs.compute({metric.model_output_type for metric in component.task.metric_objs})
            try:
                values = _evaluate(evaluator, name, outputs, model.step)
            except Exception as error:
                evaluator._metrics_future = None  # SeqIO would wait for it forever the next time
                cause = error.__cause__ or error
                reason = describe_user_code_error(cause) or describe_error(cause)
                failures[name] = f'The metrics of task "{name}" failed: {reason}'
            else:
                scalars = {key: _to_number(value) for key, value in values.items()}
                metrics[name] = {key: value for key, value in scalars.items() if value is not None}
                media[name] = {key: values[key] for key, value in scalars.items() if value is None}
            if outputs.num_cut:
                log(f'{outputs.num_cut} of {len(examples)} inputs of task "{name}" were truncated to {outputs.limit} tokens.')
            if self._evaluation.outputs:
                lines[name] = outputs.lines(component.task)
        metrics |= _means_over_prompts([component.task for component in self._tasks.components], metrics)
        benchmarks = report((component.task for component in self._tasks.components), metrics)
        if benchmark_averages := averages(benchmarks):
            metrics[AVERAGES] = benchmark_averages
        full_report = {"benchmarks": benchmarks} if benchmarks else {}
        return EvaluationResult(metrics, lines, {task: m for task, m in media.items() if m}, full_report, failures)

    def _prepare_task(self, component: Component) -> tuple[seqio.Evaluator, list[dict]]:
        """Returns SeqIO's evaluator of a task and its examples, prepared once."""
        name, data = component.task.name, self._tasks.data
        if name not in self._prepared:
            with report_failing_record([component], data.eval_split):
                evaluator = self._make_evaluator(component)
                self._prepared[name] = evaluator, list(evaluator.cached_task_datasets[name].as_numpy_iterator())
        return self._prepared[name]

    def _make_evaluator(self, component: Component) -> seqio.Evaluator:
        task = component.task
        options = dict(
            feature_converter=_NoConversion(),
            eval_split=self._tasks.data.eval_split,
            num_examples=self._evaluation.num_examples,
            async_compute_metrics=False,
        )
        try:
            return seqio.Evaluator(registered_name(task), **options)
        except ValueError as error:
            if "sequence_length" not in str(error):
                raise UserError(f'Task "{task.name}" cannot be evaluated: {error}') from error
            if self._evaluation.truncate_inputs != "right":
                log(f'A preprocessor of task "{task.name}" needs lengths. SeqIO cuts its inputs to TASK_FEATURE_LENGTHS.')
            return seqio.Evaluator(registered_name(task), sequence_length=component.sequence_length, **options)


def _means_over_prompts(tasks: Sequence[seqio.Task], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, dict]:
    """Returns the mean metrics of each prompted data set that has several prompts, by the data set's slug."""
    by_data_set: dict[str, list[Mapping[str, float]]] = {}
    for task in tasks:
        if getattr(task, "generates", False) and task.name in metrics:
            by_data_set.setdefault(task.data_set, []).append(metrics[task.name])
    return {
        data_set: {
            key: float(np.mean([values[key] for values in prompts]))
            for key in prompts[0]
            if all(key in values for values in prompts)
        }
        for data_set, prompts in by_data_set.items()
        if len(prompts) > 1
    }


def _needs_generation(component: Component) -> bool:
    """Returns whether some metrics are computed from predictions."""
    types = (_OUTPUT_TYPES.PREDICTION, _OUTPUT_TYPES.PREDICTION_WITH_AUX)
    return any(metric.model_output_type in types for metric in component.task.metric_objs)


def _evaluate(evaluator: seqio.Evaluator, task: str, outputs: "_ModelOutputs", step: int) -> dict[str, Any]:
    metrics, _ = evaluator.evaluate(
        compute_metrics=True,
        step=step,
        model_fns={
            _OUTPUT_TYPES.PREDICTION: lambda unused: outputs.predictions(),
            _OUTPUT_TYPES.PREDICTION_WITH_AUX: lambda unused: (outputs.predictions(), {"scores": outputs.log_probs()}),
            _OUTPUT_TYPES.SCORE: lambda unused: outputs.scores(),
            _OUTPUT_TYPES.SCORE_WITH_INTERMEDIATES: lambda unused: (outputs.scores(), {}),
        },
    )
    return metrics.result()[task]


def _to_number(metric: Any) -> float | None:
    """Returns the value of a scalar metric, or None for a text, an image and the like."""
    value = getattr(metric, "value", metric)
    if isinstance(value, numbers.Real):
        return float(value)
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) in ((), (1,))
    is_scalar = is_scalar and np.asarray(value).dtype.kind in "fiub"
    return float(np.asarray(value).reshape(())) if is_scalar else None


class _ModelOutputs:
    """Outputs of one model for the examples of one task, as SeqIO reads them: pairs of (number, output)."""

    def __init__(
        self, model: Any, component: Component, examples: Sequence[dict], evaluation: OutputEvaluation, decoding: Decoding
    ):
        self._model, self._examples, self._decoding = model, examples, decoding
        self._batch_size = evaluation.batch_size
        self._targets = [example["targets"].tolist() for example in examples]
        lengths = component.sequence_length if evaluation.truncate_inputs else {}
        target_length = lengths.get("targets") or max(map(len, self._targets))
        self._max_tokens = decoding.max_tokens or target_length
        self._prefix = model.vocabulary.encode(decoding.decoder_prefix) if decoding.decoder_prefix else []
        reserved = self._max_tokens + len(self._prefix)
        inputs = TruncatedInputs(model, component, examples, evaluation.truncate_inputs, reserved)
        self._inputs, self.limit, self.num_cut = inputs.ids, inputs.limit, inputs.num_cut

    def compute(self, types: set) -> None:
        """Runs the model for metrics of these output types."""
        if types & {_OUTPUT_TYPES.PREDICTION, _OUTPUT_TYPES.PREDICTION_WITH_AUX}:
            self.predicted_ids  # noqa: B018  (a cached property)
        if types & {_OUTPUT_TYPES.SCORE, _OUTPUT_TYPES.SCORE_WITH_INTERMEDIATES}:
            self.target_scores  # noqa: B018

    @functools.cached_property
    def generated(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [N, max_tokens], padding after the stop id; log-probability of each, or beam scores [N, 1])."""
        method = self._decoding.method
        options = dict(max_tokens=self._max_tokens, batch_size=self._batch_size, decoder_prefix=self._prefix)
        if not isinstance(method, BeamConfig):
            return self._sample(method, options)
        tokens, scores = self._model.search_tokens(self._inputs, beams=method, **options)
        return tokens[:, 0], scores[:, :1]

    def _sample(self, sampling: SamplingConfig, options: dict) -> tuple[np.ndarray, np.ndarray]:
        n = self._decoding.num_samples
        if n > 1:
            sampling = dataclasses.replace(sampling, rescale_log_probs=True)
        repeated = [ids for ids in self._inputs for _ in range(n)]
        samples = self._model.generate_tokens(repeated, sampling=sampling, seed=self._decoding.seed, **options)
        tokens, log_probs = (x.reshape(len(self._inputs), n, x.shape[-1]) for x in samples)
        rows, best = np.arange(len(self._inputs)), log_probs.sum(axis=2).argmax(axis=1)
        return tokens[rows, best], log_probs[rows, best]

    @functools.cached_property
    def predicted_ids(self) -> list[list[int]]:
        """Generated ids up to the stop id. What follows it is padding, which may be a token of the vocabulary."""
        stop_ids = self._model.stop_ids
        rows = [list(itertools.takewhile(lambda token: token not in stop_ids, row)) for row in self.generated[0].tolist()]
        return [[*self._prefix, *row] for row in rows]

    @functools.cached_property
    def target_scores(self) -> list[float]:
        return self._model.scores(self._inputs, self._targets, batch_size=self._batch_size).log_prob.tolist()

    def predictions(self) -> list[tuple[int, list[int]]]:
        length = self.generated[0].shape[1] + len(self._prefix)  # SeqIO wants rows of equal length
        padding = max(self._model.eos_id, 0)
        return [(i, [*row, *[padding] * (length - len(row))]) for i, row in enumerate(self.predicted_ids)]

    def log_probs(self) -> list[float]:
        return self.generated[1].sum(axis=1).tolist()

    def scores(self) -> list[tuple[int, float]]:
        return list(enumerate(self.target_scores))

    def lines(self, task: seqio.Task) -> list[dict]:
        features = task.output_features
        vocabularies = {name: features[name].vocabulary for name in ("inputs", "targets") if name in features}
        lines: list[dict] = [
            {name: feature_text(example, name, vocabulary) for name, vocabulary in vocabularies.items()}
            for example in self._examples
        ]
        for i, line in enumerate(lines):
            if "predicted_ids" in vars(self):  # computed before
                line["prediction"] = vocabularies["targets"].decode(self.predicted_ids[i])
            if "target_scores" in vars(self):
                line["score"] = self.target_scores[i]
        return lines
