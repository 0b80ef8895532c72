"""A quality classifier of the user's own, as GPT-3 (Brown et al., 2020, appendix A) and DCLM (Li et al., 2024) have one."""

import math
from collections.abc import Callable

from t5x_lab.config.errors import UserError
from t5x_lab.corpora.page import Page


def quality_score(page: Page, score: Callable[[str], float] | None = None, minimum: float = 0.5) -> Page | None:
    """Drops pages with a score below `minimum`.

    Args:
      page: the page.
      score: f(text) -> score, such as the probability that a classifier gives.
      minimum: lowest score of pages that are kept.
    """
    if score is None:
        raise UserError("The rule quality_score needs a function f(text) -> score. Set quality_score.score = @my_module.score.")
    value = score(page.text)
    if math.isnan(value):
        raise ValueError("the score is NaN")
    return page if value >= minimum else None
