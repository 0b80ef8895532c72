"""Random baseline of lm-eval tasks: the expected score of guessing, computed from their questions."""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence


def chance(questions: Iterable[Sequence[tuple[int, int]]]) -> float:
    """Expected accuracy of guessing, each choice with equal probability.

    Args:
      questions: of each question the choices and the right ones among them, [(4, 1)]; of one that counts only where several
        are answered right, as in MultiRC, those of each. One whose answer is to be written has no right choice, [(1, 0)].
    """
    return statistics.fmean(math.prod(right / choices for choices, right in question) for question in questions)


def random_baseline(samples: Sequence[Mapping], is_choice: bool) -> float:
    """`chance` on what lm-eval has asked in a task.

    Args:
      samples: of the task, as lm-eval logs them.
      is_choice: whether the model chooses; else it is right where it would write the answer.
    """
    questions: dict[Hashable, list[tuple[int, int]]] = {}
    for row in (row for row in samples if row["filter"] == samples[0]["filter"]):
        idx, target = row["doc"].get("idx"), row["target"]
        of_passage = isinstance(idx, dict) and {"paragraph", "question"} <= idx.keys()
        question = (idx["paragraph"], idx["question"]) if of_passage else row["doc_id"]
        right = (len(target) if isinstance(target, list) else 1) if is_choice else 0
        questions.setdefault(question, []).append((len(row["arguments"]), right))
    return chance(questions.values())
