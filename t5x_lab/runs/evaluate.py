"""A run's evaluations: made ready once, measured on any parameters, with their results in files."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from t5x_lab.config.errors import UserError, nearest
from t5x_lab.config.user_code import raised_in, shown, told, tried
from t5x_lab.evaluation.accuracy import table
from t5x_lab.evaluation.config import EarlyStopping, Evaluation, Measure, Measured, check_evaluations, check_metric_name
from t5x_lab.evaluation.results import ResultFiles
from t5x_lab.models.model import Params
from t5x_lab.observe.console import say
from t5x_lab.observe.plots import plot_ranking
from t5x_lab.partitioning.distributed import broadcast, broadcast_text
from t5x_lab.runs.config import GinConfig, RunConfig
from t5x_lab.runs.run import Run
from t5x_lab.runs.sharded_model import ShardedModel

Found = dict[str, dict[str, float | None]]  # metrics by split, "<name>/<task>"


@dataclasses.dataclass(frozen=True)
class Entry:
    """An evaluation that is ready.

    Attributes:
      name: of its results.
      weights: "last" or "average".
      how: the evaluation.
      measure: what it prepared.
      files: its results.
    """

    name: str
    weights: str
    how: Evaluation
    measure: Measure
    files: ResultFiles

    def is_due(self, step: int, period: int) -> bool:
        """Whether it is to be measured after `step` of a training; `period` is that of evaluations which do not say."""
        steps = getattr(self.how, "steps", ())
        every = getattr(self.how, "period", period)
        return step in steps if steps else every is not None and step % every == 0

    @property
    def is_due_at_end(self) -> bool:
        return not getattr(self.how, "steps", ()) and getattr(self.how, "period", 1) is not None

    @property
    def is_ever_due(self) -> bool:
        return self.is_due_at_end or bool(getattr(self.how, "steps", ())) or getattr(self.how, "at_start", False)


class Evaluations:
    """The evaluations of a run, made ready.

    Args:
      evals: EVALS.
      model: the run's, without parameters.
      model_dir: where results go.
      has_average: whether the run keeps an average of its weights.
      period: EVAL_PERIOD.
      weights: "last" or "average" where all are measured on those; None = as each says.
      watched: metrics that others wait for, and what these call them; a metric that is not measured is said once.
      members: of an ensemble, whose results are <name>_ensemble, by what tells them from others.

    Raises:
      UserError: that names the evaluation which is wrong.
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
        self._said: set[tuple[str, str]] = set()
        self.entries = [entry for how in evals for entry in self._entries(how, has_average, weights)]
        self._seen: dict[str, dict[int, float]] = {}  # values by metric and step: files may lie far away
        for metric, what in self._watched.items():
            self._check_watched(metric, what, [how.name for how in evals])

    def _entries(self, how: Evaluation, has_average: bool, all_weights: str | None) -> Iterator[Entry]:
        name, weights = how.name, getattr(how, "weights", "last")
        if all_weights:
            is_own = weights == all_weights or (weights, all_weights) == ("each", "last")
            name, weights = name if is_own else f"{name}_{all_weights}", all_weights
        if weights == "average" and not has_average:
            raise UserError(
                f'Evaluation "{name}" is of averaged weights, and the run keeps none. Set AVERAGE_DECAY, or weights.'
            )
        measure = tried(f'The evaluation "{name}" fails in prepare', lambda: how.prepare(self._model))
        if measure is None:
            return
        if not callable(measure):
            raise UserError(f'The evaluation "{name}" prepares {shown(measure)}; prepare gives a function of a model, or None.')
        named = {f"{name}_average": "average"} if has_average and weights == "each" else {}
        for called, of in {name: "average" if weights == "average" else "last", **named}.items():
            settings = {**getattr(measure, "settings", {}), "weights": of}
            if self._members:
                called, settings = f"{called}_ensemble", {**settings, "members": self._members}
            yield Entry(called, of, how, measure, ResultFiles(self._model_dir, called, settings))

    def _check_watched(self, metric: str, what: str, names: Sequence[str]) -> None:
        ready = [entry.name for entry in self.entries]
        name = metric.split("/")[0]
        if name in names and name not in ready:
            raise UserError(
                f'{what} is "{metric}", but the evaluation "{name}" measures nothing: no task of it has metrics and the split. '
                f"Name one of {', '.join(ready) or 'another evaluation'}."
            )
        check_metric_name(what, metric, ready)
        if not self.named(name).is_ever_due:
            say(f'{what} is "{metric}", and "{name}" has no period: only eval --follow measures it, beside the training.')

    def named(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    def measured(self, step: int, metric: str) -> float:
        """The number "<name>/<task>/<metric>" of a step; not a number where it was not measured."""
        name, _, rest = metric.partition("/")
        return self.named(name).files.metric(step, rest)

    def is_over(self, rule: EarlyStopping, step: int) -> bool:
        """Whether a training that has come to this step is to end, as the first process sees it."""
        name, _, rest = rule.metric.partition("/")
        files, seen = self.named(name).files, self._seen.setdefault(rule.metric, {})
        steps = [before for before in files.steps() if before <= step]
        seen |= {before: files.metric(before, rest) for before in steps if before not in seen or before == step}
        return bool(broadcast(rule.is_over([seen[before] for before in steps])))

    def due_at_start(self, step: int) -> list[Entry]:
        return [
            entry for entry in self.entries if getattr(entry.how, "at_start", False) or step in getattr(entry.how, "steps", ())
        ]

    def due(self, step: int) -> list[Entry]:
        return [entry for entry in self.entries if entry.is_due(step, self._period)]

    def due_at_end(self, step: int) -> list[Entry]:
        return [entry for entry in self.entries if entry.is_due_at_end or entry.is_due(step, self._period)]

    def without_results(self, step: int, entries: Iterable[Entry]) -> list[Entry]:
        """Those of these that have no results of the step, as the first process sees it."""
        missing = json.dumps([entry.name for entry in entries if not entry.files.has(step)])
        names = json.loads(broadcast_text(missing))
        return [entry for entry in entries if entry.name in names]

    def measure(
        self, entries: Iterable[Entry], step: int, params: Params | None, average: Params | None, goes_on: str = ""
    ) -> Iterator[tuple[Entry, Measured]]:
        """Measures the model after `step`, and writes the results.

        A task whose metrics fail is said once, until they work again, with `goes_on` behind it.

        Args:
          entries: which ones.
          step: of the parameters.
          params, average: the last weights and their average.
          goes_on: what happens all the same, a sentence.

        Yields:
          (the evaluation, what it found)
        """
        for entry in entries:
            weights = average if entry.weights == "average" else params
            assert weights is not None
            found = self._measured(entry, self._model.with_params(weights, step))
            self._say_failures(entry, found, step, goes_on)
            if jax.process_index() == 0:
                if not entry.files.has(step) and not entry.files.steps() and entry.files.moved_from:
                    say(
                        f"Results of {entry.name} go to {entry.files.folder}: those in {entry.name} are of other settings "
                        f"({entry.files.moved_from})."
                    )
                self._write(entry, step, found)
            self._say_unmeasured(entry, found, step)
            yield entry, found

    def _measured(self, entry: Entry, model: Run) -> Measured:
        what = f'The evaluation "{entry.name}"'
        try:
            return _checked(entry.measure(model), what)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            if jax.process_count() > 1:
                raise  # the others would wait for this one
            failure = error.sentence if isinstance(error, UserError) else f"{what} fails: {raised_in(error) or told(error)}"
        return Measured({}, failures={"": failure})

    def _say_failures(self, entry: Entry, found: Measured, step: int, goes_on: str) -> None:
        for task, sentence in found.failures.items():
            if (entry.name, task) not in self._said:
                say(f"step {step}: {sentence.rstrip('.')}. {goes_on}".rstrip())
            self._said.add((entry.name, task))
        self._said -= {(entry.name, task) for task in found.metrics} | ({(entry.name, "")} if not found.failures else set())

    def _say_unmeasured(self, entry: Entry, found: Measured, step: int) -> None:
        measured = {f"{split}/{name}" for split, metrics in by_split(entry.name, found).items() for name in metrics}
        for metric, what in self._watched.items():
            if metric.split("/")[0] == entry.name and metric not in measured and not found.failures:
                if (what, metric) not in self._said:
                    had = nearest(metric, measured) or f" Measured were: {', '.join(sorted(measured)) or 'none'}."
                    say(f'Step {step} is not judged by {what} = "{metric}": it was not measured then.{had}')
                self._said.add((what, metric))

    def _write(self, entry: Entry, step: int, found: Measured) -> None:
        """Results and outputs; storage that fails is said once, and what was found is known all the same."""
        try:
            self._write_outputs(entry, step, found)  # first: what has results is not measured again
            entry.files.write(step, found)
            self._show_report(entry, step, found)
            self._said.discard(("unwritten", entry.name))
        except OSError as error:
            if ("unwritten", entry.name) not in self._said:
                say(f"The results of {entry.name} at step {step} could not be written to {entry.files.folder}: {told(error)}.")
            self._said.add(("unwritten", entry.name))

    def _show_report(self, entry: Entry, step: int, found: Measured) -> None:
        """The table of a ranking, and its plot."""
        if "datasets" not in found.report:
            return
        say(f"step {step}  {entry.name}, accuracy in percent\n{table(found.report)}")
        folder = epath.Path(self._model_dir) / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        plot_ranking(found.report, folder / f"{entry.files.folder.name}.png", f"{entry.name}, step {step}")

    def _write_outputs(self, entry: Entry, step: int, found: Measured) -> None:
        folder = epath.Path(self._model_dir) / "inference"
        for task, lines in found.outputs.items():
            # The default evaluation's are where T5X's users look for them.
            name = entry.files.folder.name
            path = (folder if name == "infer" else folder / name) / f"{task}-{step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def evaluations_of(run: RunConfig, config: GinConfig, sharded: ShardedModel) -> Evaluations:
    """The run's evaluations, made ready; what waits for their metrics is checked."""
    watched = dict.fromkeys(run.saving.best, "SaveCheckpointConfig.best_metric")
    watched |= {run.early_stopping.metric: "EarlyStopping.metric"} if run.early_stopping else {}
    model = Run(config, sharded, {}, step=0)
    made = Evaluations(run.evals, model, run.model_dir, run.average_decay is not None, run.eval_period, watched=watched)
    for metric in run.saving.best:
        entry, period = made.named(metric.split("/")[0]), run.saving.period
        if not entry.is_due(period, run.eval_period):
            say(
                f'Checkpoints are made every {period} steps, and "{entry.name}" is not evaluated then: those are not judged by '
                f'SaveCheckpointConfig.best_metric = "{metric}". The periods had better be equal.'
            )
    return made


def _checked(found: Any, what: str) -> Measured:
    """What an evaluation gave, as `Measured` with numbers of Python's."""
    if isinstance(found, Measured):
        return dataclasses.replace(found, metrics=_checked(found.metrics, what).metrics)
    if not isinstance(found, Mapping) or not all(isinstance(metrics, Mapping) for metrics in found.values()):
        raise UserError(f'{what} gives {shown(found)}; it gives metrics by task, then by name: {{"all": {{"score": 0.5}}}}.')
    numbers = {}
    for task, metrics in found.items():
        numbers[str(task)] = {
            str(name): None if value is None else _number(value, f"{what} gives {name} = {shown(value)}")
            for name, value in metrics.items()
        }
    return Measured(numbers)


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}, which is no number.") from error


def by_split(name: str, found: Measured) -> Found:
    """Metrics by "<name>/<task>", as metrics.jsonl has them."""
    return {f"{name}/{task}": dict(metrics) for task, metrics in found.metrics.items()}
