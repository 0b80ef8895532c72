"""Runs zero-shot probes on a model: records are read once, texts are scored, scores are reported beside chance."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.config.user_code import describe_error
from t5x_lab.data.config import stable_repr
from t5x_lab.evaluation.evaluation import EvaluationResult
from t5x_lab.evaluation.probes.probe import Probe
from t5x_lab.evaluation.questions import Answer, Question
from t5x_lab.evaluation.ranking.scoring import answer_questions
from t5x_lab.evaluation.tasks import evaluation_context
from t5x_lab.networks.network import has_decoder
from t5x_lab.prompts.records.json_records import record_fields
from t5x_lab.prompts.records.locations import RecordLocation
from t5x_lab.prompts.records.subsets import sample_records


class ProbeEvaluator:
    """Evaluates models on the same questions every time.

    Args:
      name: name of the evaluation.
      probes: probes to run.
      num_examples: number of examples of each data set, from the first. None = all.
      batch_size: texts per batch.
      model: a `t5x_lab.runs.model.run.Run`.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, name: str, probes: tuple, num_examples: int | None, batch_size: int, model: Any):
        self._probes, self._num_examples, self._batch_size = probes, num_examples, batch_size
        self._questions: dict[str, dict[tuple[str, str], list[Question]]] = {}
        prompts = model.config.prompts()
        self.settings = {"probes": stable_repr(probes), "num_examples": num_examples, "Prompts": stable_repr(prompts)}
        self._locations: dict[tuple[str, str], RecordLocation] = {}
        with evaluation_context(name):
            _check_probes(probes)
            if not has_decoder(model.network):
                raise UserError("Probes need probabilities of texts, which an encoder-only model does not give.")
            for probe in probes:
                for data_set in probe.data_sets:
                    location = RecordLocation(probe.data_set(data_set), prompts)
                    self._locations[probe.name, data_set] = location
                    _check_splits(probe, data_set, location.source())

    def __call__(self, model: Any) -> EvaluationResult:
        """Returns `score`, `chance`, `relative` and `examples` of each probe. The report has those of each data set."""
        metrics: dict[str, dict[str, float | None]] = {}
        report: dict[str, dict] = {}
        failures: dict[str, str] = {}
        for probe in self._probes:
            try:
                questions = self._read(probe, model)
            except Exception as error:
                if jax.process_count() > 1:
                    raise  # other processes may have read it, and would wait
                failures[probe.name] = getattr(error, "sentence", None) or describe_error(error)
                continue
            results = report[probe.name] = self._evaluate(probe, questions, model)
            score, chance = (float(np.mean([result[key] for result in results.values()])) for key in ("score", "chance"))
            areas = [result["auc"] for result in results.values() if "auc" in result]
            metrics[probe.name] = {
                "score": score,
                "chance": chance,
                "relative": (score - chance) / (probe.best - chance) if probe.best != chance else None,
                **({"auc": float(np.mean(areas))} if areas else {}),
                "examples": sum(result["examples"] for result in results.values()),
                "cut": sum(result["cut"] for result in results.values()),
            }
        return EvaluationResult(metrics, report={"probes": report}, failures=failures)

    def _evaluate(
        self, probe: Probe, questions: dict[tuple[str, str], list[Question]], model: Any
    ) -> dict[str, dict[str, float]]:
        """Returns the numbers of each data set. All texts are scored together, in batches of few shapes."""
        all_questions = [question for group in questions.values() for question in group]
        answers = iter(answer_questions(model, all_questions, batch_size=self._batch_size))
        answered = {key: [(question, next(answers)) for question in group] for key, group in questions.items()}
        results = {}
        for name in probe.data_sets:
            pairs = [answered[name, split] for split in probe.splits]
            score = _score_threshold if probe.threshold_split else _score_choices
            result = score(probe.normalization, *pairs)
            results[name] = {**result, "examples": len(pairs[0]), "cut": sum(answer.cut > 0 for _, answer in pairs[0])}
        return results

    def _read(self, probe: Probe, model: Any) -> dict[tuple[str, str], list[Question]]:
        """Returns questions in token ids, by data set and split. They are read once."""
        if probe.name not in self._questions:
            groups = {}
            for name, split in ((name, split) for name in probe.data_sets for split in probe.splits):
                location = self._locations[probe.name, name]
                lines = sample_records(location.source(), location.fields, split, self._num_examples or -1)
                if not lines:
                    raise UserError(f'The {split} split of "{name}" is empty.')
                clean = model.config.prompts().clean
                questions = (_clean_question(_ask(probe, line, location.fields, name), clean) for line in lines)
                groups[name, split] = [encode_question(question, model) for question in questions]
            self._questions[probe.name] = groups
        return self._questions[probe.name]


def _check_probes(probes: tuple) -> None:
    for probe in probes:
        if not isinstance(probe, Probe):
            raise UserError(f"ProbeEvaluation.probes contains {probe!r}. It must hold objects such as @Blimp().")
    names = [probe.name for probe in probes]
    if not names or len(set(names)) < len(names):
        raise UserError(f"ProbeEvaluation.probes has {', '.join(names) or 'none'}. Set probes with different names.")


def _check_splits(probe: Probe, data_set: str, source: seqio.DataSource) -> None:
    files = []
    for split in probe.splits:
        if split not in source.splits:
            raise UserError(
                f'The probe "{probe.name}" reads the split "{split}" of "{data_set}", whose records have the splits '
                f"{', '.join(source.splits)}. Add its files, or set the probe's split."
            )
        files.append(list(source.list_shards(split)))
    if len(files) > 1 and files[0] == files[1]:
        raise UserError(
            f'The probe "{probe.name}" would choose its threshold on the examples it evaluates: {files[0][0]} is both splits '
            f'of "{data_set}". Set different files for each.'
        )


AnsweredQuestions = list[tuple[Question, Answer]]


def _score_choices(normalization: str, pairs: AnsweredQuestions) -> dict[str, float]:
    chance = float(np.mean([1 / len(question.choices) for question, _ in pairs]))
    return {"score": float(np.mean([_credit(normalization, *pair) for pair in pairs])), "chance": chance}


def _credit(normalization: str, question: Question, answer: Answer) -> float:
    """Returns 1 for the right text. If several are equally probable, the share of right ones among them."""
    values, pick = answer.values(normalization), answer.picks[normalization]
    if pick is None:
        return 0.0
    best = [number for number, value in enumerate(values) if value == values[pick]]
    return len({*best} & {*question.labels}) / len(best)


def _score_threshold(normalization: str, pairs: AnsweredQuestions, train_pairs: AnsweredQuestions) -> dict[str, float]:
    """Scores single texts against the threshold that is best on `train_pairs`."""
    from sklearn.metrics import matthews_corrcoef  # importing it takes a second

    values, labels = _values_and_labels(normalization, pairs)
    threshold = best_threshold(*_values_and_labels(normalization, train_pairs))
    score = float(matthews_corrcoef(labels, np.array(values) > threshold))
    return {"score": score, "auc": area_under_roc(values, labels), "threshold": threshold, "chance": 0.0}


def _values_and_labels(normalization: str, pairs: AnsweredQuestions) -> tuple[list[float], list[int]]:
    return [answer.values(normalization)[0] for _, answer in pairs], [question.labels[0] for question, _ in pairs]


def _ask(probe: Probe, line: bytes, records: Any, data_set: str) -> Question:
    context = f"The record of {data_set}: {line.decode('utf-8', 'replace')[:200]}"
    try:
        question = probe.question(record_fields(line, records))
        num_labels = max(2, len(question.choices))
        invalid = [label for label in question.labels if type(label) is not int or not 0 <= label < num_labels]
    except KeyError as error:
        raise UserError(f'The probe "{probe.name}" reads the field {error}, which is missing. {context}') from error
    except Exception as error:
        raise UserError(f'The probe "{probe.name}" fails: {describe_error(error)}. {context}') from error
    if invalid:
        raise UserError(f'The probe "{probe.name}" has the label {invalid[0]!r} of {len(question.choices)} choices. {context}')
    return question


def _clean_question(question: Question, clean: Callable[[str], str] | None) -> Question:
    """Applies Prompts.clean to the texts. Spaces between a context and its continuation stay."""
    if clean is None:
        return question

    def clean_text(text: Any) -> str:
        stripped = clean(text)
        before, after = (" " if text[at : at + 1 or None].isspace() and stripped else "" for at in (0, -1))
        return f"{before}{stripped}{after}"

    is_single = isinstance(question.inputs, str)
    contexts = clean_text(question.inputs) if is_single else tuple(map(clean_text, question.inputs))
    return dataclasses.replace(question, inputs=contexts, choices=tuple(map(clean_text, question.choices)))


def encode_question(question: Question, model: Any) -> Question:
    """Returns the question in token ids.

    For a decoder, context and continuation are encoded as one text, as in training. A continuation of an empty context follows
    what the decoder reads before a text in training. An encoder reads at least its EOS token.
    """
    encode, special = model.vocabulary.encode, model.special_tokens
    pairs = []
    for context, text in question.pairs:
        ids = list(encode(context)) if context else []
        if model.has_encoder:
            prefix, suffix = model.input_affixes
            pairs.append(([*prefix, *ids, *suffix] or [model.eos_id], list(encode(text))))
            continue
        whole = list(encode(f"{context}{text}"))
        mismatch = (i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b)
        shared = next(mismatch, min(len(ids), len(whole) - 1))
        has_prefix = special.start is not None or shared or special.input_start
        start = [] if has_prefix else [special.id_before_texts(model.eos_id)]
        pairs.append(([*start, *special.input_start, *whole[:shared]], whole[shared:]))
    inputs, choices = zip(*pairs, strict=True)
    return Question(inputs, choices, question.label, characters=tuple(map(len, question.choices)))


def best_threshold(values: list[float], labels: list[int]) -> float:
    """Returns the threshold above which values predict label 1 with the highest Matthews correlation, the lowest if tied."""
    order = np.sort(np.unique(values))
    middles = [-math.inf, *((order[1:] + order[:-1]) / 2)]
    ranks, truth = np.array(values), np.array(labels)
    sorted_by = np.argsort(ranks)
    ones = np.concatenate([[0], np.cumsum(truth[sorted_by])])
    below = np.searchsorted(ranks[sorted_by], middles)
    tp, predicted, total = ones[-1] - ones[below], len(ranks) - below, len(ranks)
    pairs = zip(tp.tolist(), predicted.tolist(), strict=True)
    return float(middles[int(np.argmax([_matthews(*pair, int(ones[-1]), total) for pair in pairs]))])


def _matthews(both: int, picked: int, true: int, total: int) -> float:
    """Returns the correlation of picks and labels from their counts, 0 if either is constant."""
    spread = math.sqrt(picked * (total - picked)) * math.sqrt(true * (total - true))
    return (both * total - picked * true) / spread if spread else 0.0


def area_under_roc(values: list[float], labels: list[int]) -> float:
    """Returns the area under the receiver operating characteristic, NaN if all labels are the same."""
    from sklearn.metrics import roc_auc_score  # importing it takes a second

    return float(roc_auc_score(labels, values)) if len(set(labels)) == 2 and np.isfinite(values).all() else math.nan
