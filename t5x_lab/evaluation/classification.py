"""Predictions and metrics of a classification head."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.data.pipeline.failures import report_failing_record
from t5x_lab.data.pipeline.reading import read_split
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.evaluation.evaluation import EvaluationResult, TaskEvaluation
from t5x_lab.evaluation.examples import Example
from t5x_lab.evaluation.tasks import EvaluationTasks, evaluation_context, resolve_evaluation_tasks
from t5x_lab.networks.head import ClassificationHead, require_head
from t5x_lab.prompts.classification.config import Classification, Texts
from t5x_lab.prompts.classification.task import ClassificationTask, check_head

Ids = list[int]


@dataclasses.dataclass(frozen=True)
class ClassPrediction:
    """Prediction for one example.

    Attributes:
      label: the most likely class.
      probabilities: probability of each class, by name.
      score: mean of the classes if they are the whole numbers of a score, else None.
    """

    label: str
    probabilities: dict[str, float]
    score: float | None = None

    def to_json(self) -> dict:
        fields = {"prediction": self.label, "probabilities": self.probabilities}
        return fields if self.score is None else {**fields, "score": self.score}


def predict_classes(logits: np.ndarray, head: ClassificationHead) -> list[ClassPrediction]:
    """Returns the predictions of logits [N, C]."""
    probabilities = _softmax(logits)
    scores = _scores(probabilities) if head.is_score else [None] * len(logits)
    return [
        ClassPrediction(head.classes[int(row.argmax())], dict(zip(head.classes, row.tolist(), strict=True)), score)
        for row, score in zip(probabilities, scores, strict=True)
    ]


def parse_texts(entry: Any, classification: Classification) -> Texts:
    """Returns the texts of an entry that a caller passes to `Run.classify`.

    Args:
      entry: a text, a list of the segments' texts followed by the list of choices if there are any, or a record.
      classification: the task.

    Raises:
      UserError: if the number of texts is not the task's.
    """
    if isinstance(entry, Mapping):
        return classification.texts(entry)
    texts = [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, list | tuple) else None
    if texts is None or not all(_is_text(text) for text in texts):
        raise UserError(f"{entry!r:.80} is neither a text, nor a list of texts, nor a record with fields")
    choices = texts.pop() if classification.choices and texts else ()
    segments = tuple((text,) if isinstance(text, str) else tuple(text) for text in texts)
    names = [name if isinstance(name, str) else " and ".join(name) for name in classification.segments]
    if len(segments) != len(names) or (classification.choices and isinstance(choices, str)):
        suffix = ", and a list of the choices" if classification.choices else ""
        raise UserError(
            f'there are {len(segments)} texts; "{classification.data_set}" has {len(names)}: {", ".join(names)}{suffix}'
        )
    if classification.choices and len(choices) != len(classification.classes):
        raise UserError(f"there are {len(choices)} choices; every example has {len(classification.classes)}")
    return Texts(segments, tuple(choices))


def _is_text(value: Any) -> bool:
    is_list_of_texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    return isinstance(value, str) or is_list_of_texts


@dataclasses.dataclass(frozen=True)
class EncodedExample:
    """Token ids of an example's sequences, which `Run.classify` takes as they are."""

    ids: list[Ids]
    task: seqio.Task


def classification_examples(
    mixture: ResolvedMixture, component: Component, split: str, truncate: Callable
) -> Iterator[Example]:
    """Yields the examples of a classification task for `t5x_lab infer`. They are truncated already."""
    del mixture, truncate
    task = component.task
    if not isinstance(task, ClassificationTask):
        raise UserError(f'The task "{task.name}" is not a classification task. Use one such as classify_glue_cola.')
    with report_failing_record([component], split):
        for number, example in enumerate(read_split(component, split).as_numpy_iterator()):
            sequences, location = example_sequences(example), f'task "{task.name}", {split}, example {number}'
            record = {"task": task.name, **_example_record(task, sequences, example["label"])}
            yield Example(record, EncodedExample(sequences, task), None, location)


def _example_record(task: ClassificationTask, sequences: list[Ids], label: np.ndarray) -> dict:
    """Returns the texts of an example, segments joined by $ as in the paper, and its label. None = unknown."""
    classification, delimiter = task.classification, task.special_ids[1]
    decode = task.output_features["inputs"].vocabulary.decode
    segments = (
        [list(ids) for is_text, ids in itertools.groupby(row[1:-1], lambda i: i != delimiter) if is_text] for row in sequences
    )
    texts = [" $ ".join(map(decode, ids)) for ids in segments]
    if not label.sum():
        return {"inputs": texts, "label": None}
    score = round(float(_scores(label)), 4) if classification.is_score else None
    return {"inputs": texts, "label": classification.classes[int(label.argmax())] if score is None else score}


class ClassificationEvaluator:
    """Classifies the same examples in every evaluation.

    Args:
      tasks: the tasks to read.
      evaluation: settings of the evaluation.
      outputs: whether predictions are returned.
      head: the model's classification head.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, tasks: EvaluationTasks, evaluation: TaskEvaluation, outputs: bool, head: ClassificationHead):
        self._tasks, self._evaluation, self._outputs, self._head = tasks, evaluation, outputs, head
        self.settings = tasks.settings(evaluation)
        self._examples: dict[str, list[tuple[list[Ids], np.ndarray]]] = {}

    @classmethod
    def create(cls, evaluation: TaskEvaluation, outputs: bool, model: Any) -> "ClassificationEvaluator | None":
        """Returns the evaluator, or None if no task has the split. See `Evaluation.prepare`."""
        with evaluation_context(evaluation.name):
            head = require_head(model.network)
        tasks = resolve_evaluation_tasks(evaluation, model)
        tasks = tasks.only(lambda component: isinstance(component.task, ClassificationTask), "classes to predict")
        for component in tasks.components:
            with evaluation_context(evaluation.name):
                check_head(component.task, head)
        return cls(tasks, evaluation, outputs, head) if tasks.components else None

    def __call__(self, model: Any) -> EvaluationResult:
        """Returns loss and metrics on the examples whose label is known."""
        metrics: dict[str, dict[str, float | None]] = {}
        lines: dict[str, list[dict]] = {}
        failures: dict[str, str] = {}
        read = lambda component: (self._read(component),)
        for component, (examples,) in self._tasks.read_each(read, failures, "it is not classified"):
            task, sequences = component.task, [sequences for sequences, _ in examples]
            labels = np.array([label for _, label in examples], np.float64)
            logits = model.class_logits(sequences, batch_size=self._evaluation.batch_size)
            is_known = labels.sum(axis=1) > 0
            metrics[task.name] = compute_metrics(logits[is_known], labels[is_known], task.classification.metrics)
            metrics[task.name]["examples"] = int(is_known.sum())
            if self._outputs:
                predictions = predict_classes(logits, self._head)
                lines[task.name] = [
                    {**_example_record(task, ids, label), **prediction.to_json()}
                    for ids, label, prediction in zip(sequences, labels, predictions, strict=True)
                ]
        return EvaluationResult(metrics, lines, failures=failures)

    def _read(self, component: Component) -> list[tuple[list[Ids], np.ndarray]]:
        name, split = component.task.name, self._tasks.data.eval_split
        if name not in self._examples:
            with report_failing_record([component], split):
                dataset = read_split(component, split).take(self._evaluation.num_examples or -1)
                self._examples[name] = [(example_sequences(x), x["label"]) for x in dataset.as_numpy_iterator()]
        return self._examples[name]


def example_sequences(example: Mapping[str, np.ndarray]) -> list[Ids]:
    """Returns the token ids of an example's sequences."""
    return [row[:length].tolist() for row, length in zip(example["inputs"], example["lengths"], strict=True)]


def compute_metrics(logits: np.ndarray, labels: np.ndarray, metrics: Sequence[str]) -> dict[str, float | None]:
    """Returns the mean cross-entropy `loss` and the named metrics.

    Args:
      logits: [N, C].
      labels: true probabilities of the classes, [N, C].
      metrics: names. For a score, the prediction is the mean of the classes. An undefined metric, such as the correlation with
        a constant, is 0.
    """
    if not len(logits):
        return {}
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    results: dict[str, float | None] = {"loss": float(-(labels * log_probs).sum(axis=-1).mean())}
    for name in metrics:
        if name in _SCORE_METRICS:
            value = float(_SCORE_METRICS[name](_scores(labels), _scores(_softmax(logits))))
        else:
            value = float(_CLASS_METRICS[name](labels.argmax(axis=-1), logits.argmax(axis=-1)))
        results[name] = value if np.isfinite(value) else 0.0
    return results


def _matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef  # importing it takes a second

    return matthews_corrcoef(labels, predictions)


def _f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    from sklearn.metrics import f1_score  # importing it takes a second

    return f1_score(labels, predictions, zero_division=0.0)


def _pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    return np.corrcoef(labels, predictions)[0, 1] if np.ptp(labels) and np.ptp(predictions) else 0.0


def _spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    from scipy.stats import rankdata  # importing it takes a second

    return _pearson(rankdata(labels), rankdata(predictions))


_CLASS_METRICS: dict[str, Callable] = {
    "accuracy": lambda labels, predictions: np.mean(labels == predictions),
    "f1": _f1,
    "matthews": _matthews,
}
_SCORE_METRICS: dict[str, Callable] = {"pearson": _pearson, "spearman": _spearman}


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))


def _scores(probabilities: np.ndarray) -> np.ndarray:
    return probabilities @ np.arange(probabilities.shape[-1])
