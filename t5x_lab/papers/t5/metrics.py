"""Metrics of the T5 suite that differ from the `t5` library's: invalid predictions are wrong, and ROUGE is deterministic."""

import math
from collections.abc import Sequence

from t5x_lab.prompts.tasks import generation_metrics

INVALID = -1.0  # below every similarity
MAX_SIMILARITY = 5.0


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
    return generation_metrics.rouge([[target] for target in targets], predictions)
