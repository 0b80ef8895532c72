"""Metrics of the T5 suite that differ from the `t5` library's: invalid predictions are wrong, and ROUGE is deterministic."""

import math
from collections.abc import Sequence

import numpy as np
from rouge_score import rouge_scorer

INVALID = -1.0  # below every similarity
MAX_SIMILARITY = 5.0
ROUGE = ("rouge1", "rouge2", "rougeLsum")


def similarity(text: str, **unused: object) -> float:
    """Parses a similarity of STS-B, 0 to 5. Returns `INVALID` for any other text.

    The paper has 1 to 5 (section 2.4), but a sixth of the labels are below 1. The `t5` library accepts any number, "nan" too.
    """
    try:
        value = float(text)
    except ValueError:
        return INVALID
    return value if math.isfinite(value) and 0.0 <= value <= MAX_SIMILARITY else INVALID


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 of ROUGE-1, -2 and -Lsum in percent (Lin 2004). The `t5` library returns a bootstrap median.

    Args:
      targets, predictions: texts. Sentences end with a line break or " . ".
    """
    scorer = rouge_scorer.RougeScorer(ROUGE)
    lines = lambda text: text.replace(" . ", " .\n")
    scores = [scorer.score(lines(target), lines(text)) for target, text in zip(targets, predictions, strict=True)]
    return {key: 100.0 * float(np.mean([score[key].fmeasure for score in scores])) for key in ROUGE}
