"""How T5's suite is measured otherwise than by the `t5` library: what is invalid is wrong, and ROUGE is not left to chance."""

import math
from collections.abc import Sequence

import numpy as np
from rouge_score import rouge_scorer

WRONG = -1.0  # below every similarity
LARGEST = 5.0
ROUGE = ("rouge1", "rouge2", "rougeLsum")


def similarity(text: str, **unused: object) -> float:
    """The similarity that a text says, of STS-B: 0 to 5. `WRONG` for what is no number or none of these.

    The paper says 1 to 5 (section 2.4), but a sixth of the labels lie below 1; the `t5` library takes any number, "nan" too.
    """
    try:
        value = float(text)
    except ValueError:
        return WRONG
    return value if math.isfinite(value) and 0.0 <= value <= LARGEST else WRONG


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean F1 in percent of ROUGE-1, -2 and -Lsum (Lin 2004); the `t5` library takes the median of 1,000 random samples' means.

    Args:
      targets, predictions: texts; a line, or what ends with " . ", is a sentence.
    """
    scorer = rouge_scorer.RougeScorer(ROUGE)
    lines = lambda text: text.replace(" . ", " .\n")
    found = [scorer.score(lines(target), lines(text)) for target, text in zip(targets, predictions, strict=True)]
    return {key: 100.0 * float(np.mean([scores[key].fmeasure for scores in found])) for key in ROUGE}
