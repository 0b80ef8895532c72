"""The evaluations of a run: prepared once, then run on any parameters, with results in files."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.config.log import log
from t5x_lab.config.object_storage import is_storage_error, retry
from t5x_lab.config.user_code import call_user_code, describe_error, describe_user_code_error, shown
from t5x_lab.evaluation.config import EarlyStopping, check_metric_name
from t5x_lab.evaluation.evaluation import Evaluation, EvaluationResult, Evaluator, check_evaluations
from t5x_lab.evaluation.ranking.accuracy import table
from t5x_lab.evaluation.results import ResultFiles
from t5x_lab.networks.functional import Params
from t5x_lab.observe.plots import plot_ranking
from t5x_lab.partitioning.distributed import broadcast, broadcast_text
from t5x_lab.runs.config.gin_config import GinConfig
from t5x_lab.runs.config.run_config import RunConfig
from t5x_lab.runs.model.run import Run
from t5x_lab.runs.model.sharded_model import ShardedModel

MetricsBySplit = dict[str, dict[str, float | None]]  # metrics by "<evaluation>/<task>", as in metrics.jsonl


@dataclasses.dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation and its evaluator.

    Attributes:
      name: name of its results.
      weights: "last" or "average".
      evaluation: the entry of EVALS.
      evaluator: function that `evaluation.prepare` returned.
      files: its result files.
    """

    name: str
    weights: str
    evaluation: Evaluation
    evaluator: Evaluator
    files: ResultFiles

    def is_due(self, step: int, period: int) -> bool:
        """Returns whether it runs after training step `step`. `period` applies to evaluations without a period."""
        steps = getattr(self.evaluation, "steps", ())
        every = getattr(self.evaluation, "period", period)
        return step in steps if steps else every is not None and step % every == 0

    @property
    def is_due_at_end(self) -> bool:
        return not getattr(self.evaluation, "steps", ()) and getattr(self.evaluation, "period", 1) is not None

    @property
    def is_ever_due(self) -> bool:
        evaluation = self.evaluation
        return self.is_due_at_end or bool(getattr(evaluation, "steps", ())) or getattr(evaluation, "at_start", False)


class Evaluations:
    """The prepared evaluations of a run.

    Args:
      evals: EVALS.
      model: the run's model, without parameters.
      model_dir: run directory that results are written to.
      has_average: the run keeps averaged weights.
      period: EVAL_PERIOD.
      weights: "last" or "average" for all evaluations. None = as configured for each.
      watched: metrics that other settings use, with the name of the setting. A metric that is missing is reported once.
      members: descriptions of the members of an ensemble. Its results are named <name>_ensemble.

    Raises:
      UserError: for an invalid evaluation.
    """

    def __init__(
        self,
        evals: Sequence[Evaluation],
        model: Run,
        model_dir: str,
        has_average: bool,
        period: int = 1,
        weights: str | None = None,
        watched: Mapping[str, str] | None = None,
        members: Sequence[str] = (),
    ):
        check_evaluations(evals)
        self._members = list(members)
        self._model, self._model_dir, self._period, self._watched = model, model_dir, period, dict(watched or {})
        self._reported: set[tuple[str, str]] = set()  # problems that were logged: each is logged once
        self.entries = [entry for evaluation in evals for entry in self._prepare(evaluation, has_average, weights)]
        self._values: dict[str, dict[int, float]] = {}  # values by metric and step, a cache of remote files
        for metric, setting in self._watched.items():
            self._check_watched(metric, setting, [evaluation.name for evaluation in evals])

    def _prepare(self, evaluation: Evaluation, has_average: bool, all_weights: str | None) -> Iterator[PreparedEvaluation]:
        name, weights = evaluation.name, getattr(evaluation, "weights", "last")
        if all_weights:
            is_own = weights == all_weights or (weights, all_weights) == ("each", "last")
            name, weights = name if is_own else f"{name}_{all_weights}", all_weights
        if weights == "average" and not has_average:
            raise UserError(
                f'Evaluation "{name}" uses averaged weights, but the run keeps none. Set AVERAGE_DECAY, or weights = "last".'
            )
        evaluator = call_user_code(f'The evaluation "{name}" fails in prepare', lambda: evaluation.prepare(self._model))
        if evaluator is None:
            return
        if not callable(evaluator):
            raise UserError(
                f'The evaluation "{name}" returned {shown(evaluator)} from prepare. It must return a function of a model, or '
                "None."
            )
        weights_by_name = {name: "average" if weights == "average" else "last"}
        if has_average and weights == "each":
            weights_by_name[f"{name}_average"] = "average"
        for result_name, kind in weights_by_name.items():
            settings = {**getattr(evaluator, "settings", {}), "weights": kind}
            if self._members:
                result_name, settings = f"{result_name}_ensemble", {**settings, "members": self._members}
            yield PreparedEvaluation(
                result_name, kind, evaluation, evaluator, ResultFiles(self._model_dir, result_name, settings)
            )

    def _check_watched(self, metric: str, setting: str, names: Sequence[str]) -> None:
        ready = [entry.name for entry in self.entries]
        name = metric.split("/")[0]
        if name in names and name not in ready:
            raise UserError(
                f'{setting} is "{metric}", but the evaluation "{name}" has no results: none of its tasks has metrics and the '
                f"split. Choose one of {', '.join(ready) or 'another evaluation'}."
            )
        check_metric_name(setting, metric, ready)
        if not self.find(name).is_ever_due:
            log(f'{setting} is "{metric}", but "{name}" has no period. Only `t5x_lab eval --follow` computes it.')

    def find(self, name: str) -> PreparedEvaluation:
        """Returns the evaluation of this name."""
        return next(entry for entry in self.entries if entry.name == name)

    def read_metric(self, step: int, metric: str) -> float:
        """Returns the metric "<name>/<task>/<metric>" of a step; NaN if there is no result."""
        name, _, rest = metric.partition("/")
        return self.find(name).files.metric(step, rest)

    def should_stop(self, rule: EarlyStopping, step: int) -> bool:
        """Returns whether early stopping ends training at this step. The first process decides."""
        name, _, rest = rule.metric.partition("/")
        files, values = self.find(name).files, self._values.setdefault(rule.metric, {})
        steps = [earlier for earlier in files.steps() if earlier <= step]
        new = [earlier for earlier in steps if earlier not in values or earlier == step]
        computed = {earlier: files.computed_metric(earlier, rest) for earlier in new}
        values |= {earlier: value for earlier, value in computed.items() if value is not None}
        return bool(broadcast(rule.should_stop([values[earlier] for earlier in steps if earlier in values])))

    def due_at_start(self, step: int) -> list[PreparedEvaluation]:
        return [
            entry
            for entry in self.entries
            if getattr(entry.evaluation, "at_start", False) or step in getattr(entry.evaluation, "steps", ())
        ]

    def due(self, step: int) -> list[PreparedEvaluation]:
        return [entry for entry in self.entries if entry.is_due(step, self._period)]

    def due_at_end(self, step: int) -> list[PreparedEvaluation]:
        return [entry for entry in self.entries if entry.is_due_at_end or entry.is_due(step, self._period)]

    def without_results(self, step: int, entries: Iterable[PreparedEvaluation]) -> list[PreparedEvaluation]:
        """Returns the evaluations that have no results for the step, as seen by the first process."""
        missing = json.dumps([entry.name for entry in entries if not entry.files.has(step)])
        names = json.loads(broadcast_text(missing))
        return [entry for entry in entries if entry.name in names]

    def evaluate(
        self, entries: Iterable[PreparedEvaluation], step: int, params: Params | None, average: Params | None, hint: str = ""
    ) -> Iterator[tuple[PreparedEvaluation, EvaluationResult]]:
        """Evaluates the model of a step and writes the results.

        A task whose metrics fail is logged once, until they work again, followed by `hint`.

        Args:
          entries: which ones.
          step: of the parameters.
          params, average: last and averaged weights.
          hint: a sentence that follows a reported failure.

        Yields:
          (evaluation, result)
        """
        for entry in entries:
            weights = average if entry.weights == "average" else params
            assert weights is not None
            result = self._run(entry, self._model.with_params(weights, step))
            self._log_failures(entry, result, step, hint)
            if jax.process_index() == 0:
                if not entry.files.has(step) and not entry.files.steps() and entry.files.changed_settings:
                    log(
                        f"Results of {entry.name} are written to {entry.files.folder}: the results in {entry.name} have other "
                        f"settings ({entry.files.changed_settings})."
                    )
                self._write(entry, step, result)
            self._log_missing_metrics(entry, result, step)
            yield entry, result

    def _run(self, entry: PreparedEvaluation, model: Run) -> EvaluationResult:
        label = f'The evaluation "{entry.name}"'
        try:
            return _check_result(entry.evaluator(model), label)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            if jax.process_count() > 1:
                raise  # the other processes would wait forever
            failure = (
                error.sentence
                if isinstance(error, UserError)
                else f"{label} failed: {describe_user_code_error(error) or describe_error(error)}"
            )
        return EvaluationResult({}, failures={"": failure})

    def _log_failures(self, entry: PreparedEvaluation, result: EvaluationResult, step: int, hint: str) -> None:
        for task, sentence in result.failures.items():
            if (entry.name, task) not in self._reported:
                log(f"step {step}: {sentence.rstrip('.')}. {hint}".rstrip())
            self._reported.add((entry.name, task))
        self._reported -= {(entry.name, task) for task in result.metrics}
        if not result.failures:
            self._reported.discard((entry.name, ""))

    def _log_missing_metrics(self, entry: PreparedEvaluation, result: EvaluationResult, step: int) -> None:
        computed = {f"{split}/{name}" for split, metrics in metrics_by_split(entry.name, result).items() for name in metrics}
        for metric, setting in self._watched.items():
            if metric.split("/")[0] == entry.name and metric not in computed and not result.failures:
                if (setting, metric) not in self._reported:
                    hint = did_you_mean(metric, computed) or f" Available metrics: {', '.join(sorted(computed)) or 'none'}."
                    log(f'{setting} = "{metric}" has no value at step {step}.{hint}')
                self._reported.add((setting, metric))

    def _write(self, entry: PreparedEvaluation, step: int, result: EvaluationResult) -> None:
        """Writes results and outputs. A storage failure is logged once; training goes on with the result."""
        directory = epath.Path(self._model_dir)
        try:
            # Before the results: an evaluation with results is not run again.
            retry(lambda: self._write_outputs(entry, step, result), directory)
            retry(lambda: entry.files.write(step, result), directory)
            self._write_ranking(entry, step, result)
            self._reported.discard(("unwritten", entry.name))
        except Exception as error:
            if not is_storage_error(error):
                raise
            if ("unwritten", entry.name) not in self._reported:
                log(f"The results of {entry.name} at step {step} could not be written to {directory}: {describe_error(error)}.")
            self._reported.add(("unwritten", entry.name))

    def _write_ranking(self, entry: PreparedEvaluation, step: int, result: EvaluationResult) -> None:
        """Logs the table of a ranking evaluation and writes its plot."""
        if "datasets" not in result.report:
            return
        log(f"step {step}  {entry.name}, accuracy in percent\n{table(result.report)}")
        folder = epath.Path(self._model_dir) / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        plot_ranking(result.report, folder / f"{entry.files.folder.name}.png", f"{entry.name}, step {step}")

    def _write_outputs(self, entry: PreparedEvaluation, step: int, result: EvaluationResult) -> None:
        folder = epath.Path(self._model_dir) / "inference"
        for task, lines in result.outputs.items():
            # The outputs of the default evaluation are where T5X writes them.
            name = entry.files.folder.name
            path = (folder if name == "infer" else folder / name) / f"{task}-{step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def prepare_evaluations(run: RunConfig, config: GinConfig, sharded: ShardedModel) -> Evaluations:
    """Prepares the evaluations of a run and checks the settings that use their metrics."""
    watched = dict.fromkeys(run.saving.best, "SaveCheckpointConfig.best_metric")
    watched |= {run.early_stopping.metric: "EarlyStopping.metric"} if run.early_stopping else {}
    model = Run(config, sharded, {}, step=0)
    evaluations = Evaluations(run.evals, model, run.model_dir, run.average_decay is not None, run.eval_period, watched=watched)
    for metric in run.saving.best:
        entry, period = evaluations.find(metric.split("/")[0]), run.saving.period
        if not entry.is_due(period, run.eval_period):
            log(
                f'SaveCheckpointConfig.best_metric is "{metric}", but "{entry.name}" does not run at every checkpoint (each '
                f"{period} steps). Use the same period for both."
            )
    return evaluations


def _check_result(result: Any, label: str) -> EvaluationResult:
    """Returns the result of an evaluator as `EvaluationResult` with Python floats."""
    if isinstance(result, EvaluationResult):
        return dataclasses.replace(result, metrics=_check_result(result.metrics, label).metrics)
    if not isinstance(result, Mapping) or not all(isinstance(metrics, Mapping) for metrics in result.values()):
        raise UserError(
            f'{label} returned {shown(result)}. It must return metrics by task and name, such as {{"all": {{"score": 0.5}}}}.'
        )
    numbers = {}
    for task, metrics in result.items():
        numbers[str(task)] = {
            str(name): None if value is None else _to_float(value, f"{label} returned {name} = {shown(value)}")
            for name, value in metrics.items()
        }
    return EvaluationResult(numbers)


def _to_float(value: Any, problem: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{problem}, which is not a number.") from error


def metrics_by_split(name: str, result: EvaluationResult) -> MetricsBySplit:
    """Returns metrics by "<name>/<task>", as in metrics.jsonl."""
    return {f"{name}/{task}": dict(metrics) for task, metrics in result.metrics.items()}
