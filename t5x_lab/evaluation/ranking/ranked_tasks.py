"""Rank classification on SeqIO tasks with one row per choice, as `t5.data.preprocessors.rank_classification` makes them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.config.log import log
from t5x_lab.data.pipeline.failures import report_failing_record
from t5x_lab.data.pipeline.reading import read_split
from t5x_lab.data.tasks.mixture import Component, ResolvedMixture
from t5x_lab.evaluation.evaluation import EvaluationResult, OutputEvaluation
from t5x_lab.evaluation.examples import Example, feature_text
from t5x_lab.evaluation.questions import Answer, Question
from t5x_lab.evaluation.ranking import accuracy
from t5x_lab.evaluation.ranking.scoring import answer_questions
from t5x_lab.evaluation.tasks import EvaluationTasks, TruncatedInputs, evaluation_context, resolve_evaluation_tasks

_REQUIRED_FEATURES = ("targets", "idx", "is_correct")


class RankingEvaluator:
    """Ranks the choices of the same questions in every evaluation.

    Args:
      tasks: the tasks to read.
      evaluation: settings of the evaluation.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, tasks: EvaluationTasks, evaluation: OutputEvaluation):
        self._tasks, self._evaluation, self.settings = tasks, evaluation, tasks.settings(evaluation)
        self._questions: dict[str, tuple[list[list[ChoiceRow]], list[Question]]] = {}
        self._datasets = {part.task.name: choice_rows(part, tasks.data.eval_split) for part in tasks.components}
        self._chooser: RankingEvaluator | None = None
        self._choose_on = ""

    @classmethod
    def create(cls, evaluation: OutputEvaluation, choose_on: str | None, model: Any) -> "RankingEvaluator | None":
        """Returns the evaluator, or None if no task has the split.

        Args:
          evaluation: settings of the evaluation.
          choose_on: the split on which the best prompts are chosen, or None.
          model: a `Run` without parameters.
        """
        tasks = resolve_evaluation_tasks(evaluation, model).only(is_ranked, "choices to rank. MetricsEvaluation measures it")
        with evaluation_context(evaluation.name):
            evaluator = cls(tasks, evaluation) if tasks.components else None
        if evaluator and choose_on:
            changes: dict[str, Any] = {"split": choose_on, "outputs": False, "choose_on": None}
            other = dataclasses.replace(evaluation, **changes)
            evaluator._chooser, evaluator._choose_on = cls.create(other, None, model), choose_on
        return evaluator

    def __call__(self, model: Any) -> EvaluationResult:
        """Returns `accuracy.accuracies` of each task, and the `accuracy.report` of all."""
        result = self._evaluate(model)
        if self._chooser and result.report:
            other = self._chooser._evaluate(model)
            failures = {f"{task} ({self._choose_on})": reason for task, reason in other.failures.items()}
            report = result.report
            if other.report:
                report = accuracy.add_best_prompts(result.report, other.report, self._choose_on)
            result = dataclasses.replace(result, report=report, failures={**result.failures, **failures})
        return result

    def _evaluate(self, model: Any) -> EvaluationResult:
        metrics: dict[str, dict] = {}
        failures: dict[str, str] = {}
        lines: dict[str, list] = {}
        all_questions: list[Question] = []
        all_answers: list[Answer] = []
        read = lambda component: self._read(component, model)
        for component, (grouped_rows, questions) in self._tasks.read_each(read, failures, "nothing is ranked"):
            name = component.task.name
            answers = answer_questions(model, questions, batch_size=self._evaluation.batch_size)
            metrics[name] = accuracy.accuracies(questions, answers)
            all_questions, all_answers = [*all_questions, *questions], [*all_answers, *answers]
            if self._evaluation.outputs:
                lines[name] = [
                    {**question_record(rows, question), **answer.to_json(question)}
                    for rows, question, answer in zip(grouped_rows, questions, answers, strict=True)
                ]
        report = accuracy.report(all_questions, all_answers) if all_questions else {}
        return EvaluationResult(metrics, lines, report=report, failures=failures)

    def _read(self, component: Component, model: Any) -> tuple[list[list["ChoiceRow"]], list[Question]]:
        """Returns the rows of each question, and the questions. They are read once."""
        name = component.task.name
        if name not in self._questions:
            data = self._tasks.data
            with report_failing_record([component], data.eval_split):
                grouped = group_by_question(self._datasets[name], component)
                grouped_rows = list(itertools.islice(grouped, self._evaluation.num_examples))
            self._questions[name] = grouped_rows, self._make_questions(component, grouped_rows, model)
        return self._questions[name]

    def _make_questions(self, component: Component, grouped_rows: list[list["ChoiceRow"]], model: Any) -> list[Question]:
        all_rows = [row for rows in grouped_rows for row in rows]
        longest = max((len(row.targets) for row in all_rows), default=0)
        inputs = TruncatedInputs(model, component, [row.example for row in all_rows], self._evaluation.truncate_inputs, longest)
        if inputs.num_cut:
            log(
                f'{inputs.num_cut} of {len(all_rows)} inputs of task "{component.task.name}" were truncated to '
                f"{inputs.limit} tokens."
            )
        dataset, prompt = dataset_and_prompt(self._tasks.mixture.name, component.task)
        ids = iter(inputs.ids)
        return [make_question(rows, [next(ids) for _ in rows], dataset, prompt) for rows in grouped_rows]


@dataclasses.dataclass(frozen=True)
class ChoiceRow:
    """One choice of a question.

    Attributes:
      example: the task's example.
      inputs, targets: token ids.
      texts: texts of inputs and targets.
    """

    example: dict
    inputs: list[int]
    targets: list[int]
    texts: dict[str, str]


def is_ranked(component: Component) -> bool:
    """Returns whether a task may have choices to rank. Prompted tasks for generation have none."""
    return not getattr(component.task, "generates", False)


def choice_rows(component: Component, split: str) -> tf.data.Dataset:
    """Returns the rows of a task, one per choice.

    Raises:
      UserError: if its preprocessors do not make the required features.
    """
    dataset = read_split(component, split)
    missing = [name for name in _REQUIRED_FEATURES if name not in dataset.element_spec]
    if missing:
        raise UserError(
            f'The task "{component.task.name}" has no "{missing[0]}", so its choices cannot be ranked. It has '
            f"{', '.join(dataset.element_spec)}. Prepare it with t5.data.preprocessors.rank_classification."
        )
    return dataset


def group_by_question(dataset: tf.data.Dataset, component: Component) -> Iterator[list[ChoiceRow]]:
    """Yields the rows of each question: adjacent rows with the same question number."""
    features = component.task.output_features
    for number, group in itertools.groupby(dataset.as_numpy_iterator(), lambda example: int(example["idx"][0])):
        rows = []
        for example in group:
            names = [name for name in ("inputs", "targets") if name in example]
            vocabulary = {name: features[name if name in features else "targets"].vocabulary for name in names}
            texts = {name: feature_text(example, name, vocabulary[name]) for name in names}
            inputs = example["inputs"].tolist() if "inputs" in example else []
            rows.append(ChoiceRow(example, inputs, example["targets"].tolist(), texts))
        if not any(row.example["is_correct"] for row in rows):
            raise UserError(f'Question {number} of the task "{component.task.name}" has no right choice among {len(rows)}.')
        yield rows


def make_question(rows: Iterable[ChoiceRow], inputs: list[list[int]], dataset: str, prompt: str) -> Question:
    """Returns the question that consists of these choices. `inputs` are the ids that the model reads, one list per choice."""
    rows = list(rows)
    labels = tuple(number for number, row in enumerate(rows) if row.example["is_correct"])
    return Question(
        inputs[0] if all(ids == inputs[0] for ids in inputs) else tuple(inputs),
        tuple(row.targets for row in rows),
        labels if len(labels) > 1 else labels[0],
        dataset,
        prompt,
        float(rows[0].example.get("weight", 1.0)),
        tuple(len(row.texts["targets"]) for row in rows),
    )


def ranking_examples(mixture: ResolvedMixture, component: Component, split: str, truncate: Callable) -> Iterator[Example]:
    """Yields a task's questions for `t5x_lab infer`. See `inference.task_examples.read_task_examples`."""
    dataset, prompt = dataset_and_prompt(mixture.name, component.task)
    for number, rows in enumerate(group_by_question(choice_rows(component, split), component)):
        inputs = [truncate(component, row.inputs) for row in rows]
        question = make_question(rows, [[*component.input_prefix, *ids] for ids in inputs], dataset, prompt)
        record = {"task": component.task.name, **question_record(rows, question)}
        location = f'task "{component.task.name}", {split}, question {number}'
        cut = max(len(row.inputs) - len(ids) for row, ids in zip(rows, inputs, strict=True))
        yield Example(record, record["inputs"], None, location, question, cut=cut)


def dataset_and_prompt(mixture: str, task: seqio.Task) -> tuple[str, str]:
    """Returns the data set and the prompt under which a task is reported.

    They are the task's attributes `data_set` and `prompt` if it has them. Else each sub-mixture of the mixture is a data set,
    and its tasks are the prompts.
    """
    if getattr(task, "data_set", ""):
        return task.data_set, task.prompt
    sub_mixtures = seqio.MixtureRegistry.get(mixture)._sub_mixtures if mixture in seqio.MixtureRegistry.names() else []
    names = [sub.name for sub in sub_mixtures if task.name in {member.name for member in sub.tasks}]
    return (names[0], task.name) if names else (task.name, "only")


def question_record(rows: list[ChoiceRow], question: Question) -> dict:
    """Returns a question as an object of a .jsonl file."""
    return {
        "inputs": rows[0].texts.get("inputs", ""),
        "choices": [row.texts["targets"] for row in rows],
        "label": question.label,
        "dataset": question.dataset,
        "prompt": question.prompt,
        "weight": question.weight,
    }
