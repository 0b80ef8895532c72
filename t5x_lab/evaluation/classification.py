"""What a classification head predicts for the examples of tasks, and the metrics of that."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.data.failures import naming_what_fails
from t5x_lab.data.mixture import Part, WeightedTasks
from t5x_lab.data.reading import in_order
from t5x_lab.evaluation.config import ClassificationEvaluation, Measured
from t5x_lab.evaluation.examples import Example
from t5x_lab.evaluation.tasks import EvaluatedTasks, evaluated_tasks, naming
from t5x_lab.networks.head import ClassificationHead, checked_head
from t5x_lab.prompts.classification import Classification, Texts
from t5x_lab.prompts.classified import ClassifiedTask, check_head

Ids = list[int]


@dataclasses.dataclass(frozen=True)
class Classified:
    """What is predicted for one example.

    Attributes:
      label: the likeliest class.
      probabilities: of the classes, by name.
      score: where classes are the whole numbers of a score, their mean.
    """

    label: str
    probabilities: dict[str, float]
    score: float | None = None

    def as_json(self) -> dict:
        found = {"prediction": self.label, "probabilities": self.probabilities}
        return found if self.score is None else {**found, "score": self.score}


def classified(logits: np.ndarray, head: ClassificationHead) -> list[Classified]:
    """Predictions of logits [N, C]."""
    probabilities = _softmax(logits)
    scores = _scores(probabilities) if head.is_score else [None] * len(logits)
    return [
        Classified(head.classes[int(row.argmax())], dict(zip(head.classes, row.tolist(), strict=True)), score)
        for row, score in zip(probabilities, scores, strict=True)
    ]


def texts_of(entry: Any, classification: Classification) -> Texts:
    """What a caller gives to classify: a text, texts of the segments with the list of choices behind them, or a record.

    Raises:
      UserError: where it is another number of texts than the task has.
    """
    if isinstance(entry, Mapping):
        return classification.texts(entry)
    parts = [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, list | tuple) else None
    if parts is None or not all(_is_text(part) for part in parts):
        raise UserError(f"{entry!r:.80} is no text, no list of texts, and no record with fields")
    choices = parts.pop() if classification.choices and parts else ()
    segments = tuple((part,) if isinstance(part, str) else tuple(part) for part in parts)
    names = [name if isinstance(name, str) else " and ".join(name) for name in classification.segments]
    if len(segments) != len(names) or (classification.choices and isinstance(choices, str)):
        more = ", and a list of the choices" if classification.choices else ""
        raise UserError(
            f'there are {len(segments)} texts; of "{classification.data_set}" are read {len(names)}, {", ".join(names)}{more}'
        )
    if classification.choices and len(choices) != len(classification.classes):
        raise UserError(f"there are {len(choices)} choices; all have {len(classification.classes)}")
    return Texts(segments, tuple(choices))


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, list | tuple) and all(isinstance(text, str) for text in part))


@dataclasses.dataclass(frozen=True)
class Sequenced:
    """An example of a task, as `Run.classify` takes it: the token ids of its sequences."""

    ids: list[Ids]
    task: seqio.Task


def classified_examples(tasks: WeightedTasks, part: Part, split: str, cut_to: Callable) -> Iterator[Example]:
    """Examples of a task to classify, with their texts and labels; they are cut already."""
    del cut_to
    task = part.task
    if not isinstance(task, ClassifiedTask):
        raise UserError(f'The task "{task.name}" has no classes to tell apart; name one such as classify_glue_cola.')
    with naming_what_fails([part], split):
        for number, example in enumerate(in_order(part, split).as_numpy_iterator()):
            sequences, where = sequences_of(example), f'task "{task.name}", {split}, example {number}'
            record = {"task": task.name, **_shown(task, sequences, example["label"])}
            yield Example(record, Sequenced(sequences, task), None, where)


def _shown(task: ClassifiedTask, sequences: list[Ids], label: np.ndarray) -> dict:
    """The texts of an example, with $ between segments as the paper has it, and its label; None where that is not known."""
    of, decode, delimiter = task.classification, task.output_features["inputs"].vocabulary.decode, task.special_ids[1]
    groups = (
        [list(ids) for is_text, ids in itertools.groupby(row[1:-1], lambda i: i != delimiter) if is_text] for row in sequences
    )
    texts = [" $ ".join(map(decode, segments)) for segments in groups]
    if not label.sum():
        return {"inputs": texts, "label": None}
    score = round(float(_scores(label)), 4) if of.is_score else None
    return {"inputs": texts, "label": of.classes[int(label.argmax())] if score is None else score}


class ClassifiedTasks:
    """Classifies the same examples every time.

    Args:
      found: the tasks.
      how: see there.
      head: the model's.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, found: EvaluatedTasks, how: ClassificationEvaluation, head: ClassificationHead):
        self._found, self._how, self._head, self.settings = found, how, head, found.settings(how)
        self._made: dict[str, list[tuple[list[Ids], np.ndarray]]] = {}

    @classmethod
    def of(cls, how: ClassificationEvaluation, model: Any) -> "ClassifiedTasks | None":
        with naming(how.name):
            head = checked_head(model.network)
        found = evaluated_tasks(how, model)
        found = found.only(lambda part: isinstance(part.task, ClassifiedTask), "classes to tell apart")
        for part in found.parts:
            with naming(how.name):
                check_head(part.task, head)
        return cls(found, how, head) if found.parts else None

    def __call__(self, model: Any) -> Measured:
        """The loss and the task's metrics, on the examples whose label is known."""
        metrics: dict[str, dict[str, float | None]] = {}
        lines: dict[str, list[dict]] = {}
        failures: dict[str, str] = {}
        for part, (examples,) in self._found.read_each(lambda part: (self._examples(part),), failures, "it is not classified"):
            name, sequences = part.task.name, [sequences for sequences, _ in examples]
            wanted = np.array([label for _, label in examples], np.float64)
            logits = model.class_logits(sequences, batch_size=self._how.batch_size)
            is_known = wanted.sum(axis=1) > 0
            metrics[name] = measured(logits[is_known], wanted[is_known], part.task.classification.metrics)
            metrics[name]["examples"] = int(is_known.sum())
            if self._how.outputs:
                lines[name] = self._lines(part, sequences, wanted, classified(logits, self._head))
        return Measured(metrics, lines, failures=failures)

    def _examples(self, part: Part) -> list[tuple[list[Ids], np.ndarray]]:
        if part.task.name not in self._made:
            split = self._found.data.eval_split
            with naming_what_fails([part], split):
                read = in_order(part, split).take(self._how.num_examples or -1).as_numpy_iterator()
                self._made[part.task.name] = [(sequences_of(example), example["label"]) for example in read]
        return self._made[part.task.name]

    def _lines(self, part: Part, sequences: Sequence[list[Ids]], wanted: np.ndarray, found: list[Classified]) -> list[dict]:
        of_examples = zip(sequences, wanted, found, strict=True)
        return [{**_shown(part.task, ids, label), **one.as_json()} for ids, label, one in of_examples]


def sequences_of(example: Mapping[str, np.ndarray]) -> list[Ids]:
    """The token ids of an example's sequences."""
    return [row[:length].tolist() for row, length in zip(example["inputs"], example["lengths"], strict=True)]


def measured(logits: np.ndarray, wanted: np.ndarray, metrics: Sequence[str]) -> dict[str, float | None]:
    """The mean cross-entropy `loss`, and metrics, of logits and of the classes' true probabilities, both [N, C].

    Of a score, predictions are the mean of the classes; a metric that has no value, as the correlation of a constant, is 0.
    """
    if not len(logits):
        return {}
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    found: dict[str, float | None] = {"loss": float(-(wanted * log_probs).sum(axis=-1).mean())}
    labels, predictions = wanted.argmax(axis=-1), logits.argmax(axis=-1)
    for name in metrics:
        of_scores = name in _OF_SCORES
        pair = (_scores(wanted), _scores(_softmax(logits))) if of_scores else (labels, predictions)
        value = float((_OF_SCORES if of_scores else _OF_CLASSES)[name](*pair))
        found[name] = value if np.isfinite(value) else 0.0
    return found


def _matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef  # it takes a second

    return matthews_corrcoef(labels, predictions)


def _f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return f1_score(labels, predictions, zero_division=0.0)


def _pearson(true: np.ndarray, predicted: np.ndarray) -> float:
    return np.corrcoef(true, predicted)[0, 1] if np.ptp(true) and np.ptp(predicted) else 0.0


def _spearman(true: np.ndarray, predicted: np.ndarray) -> float:
    from scipy.stats import rankdata

    return _pearson(rankdata(true), rankdata(predicted))


_OF_CLASSES: dict[str, Callable] = {
    "accuracy": lambda labels, predictions: np.mean(labels == predictions),
    "f1": _f1,
    "matthews": _matthews,
}
_OF_SCORES: dict[str, Callable] = {"pearson": _pearson, "spearman": _spearman}


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))


def _scores(probabilities: np.ndarray) -> np.ndarray:
    return probabilities @ np.arange(probabilities.shape[-1])
