"""Answers of a model to multiple-choice questions."""

from collections.abc import Sequence
from typing import Any

from t5x_lab.evaluation.questions import Answer, Question, make_answer


def answer_questions(model: Any, questions: Sequence[Question], names: Sequence[str] | None = None, **options) -> list[Answer]:
    """Scores every choice of every question. Inputs that several choices share are read once.

    Args:
      model: see `t5x_lab.evaluation`.
      questions: any number of them.
      names: names of the questions in messages.
      options: further arguments of `Run.scores`.
    """
    names = names or [f"Question {number}" for number in range(len(questions))]
    pair_names = [name for name, question in zip(names, questions, strict=True) for _ in question.choices]
    inputs, targets = zip(*(pair for question in questions for pair in question.pairs), strict=True) if questions else ((), ())
    scores = model.scores(list(inputs), list(targets), names=pair_names, **options)
    answers, start = [], 0
    for question in questions:
        rows = slice(start, start + len(question.choices))
        start = rows.stop
        answers.append(
            make_answer(
                scores.log_prob[rows].tolist(),
                scores.tokens[rows].tolist(),
                list(question.characters or map(len, question.choices)),
                cut=int(scores.cut[rows].max()),
            )
        )
    return answers
