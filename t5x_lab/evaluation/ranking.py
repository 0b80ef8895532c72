"""Rank classification on SeqIO tasks whose examples are the choices, one after the other, as T5's preprocessor makes them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import seqio
import tensorflow as tf

from t5x_lab.config.errors import UserError
from t5x_lab.data.failures import naming_what_fails
from t5x_lab.data.mixture import Part, WeightedTasks
from t5x_lab.data.reading import in_order
from t5x_lab.evaluation import accuracy, rank
from t5x_lab.evaluation.config import Measured, RankingEvaluation
from t5x_lab.evaluation.examples import Example, text_of
from t5x_lab.evaluation.rank import Answer, Question
from t5x_lab.evaluation.task_metrics import CutInputs
from t5x_lab.evaluation.tasks import EvaluatedTasks, evaluated_tasks, naming
from t5x_lab.observe.console import say

_NEEDED = ("targets", "idx", "is_correct")


class RankedTasks:
    """Ranks the choices of the same questions every time.

    Args:
      found: the tasks.
      how: see there.

    Attributes:
      settings: see `Evaluation.prepare`.
    """

    def __init__(self, found: EvaluatedTasks, how: RankingEvaluation):
        self._found, self._how, self.settings = found, how, found.settings(how)
        self._asked: dict[str, tuple[list[list[Row]], list[Question]]] = {}
        self._datasets = {part.task.name: rows_of(part, found.data.eval_split) for part in found.parts}
        self._chosen_on: RankedTasks | None = None

    @classmethod
    def of(cls, how: RankingEvaluation, model: Any) -> "RankedTasks | None":
        found = evaluated_tasks(how, model)
        with naming(how.name):
            made = cls(found, how) if found.parts else None
        if made and how.choose_on:
            other = dataclasses.replace(how, split=how.choose_on, choose_on=None, outputs=False)
            made._chosen_on = cls.of(other, model)
        return made

    def __call__(self, model: Any) -> Measured:
        """`accuracy.accuracies` of each task, and the `accuracy.report` over all of them."""
        found = self._measured(model)
        if self._chosen_on and found.report:
            others = self._chosen_on._measured(model)
            failures = {**found.failures, **{f"{task} ({self._how.choose_on})": why for task, why in others.failures.items()}}
            report = (
                accuracy.with_best_prompts(found.report, others.report, self._how.choose_on or "")
                if others.report
                else found.report
            )
            found = dataclasses.replace(found, report=report, failures=failures)
        return found

    def _measured(self, model: Any) -> Measured:
        metrics: dict[str, dict] = {}
        failures: dict[str, str] = {}
        lines: dict[str, list] = {}
        asked: list[Question] = []
        answered: list[Answer] = []
        read = lambda part: self._read(part, model)
        for part, (rows, questions) in self._found.read_each(read, failures, "nothing is ranked"):
            name = part.task.name
            found = rank.answers(model, questions, batch_size=self._how.batch_size)
            metrics[name] = accuracy.accuracies(questions, found)
            asked, answered = [*asked, *questions], [*answered, *found]
            if self._how.outputs:
                lines[name] = [
                    {**record_of(of, question), **answer.as_json(question)}
                    for of, question, answer in zip(rows, questions, found, strict=True)
                ]
        return Measured(metrics, lines, report=accuracy.report(asked, answered) if asked else {}, failures=failures)

    def _read(self, part: Part, model: Any) -> tuple[list[list["Row"]], list[Question]]:
        """The choices of a task's questions, and the questions; read once."""
        if part.task.name not in self._asked:
            data = self._found.data
            with naming_what_fails([part], data.eval_split):
                rows = list(itertools.islice(questions_in(self._datasets[part.task.name], part), self._how.num_examples))
            self._asked[part.task.name] = rows, self._questions(part, rows, model)
        return self._asked[part.task.name]

    def _questions(self, part: Part, grouped: list[list["Row"]], model: Any) -> list[Question]:
        rows = [row for rows in grouped for row in rows]
        examples = [row.example for row in rows]
        longest = max((len(row.targets) for row in rows), default=0)
        inputs = CutInputs(model, part, examples, self._how, longest)
        if inputs.cut:
            say(f'{inputs.cut} of {len(rows)} inputs of task "{part.task.name}" were cut to {inputs.most} tokens.')
        dataset, prompt = dataset_and_prompt(self._found.tasks.name, part.task)
        cut = iter(inputs.ids)
        return [question_of_rows(rows, [next(cut) for _ in rows], dataset, prompt) for rows in grouped]


@dataclasses.dataclass(frozen=True)
class Row:
    """A choice of a question.

    Attributes:
      example: of the task.
      inputs, targets: token ids.
      texts: of inputs and targets.
    """

    example: dict
    inputs: list[int]
    targets: list[int]
    texts: dict[str, str]


def rows_of(part: Part, split: str) -> tf.data.Dataset:
    """The choices of a task.

    Raises:
      UserError: when its preprocessors do not make them.
    """
    found = in_order(part, split)
    missing = [name for name in _NEEDED if name not in found.element_spec]
    if missing:
        raise UserError(
            f'The task "{part.task.name}" makes no "{missing[0]}", so its choices cannot be ranked; it makes '
            f"{', '.join(found.element_spec)}. Prepare it with t5.data.preprocessors.rank_classification."
        )
    return found


def questions_in(rows: tf.data.Dataset, part: Part) -> Iterator[list[Row]]:
    """The choices of each question, those that stand together and have its number."""
    features = part.task.output_features
    of_row = lambda example: int(example["idx"][0])
    for number, group in itertools.groupby(rows.as_numpy_iterator(), of_row):
        found = []
        for example in group:
            names = [name for name in ("inputs", "targets") if name in example]
            vocabulary = {name: features[name if name in features else "targets"].vocabulary for name in names}
            texts = {name: text_of(example, name, vocabulary[name]) for name in names}
            inputs = example["inputs"].tolist() if "inputs" in example else []
            found.append(Row(example, inputs, example["targets"].tolist(), texts))
        if not any(row.example["is_correct"] for row in found):
            raise UserError(f'Question {number} of the task "{part.task.name}" has no right choice among {len(found)}.')
        yield found


def question_of_rows(rows: Iterable[Row], inputs: list[list[int]], dataset: str, prompt: str) -> Question:
    """The question of these choices, whose `inputs` are as the model reads them."""
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


def ranked_examples(tasks: WeightedTasks, part: Part, split: str, cut_to: Callable) -> Iterator[Example]:
    """A task's questions as `t5x_lab infer` takes them; see `examples.task_examples`."""
    dataset, prompt = dataset_and_prompt(tasks.name, part.task)
    for number, rows in enumerate(questions_in(rows_of(part, split), part)):
        inputs = [cut_to(part, row.inputs) for row in rows]
        question = question_of_rows(rows, [[*part.before_inputs, *ids] for ids in inputs], dataset, prompt)
        record = {"task": part.task.name, **record_of(rows, question)}
        where = f'task "{part.task.name}", {split}, question {number}'
        cut = max(len(row.inputs) - len(ids) for row, ids in zip(rows, inputs, strict=True))
        yield Example(record, record["inputs"], None, where, question, cut=cut)


def dataset_and_prompt(name: str, task: seqio.Task) -> tuple[str, str]:
    """The data set of a task of the mixture `name`, and which of its prompts it is: as the task itself says, in `data_set` and
    `prompt`; else of mixtures in a mixture each is a data set, whose tasks are the prompts."""
    if getattr(task, "data_set", ""):
        return task.data_set, task.prompt
    mixtures = seqio.MixtureRegistry.get(name)._sub_mixtures if name in seqio.MixtureRegistry.names() else []
    own = [mixture.name for mixture in mixtures if task.name in {part.name for part in mixture.tasks}]
    return (own[0], task.name) if own else (task.name, "only")


def record_of(rows: list[Row], question: Question) -> dict:
    """A question, as a line of a .jsonl file has it."""
    return {
        "inputs": rows[0].texts.get("inputs", ""),
        "choices": [row.texts["targets"] for row in rows],
        "label": question.label,
        "dataset": question.dataset,
        "prompt": question.prompt,
        "weight": question.weight,
    }
