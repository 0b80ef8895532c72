"""Sample texts that a model generates from the same prompts while it is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import seqio

from t5x_lab.config.errors import UserError
from t5x_lab.evaluation.evaluation import EvaluationResult
from t5x_lab.evaluation.results import PROMPTS


class SamplesEvaluator:
    """Generates one text from each prompt.

    Args:
      prompts: texts to continue, or inputs of an encoder.
      options: arguments of `Run.generate`.
      model: a `t5x_lab.runs.model.run.Run`.

    Attributes:
      settings: see `Evaluation.prepare`.

    Raises:
      UserError: for a network that cannot generate.
    """

    def __init__(self, prompts: Sequence[str], options: Mapping[str, Any], model: Any):
        if not model.can_generate:
            raise UserError("SamplesEvaluation generates text, which needs a network with a decode step.")
        self._prompts, self._options = list(prompts), dict(options)
        self.settings = {"prompts": self._prompts, **self._options}

    def __call__(self, model: Any) -> EvaluationResult:
        texts = [text for (text,) in model.generate(self._prompts, **self._options)]
        samples = {prompt: seqio.metrics.Text(text) for prompt, text in zip(self._prompts, texts)}
        return EvaluationResult({}, media={PROMPTS: samples})
