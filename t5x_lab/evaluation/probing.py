"""Probes put to a model: their records read once, the texts compared, and scores beside chance."""

import math
from typing import Any

import numpy as np

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation import rank
from t5x_lab.evaluation.config import Measured, ProbeEvaluation
from t5x_lab.evaluation.probes import Acceptability, Probe
from t5x_lab.evaluation.rank import Question
from t5x_lab.evaluation.tasks import naming
from t5x_lab.prompts.places import RecordsOfDataSet
from t5x_lab.prompts.records import fields_of, first_records


class Probes:
    """Asks models the same questions every time.

    Args:
      how: see there.
      model: a `t5x_lab.runs.run.Run`.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, how: ProbeEvaluation, model: Any):
        self._how = how
        self._questions: dict[tuple[str, str], list[Question]] = {}
        prompts = model.config.prompts()
        self.settings = {"probes": str(how.probes), "num_examples": how.num_examples, "Prompts": str(prompts)}
        with naming(how.name):
            for probe in how.probes:
                if not isinstance(probe, Probe):
                    raise UserError(f"ProbeEvaluation.probes has {probe!r}; give objects such as @Blimp().")
            names = [probe.name for probe in how.probes]
            if not names or len(set(names)) < len(names):
                raise UserError(f"ProbeEvaluation.probes has {', '.join(names) or 'none'}; give some, each of another name.")
            self._places: dict[str, RecordsOfDataSet] = {}
            for probe in how.probes:
                for name in probe.data_sets:
                    self._places[name] = RecordsOfDataSet(probe.data_set(name), prompts)
                    self._places[name].source().list_shards(probe.split)

    def __call__(self, model: Any) -> Measured:
        """`score`, `chance`, `relative` and `examples` of each probe; the report has those of each data set."""
        metrics: dict[str, dict[str, float | None]] = {}
        report: dict[str, dict] = {}
        failures: dict[str, str] = {}
        for probe in self._how.probes:
            try:
                found = self._measured(probe, model)
            except UserError as error:
                failures[probe.name] = error.sentence
                continue
            report[probe.name] = found
            score, chance = (float(np.mean([of[key] for of in found.values()])) for key in ("score", "chance"))
            areas = [of["auc"] for of in found.values() if "auc" in of]
            metrics[probe.name] = {
                "score": score,
                "chance": chance,
                "relative": (score - chance) / (probe.best - chance),
                **({"auc": float(np.mean(areas))} if areas else {}),
                "examples": sum(of["examples"] for of in found.values()),
            }
        return Measured(metrics, report={"probes": report}, failures=failures)

    def _measured(self, probe: Probe, model: Any) -> dict[str, dict[str, float]]:
        """Numbers of each data set; texts of all are scored together, in batches of few shapes."""
        splits = [probe.split, *([probe.threshold_split] if isinstance(probe, Acceptability) else [])]
        asked = {(name, split): self._read(probe, name, split, model) for name in probe.data_sets for split in splits}
        everything = [question for questions in asked.values() for question in questions]
        answers = iter(rank.answers(model, everything, batch_size=self._how.batch_size))
        found = {of: [next(answers) for _ in questions] for of, questions in asked.items()}
        numbers = {}
        for name in probe.data_sets:
            pairs = [list(zip(asked[name, split], found[name, split], strict=True)) for split in splits]
            of = _thresholded(probe.by, *pairs) if isinstance(probe, Acceptability) else _compared(probe.by, *pairs)
            numbers[name] = {**of, "examples": len(pairs[0])}
        return numbers

    def _read(self, probe: Probe, data_set: str, split: str, model: Any) -> list[Question]:
        """Questions in token ids; read once."""
        if (data_set, split) not in self._questions:
            place = self._places[data_set]
            lines = first_records(place.source(), place.fields, split, self._how.num_examples or -1)
            if not lines:
                raise UserError(f'The {split} split of "{data_set}" is empty.')
            self._questions[data_set, split] = [in_ids(_question(probe, line, place.fields, data_set), model) for line in lines]
        return self._questions[data_set, split]


Answered = list[tuple[Question, rank.Answer]]


def _compared(by: str, found: Answered) -> dict[str, float]:
    right = [answer.picks[by] in question.labels for question, answer in found]
    return {"score": float(np.mean(right)), "chance": float(np.mean([1 / len(question.choices) for question, _ in found]))}


def _thresholded(by: str, found: Answered, before: Answered) -> dict[str, float]:
    """With the threshold that is best for what was asked `before`."""
    numbers = lambda pairs: ([answer.values(by)[0] for _, answer in pairs], [question.labels[0] for question, _ in pairs])
    values, labels = numbers(found)
    threshold = best_threshold(*numbers(before))
    score = matthews(np.array(values) > threshold, labels)
    return {"score": score, "auc": area(values, labels), "threshold": threshold, "chance": 0.0}


def _question(probe: Probe, line: bytes, fields: Any, data_set: str) -> Question:
    where = f"The record of {data_set}: {line.decode('utf-8', 'replace')[:200]}"
    try:
        found = probe.question(fields_of(line, fields))
    except KeyError as error:
        raise UserError(f'The probe "{probe.name}" reads the field {error}, which is missing. {where}') from error
    except (UserError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f'The probe "{probe.name}" cannot be put: {error}. {where}') from error
    wrong = [label for label in found.labels if not isinstance(label, int) or not 0 <= label < max(2, len(found.choices))]
    if wrong:
        raise UserError(f'The probe "{probe.name}" has the label {wrong[0]!r} of {len(found.choices)} choices. {where}')
    return found


def in_ids(question: Question, model: Any) -> Question:
    """A question in ids. What a decoder reads is encoded as one text with what it scores, as it has them in training.

    A text behind nothing is behind the start token; where there is none, its first token is read and not scored. An encoder
    reads its end token, at least.
    """
    encode, before = model.vocabulary.encode, list(model.special_tokens.input_start)
    pairs = []
    for context, text in question.pairs:
        ids = list(encode(context)) if context else []
        if model.has_encoder:
            pairs.append(([*before, *ids, model.eos_id], list(encode(text))))
            continue
        whole = list(encode(f"{context}{text}"))
        same = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole) - 1))
        if not same and not before and model.special_tokens.start is None:
            same = 1
        pairs.append(([*before, *whole[:same]], whole[same:]))
    inputs, choices = zip(*pairs, strict=True)
    return Question(inputs, choices, question.label, characters=tuple(map(len, question.choices)))


def best_threshold(values: list[float], labels: list[int]) -> float:
    """Where to part values so that those above have the label 1 with the highest Matthews correlation; the lowest of equals."""
    order = np.sort(np.unique(values))
    middles = [-math.inf, *((order[1:] + order[:-1]) / 2)]
    ranks, truth = np.array(values), np.array(labels)
    sorted_by = np.argsort(ranks)
    ones = np.concatenate([[0], np.cumsum(truth[sorted_by])])
    below = np.searchsorted(ranks[sorted_by], middles)
    tp, predicted, total = ones[-1] - ones[below], len(ranks) - below, len(ranks)
    found = [_matthews(*each, int(ones[-1]), total) for each in zip(tp.tolist(), predicted.tolist(), strict=True)]
    return float(middles[int(np.argmax(found))])


def matthews(picks: Any, labels: Any) -> float:
    """The correlation of picks and labels, 0 or 1 each; 0 where all of either are the same."""
    picks, labels = np.array(picks, bool), np.array(labels, bool)
    return _matthews(int((picks & labels).sum()), int(picks.sum()), int(labels.sum()), len(labels))


def _matthews(both: int, picked: int, true: int, total: int) -> float:
    spread = math.sqrt(picked * (total - picked)) * math.sqrt(true * (total - true))
    return (both * total - picked * true) / spread if spread else 0.0


def area(values: list[float], labels: list[int]) -> float:
    """The area under the receiver operating characteristic; not a number where all labels are the same."""
    from sklearn.metrics import roc_auc_score  # it takes a second

    return float(roc_auc_score(labels, values)) if len(set(labels)) == 2 else math.nan
