"""The metrics that SeqIO tasks define, measured by SeqIO's own Evaluator on what a model generates and scores."""

import functools
import itertools
import json
import numbers
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import seqio
from etils import epath

from t5x_lab.config.errors import UserError
from t5x_lab.data.cutting import cut_left, cut_right
from t5x_lab.data.mixture import WeightedTasks
from t5x_lab.data.tasks import name_in_seqio
from t5x_lab.decoding.beam_search import beams_of
from t5x_lab.evaluation.config import InferEvalConfig
from t5x_lab.evaluation.examples import text_of
from t5x_lab.observe.console import say


class _Unconverted(seqio.PassThroughFeatureConverter):
    """Examples as their task makes them; the model pads and batches."""

    TASK_FEATURES: ClassVar[dict] = {}  # what SeqIO's Evaluator asks for, and its own pass-through converter lacks
    pack = False


class TaskMetrics:
    """Measures models on the same examples every time.

    Args:
      tasks: of the run; those without metric functions or objects, or without the split, are left out.
      config: see there.
      lengths: TASK_FEATURE_LENGTHS. Longer inputs are cut as `config` says; their number is said.
    """

    def __init__(self, tasks: WeightedTasks, config: InferEvalConfig, lengths: dict[str, int]):
        self._config, self._lengths = config, lengths
        self.tasks = [part.task for part in tasks.parts if config.split in part.task.splits and (part.task.metric_objs)]
        self.defined = bool(self.tasks)
        self._evaluators: dict[str, seqio.Evaluator] = {}

    @property
    def need_generation(self) -> list[str]:
        """Names of the tasks with metrics on what a model writes."""
        kinds = (seqio.metrics.ModelOutputType.PREDICTION, seqio.metrics.ModelOutputType.PREDICTION_WITH_AUX)
        return [task.name for task in self.tasks if any(metric.model_output_type in kinds for metric in task.metric_objs)]

    def leave_out_generation(self) -> None:
        """Leaves those out, and says so."""
        names = self.need_generation
        if names:
            say(f"The metrics of {', '.join(names)} need a network that decodes step by step; they are not measured.")
        self.tasks = [task for task in self.tasks if task.name not in names]

    def __call__(self, model, step: int, directory: str | None = None) -> dict[str, dict[str, float]]:
        """The tasks' metrics by "infer/<task>".

        Args:
          model: see `t5x_lab.evaluation`.
          step: of its parameters.
          directory: predictions and scores go to `directory`/<task>-<step>.jsonl, with inputs and targets beside them.

        Raises:
          UserError: when a task's examples or metrics fail, naming it.
        """
        return {f"infer/{task.name}": self._measure(task, model, step, directory) for task in self.tasks}

    def _measure(self, task: seqio.Task, model, step: int, directory: str | None) -> dict[str, float]:
        evaluator = self._evaluator(task)
        examples = list(evaluator.cached_task_datasets[task.name].as_numpy_iterator())
        if not examples:
            say(f'The {self._config.split} split of task "{task.name}" is empty; its metrics are not measured.')
            return {}
        outputs = _Outputs(model, examples, self._lengths, self._config)
        kinds = seqio.metrics.ModelOutputType
        try:
            metrics, _ = evaluator.evaluate(
                compute_metrics=True,
                step=step,
                model_fns={
                    kinds.PREDICTION: lambda unused: outputs.predictions(),
                    kinds.PREDICTION_WITH_AUX: lambda unused: (outputs.predictions(), {"scores": outputs.log_probs()}),
                    kinds.SCORE: lambda unused: outputs.scores(),
                    kinds.SCORE_WITH_INTERMEDIATES: lambda unused: (outputs.scores(), {}),
                },
            )
            found = metrics.result()[task.name]
        except ValueError as error:
            raise UserError(f'The metrics of task "{task.name}" failed: {error}') from error
        if outputs.cut:
            say(f'{outputs.cut} of {len(examples)} inputs of task "{task.name}" were cut to {outputs.most} tokens.')
        if directory:
            path = epath.Path(directory) / f"{task.name}-{step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in outputs.lines(task)))
        values = {name: getattr(metric, "value", metric) for name, metric in found.items()}
        return {name: float(value) for name, value in values.items() if isinstance(value, numbers.Real)}

    def _evaluator(self, task: seqio.Task) -> seqio.Evaluator:
        if task.name not in self._evaluators:
            options = dict(
                feature_converter=_Unconverted(),
                eval_split=self._config.split,
                num_examples=self._config.num_examples,
                async_compute_metrics=False,
            )
            try:
                self._evaluators[task.name] = seqio.Evaluator(name_in_seqio(task), **options)
            except ValueError as error:
                if "sequence_length" not in str(error):
                    raise UserError(f'Task "{task.name}" cannot be evaluated: {error}') from error
                if self._config.cut_inputs != "right":
                    say(f'A preprocessor of task "{task.name}" needs lengths; SeqIO cuts its inputs to TASK_FEATURE_LENGTHS.')
                self._evaluators[task.name] = seqio.Evaluator(name_in_seqio(task), sequence_length=self._lengths, **options)
        return self._evaluators[task.name]


class _Outputs:
    """What one model gives for the examples of one task, asked for as SeqIO does: pairs of (number, output)."""

    def __init__(self, model, examples: Sequence[dict], lengths: dict[str, int], config: InferEvalConfig):
        self._model, self._examples, self._config = model, examples, config
        self._targets = [example["targets"].tolist() for example in examples]
        whole = [example["inputs"].tolist() if "inputs" in example else [] for example in examples]
        self._max_tokens = config.max_tokens or lengths.get("targets") or max(map(len, self._targets))
        positions = model.max_positions and model.max_positions - (0 if model.has_encoder else self._max_tokens)
        self.most = lengths.get("inputs") if config.cut_inputs else positions
        cut = cut_left if config.cut_inputs == "left" else functools.partial(cut_right, ends=model.end_ids)
        self._inputs = [cut(ids, self.most) for ids in whole]
        self.cut = sum(len(a) < len(b) for a, b in zip(self._inputs, whole, strict=True))

    @functools.cached_property
    def generated(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [N, max_tokens], padding after the end token; their log-probabilities, or beams' scores [N, 1])"""
        beams = beams_of(self._config.beam_size, self._config.beam_alpha)
        options = dict(max_tokens=self._max_tokens, batch_size=self._config.batch_size)
        if beams is None:
            return self._model.generate_tokens(self._inputs, **options)
        tokens, scores = self._model.search_tokens(self._inputs, beams=beams, **options)
        return tokens[:, 0], scores[:, :1]

    @functools.cached_property
    def written(self) -> list[list[int]]:
        """What was generated, up to its end token; what stands behind may be a token of the vocabulary."""
        ends = self._model.end_ids
        return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in self.generated[0].tolist()]

    @functools.cached_property
    def scored(self) -> list[float]:
        return self._model.scores(self._inputs, self._targets, batch_size=self._config.batch_size).log_prob.tolist()

    def predictions(self) -> list[tuple[int, list[int]]]:
        length = self.generated[0].shape[1]  # SeqIO wants rows of one length
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
            if "generated" in vars(self):  # a cached property that was asked for
                line["prediction"] = named["targets"].decode(self.written[i])
            if "scored" in vars(self):
                line["score"] = self.scored[i]
        return lines
