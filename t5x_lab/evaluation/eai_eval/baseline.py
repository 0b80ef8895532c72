"""What guessing scores on a task of EAI-Eval, counted from its own questions."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from typing import Any


def chance(questions: Iterable[Sequence[tuple[int, int]]]) -> float:
    """Expected accuracy of guessing, each choice with equal probability.

    Args:
      questions: of each question the choices and the right ones among them, [(4, 1)]; of one that counts only where several
        are answered right, as in MultiRC, those of each. One whose answer is to be written has no right choice, [(1, 0)].
    """
    return statistics.fmean(math.prod(right / choices for choices, right in question) for question in questions)


def random_baseline(task: Any) -> float:
    """`chance` on an lm-eval task of this folder, with the records that it was loaded with."""
    to_choose = task.config.doc_to_choice is not None and task.config.doc_to_target != []
    questions: dict[Hashable, list[tuple[int, int]]] = {}
    for number, doc in enumerate(task.task_docs):
        idx = doc.get("idx")
        question = (idx["paragraph"], idx["question"]) if isinstance(idx, dict) else number
        questions.setdefault(question, []).append((len(task.doc_to_choice(doc)), 1) if to_choose else (1, 0))
    return chance(questions.values())
