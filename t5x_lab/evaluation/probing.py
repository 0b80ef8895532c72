"""Probes put to a model: their records read once, the texts compared, and scores beside chance."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import told
from t5x_lab.data.config import by_name
from t5x_lab.evaluation import rank
from t5x_lab.evaluation.config import Measured, ProbeEvaluation
from t5x_lab.evaluation.probes import Probe
from t5x_lab.evaluation.rank import Question
from t5x_lab.evaluation.tasks import naming
from t5x_lab.networks.network import has_decoder
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
        self._questions: dict[str, dict[tuple[str, str], list[Question]]] = {}
        prompts = model.config.prompts()
        self.settings = {"probes": by_name(how.probes), "num_examples": how.num_examples, "Prompts": by_name(prompts)}
        self._places: dict[tuple[str, str], RecordsOfDataSet] = {}
        with naming(how.name):
            for probe in how.probes:
                if not isinstance(probe, Probe):
                    raise UserError(f"ProbeEvaluation.probes has {probe!r}; give objects such as @Blimp().")
            names = [probe.name for probe in how.probes]
            if not names or len(set(names)) < len(names):
                raise UserError(f"ProbeEvaluation.probes has {', '.join(names) or 'none'}; give some, each of another name.")
            if not has_decoder(model.network):
                raise UserError("Probes ask for probabilities of texts, which an encoder alone does not give.")
            for probe in how.probes:
                for name in probe.data_sets:
                    self._places[probe.name, name] = place = RecordsOfDataSet(probe.data_set(name), prompts)
                    _check_here(probe, name, place.source())

    def __call__(self, model: Any) -> Measured:
        """`score`, `chance`, `relative` and `examples` of each probe; the report has those of each data set."""
        metrics: dict[str, dict[str, float | None]] = {}
        report: dict[str, dict] = {}
        failures: dict[str, str] = {}
        for probe in self._how.probes:
            try:
                asked = self._read(probe, model)
            except Exception as error:
                if jax.process_count() > 1:
                    raise  # the others may have read it, and would wait
                failures[probe.name] = getattr(error, "sentence", None) or told(error)
                continue
            found = report[probe.name] = self._measured(probe, asked, model)
            score, chance = (float(np.mean([of[key] for of in found.values()])) for key in ("score", "chance"))
            areas = [of["auc"] for of in found.values() if "auc" in of]
            metrics[probe.name] = {
                "score": score,
                "chance": chance,
                "relative": (score - chance) / (probe.best - chance) if probe.best != chance else None,
                **({"auc": float(np.mean(areas))} if areas else {}),
                "examples": sum(of["examples"] for of in found.values()),
                "cut": sum(of["cut"] for of in found.values()),
            }
        return Measured(metrics, report={"probes": report}, failures=failures)

    def _measured(self, probe: Probe, asked: dict[tuple[str, str], list[Question]], model: Any) -> dict[str, dict[str, float]]:
        """Numbers of each data set; texts of all are scored together, in batches of few shapes."""
        everything = [question for questions in asked.values() for question in questions]
        answers = iter(rank.answers(model, everything, batch_size=self._how.batch_size))
        found = {of: [(question, next(answers)) for question in questions] for of, questions in asked.items()}
        numbers = {}
        for name in probe.data_sets:
            pairs = [found[name, split] for split in splits_of(probe)]
            of = _thresholded(probe.by, *pairs) if probe.threshold_split else _compared(probe.by, *pairs)
            numbers[name] = {**of, "examples": len(pairs[0]), "cut": sum(answer.cut > 0 for _, answer in pairs[0])}
        return numbers

    def _read(self, probe: Probe, model: Any) -> dict[tuple[str, str], list[Question]]:
        """Questions in token ids, by data set and split; read once."""
        if probe.name not in self._questions:
            found = {}
            for name, split in ((name, split) for name in probe.data_sets for split in splits_of(probe)):
                place = self._places[probe.name, name]
                lines = first_records(place.source(), place.fields, split, self._how.num_examples or -1)
                if not lines:
                    raise UserError(f'The {split} split of "{name}" is empty.')
                clean = model.config.prompts().clean
                questions = (_cleaned(_question(probe, line, place.fields, name), clean) for line in lines)
                found[name, split] = [in_ids(question, model) for question in questions]
            self._questions[probe.name] = found
        return self._questions[probe.name]


def splits_of(probe: Probe) -> list[str]:
    """What is measured, and what its threshold is chosen on."""
    return [split for split in (probe.split, probe.threshold_split) if split]


def _check_here(probe: Probe, data_set: str, source: seqio.DataSource) -> None:
    files = []
    for split in splits_of(probe):
        if split not in source.splits:
            raise UserError(
                f'The probe "{probe.name}" reads the split "{split}" of "{data_set}", which has {", ".join(source.splits)} '
                "where its records are said to lie. Give its files too, or set the probe's split."
            )
        files.append(list(source.list_shards(split)))
    if len(files) > 1 and files[0] == files[1]:
        raise UserError(
            f'The probe "{probe.name}" would choose its threshold on what it measures: {files[0][0]} is both splits of '
            f'"{data_set}". Give each its own files.'
        )


Answered = list[tuple[Question, rank.Answer]]


def _compared(by: str, found: Answered) -> dict[str, float]:
    chance = float(np.mean([1 / len(question.choices) for question, _ in found]))
    return {"score": float(np.mean([_right(by, *pair) for pair in found])), "chance": chance}


def _right(by: str, question: Question, answer: rank.Answer) -> float:
    """1 for the right text; of several that are equally likely, the share of right ones."""
    values, pick = answer.values(by), answer.picks[by]
    if pick is None:
        return 0.0
    best = [number for number, value in enumerate(values) if value == values[pick]]
    return len({*best} & {*question.labels}) / len(best)


def _thresholded(by: str, found: Answered, before: Answered) -> dict[str, float]:
    """With the threshold that is best for what was asked `before`."""
    numbers = lambda pairs: ([answer.values(by)[0] for _, answer in pairs], [question.labels[0] for question, _ in pairs])
    from sklearn.metrics import matthews_corrcoef  # it takes a second

    values, labels = numbers(found)
    threshold = best_threshold(*numbers(before))
    score = float(matthews_corrcoef(labels, np.array(values) > threshold))
    return {"score": score, "auc": area(values, labels), "threshold": threshold, "chance": 0.0}


def _question(probe: Probe, line: bytes, fields: Any, data_set: str) -> Question:
    where = f"The record of {data_set}: {line.decode('utf-8', 'replace')[:200]}"
    try:
        found = probe.question(fields_of(line, fields))
        wrong = [label for label in found.labels if type(label) is not int or not 0 <= label < max(2, len(found.choices))]
    except KeyError as error:
        raise UserError(f'The probe "{probe.name}" reads the field {error}, which is missing. {where}') from error
    except Exception as error:
        raise UserError(f'The probe "{probe.name}" cannot be put: {told(error)}. {where}') from error
    if wrong:
        raise UserError(f'The probe "{probe.name}" has the label {wrong[0]!r} of {len(found.choices)} choices. {where}')
    return found


def _cleaned(question: Question, clean: Callable[[str], str] | None) -> Question:
    """With what is read of its texts (Prompts.clean); spaces between a context and what goes on from it stay."""
    if clean is None:
        return question

    def of(text: Any) -> str:
        bare = clean(text)
        before, after = (" " if text[at : at + 1 or None].isspace() and bare else "" for at in (0, -1))
        return f"{before}{bare}{after}"

    contexts = of(question.inputs) if isinstance(question.inputs, str) else tuple(map(of, question.inputs))
    return dataclasses.replace(question, inputs=contexts, choices=tuple(map(of, question.choices)))


def in_ids(question: Question, model: Any) -> Question:
    """A question in ids. What a decoder reads is encoded as one text with what it scores, as it has them in training.

    A text behind nothing is behind what a decoder reads before a text in training. An encoder reads at least its end token.
    """
    encode, special = model.vocabulary.encode, model.special_tokens
    pairs = []
    for context, text in question.pairs:
        ids = list(encode(context)) if context else []
        if model.has_encoder:
            before, after = model.around_inputs
            pairs.append(([*before, *ids, *after] or [model.eos_id], list(encode(text))))
            continue
        whole = list(encode(f"{context}{text}"))
        same = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole) - 1))
        first = [] if special.start is not None or same or special.input_start else [special.before_texts(model.eos_id)]
        pairs.append(([*first, *special.input_start, *whole[:same]], whole[same:]))
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


def _matthews(both: int, picked: int, true: int, total: int) -> float:
    """The correlation of picks and labels by their numbers; 0 where all of either are the same."""
    spread = math.sqrt(picked * (total - picked)) * math.sqrt(true * (total - true))
    return (both * total - picked * true) / spread if spread else 0.0


def area(values: list[float], labels: list[int]) -> float:
    """The area under the receiver operating characteristic; not a number where all labels are the same."""
    from sklearn.metrics import roc_auc_score  # it takes a second

    return float(roc_auc_score(labels, values)) if len(set(labels)) == 2 and np.isfinite(values).all() else math.nan
